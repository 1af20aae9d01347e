package hoststore

// This file puts files into a store in the background, while they are loaded or afterwards.

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/idle"
	"github.com/overwire/overwire/gosrc/internal/spawn"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/source/file"
)

// A pace keeps a put from slowing down the load of the same file. While the load runs, the put uses one thread, and
// only if the process leaves a core unused. If the load reads directly from the disk, the put waits for its end. If
// it reads through the page cache, the file is read only once.
type pace struct {
	loaded <-chan struct{} // closed when the load has ended
	read   source.File     // the load's
	cores  *idle.Cores     // belongs to the thread that puts
	paused *atomic.Bool    // set while the put waits for the end of the load
}

// lookAtLoad is how long a put watches a load before it decides whether a core is unused.
const lookAtLoad = 50 * time.Millisecond

// awaitCore waits until the put may continue. It returns false if the load has ended; the put can then use all cores.
func (p *pace) awaitCore(ctx context.Context) bool {
	isOver := func() bool {
		select {
		case <-p.loaded:
			return true
		default:
			return ctx.Err() != nil
		}
	}
	if isOver() {
		return false
	}
	if p.read.DirectBytes() == 0 && p.cores.Wait(isOver) {
		return true
	}
	p.paused.Store(true)
	defer p.paused.Store(false)
	select {
	case <-p.loaded:
	case <-ctx.Done():
	}
	return false
}

// puts are the files that wait to be put into a store in the background, one at a time.
var puts = &putQueue{seen: map[string]bool{}}

type putQueue struct {
	mu      sync.Mutex
	waiting []func(ctx context.Context)
	seen    map[string]bool // names that wait, and names that a store has refused
	running bool
	cancel  context.CancelFunc // ends the put that is running
	paused  atomic.Bool        // it waits for the end of a load
}

// maxWaiting is how many files may wait, each with an open descriptor.
const maxWaiting = 256

// add puts an open file into the store at path, unless it was tried before.
func (q *putQueue) add(path, name string, fd int, uri string, p *pace) {
	key := path + "\x00" + name
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.seen[key] || len(q.waiting) >= maxWaiting {
		return
	}
	src, err := file.FromFD(fd, uri)
	if err != nil {
		return
	}
	q.seen[key] = true
	q.waiting = append(q.waiting, func(ctx context.Context) {
		defer src.Close()
		p.cores, p.paused = idle.New(), &q.paused
		select { // the load has just begun, and may not use its cores yet
		case <-p.loaded:
		case <-ctx.Done():
		case <-time.After(lookAtLoad):
		}
		if err := putFile(ctx, path, src, p); err != nil && ctx.Err() == nil {
			var no *refusalError
			source.Notice(fmt.Sprintf("host store: %s is not kept in memory: %s", errs.OneLine(errs.RedactURI(uri)),
				errs.Message(err)))
			if errors.As(err, &no) && !errors.Is(err, errs.ErrMemory) { // would be refused again, after another copy
				return
			}
		}
		q.mu.Lock()
		delete(q.seen, key)
		q.mu.Unlock()
	})
	if !q.running {
		q.running = true
		spawn.Go("host put", q.run)
	}
}

func (q *putQueue) run() {
	runtime.LockOSThread() // for idle.Cores
	defer runtime.UnlockOSThread()
	for {
		ctx, cancel := context.WithCancel(spawn.Context())
		q.mu.Lock()
		q.cancel = cancel
		if len(q.waiting) == 0 {
			q.running = false
			q.mu.Unlock()
			cancel()
			return
		}
		next := q.waiting[0]
		q.waiting = q.waiting[1:]
		q.mu.Unlock()
		next(ctx)
		cancel()
	}
}

// AwaitPuts waits up to d until no file waits to be put into a store, and reports whether that is so. It ends puts that
// wait for the end of a load; they start again at its end.
func AwaitPuts(d time.Duration) bool {
	for end := time.Now().Add(d); ; time.Sleep(5 * time.Millisecond) {
		puts.mu.Lock()
		running := puts.running
		if running && puts.paused.Load() {
			puts.cancel()
		}
		puts.mu.Unlock()
		if !running || time.Now().After(end) {
			return !running
		}
	}
}

// putFile puts a file into the store at path. p is nil if no load reads it.
func putFile(ctx context.Context, path string, src source.Source, p *pace) error {
	client, err := Dial(ctx, path)
	if err != nil {
		return err
	}
	defer client.Close()
	state, err := client.putPaced(ctx, src, func(int64) {}, p)
	if err == nil && state == "kept" {
		counts.puts.Add(1)
		counts.putBytes.Add(src.Size())
	}
	return err
}
