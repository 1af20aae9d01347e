package hoststore

// This file puts files into a store in the background, while they are loaded or afterwards.

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"time"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/idle"
	"github.com/overwire/overwire/gosrc/internal/spawn"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/source/file"
)

// A pace keeps a put from slowing down the load of the same file. While the load runs, the put uses one thread. It runs
// only if the process leaves a core unused, and if the load reads through the page cache, so that the disk is read
// once. Otherwise the put ends with errLater, and starts again after the load.
type pace struct {
	loaded chan struct{} // closed when the load has ended
	read   source.File   // the file that the load reads
	cores  *idle.Cores   // used only by the thread that puts
	// The queue's mu guards these. isAdded: it was added to the queue. isLate: add it again after the load.
	isAdded, isLate bool
}

var errLater = errs.New(errs.ErrCancelled, "the put must wait for the end of a load")

// lookAtLoad is how long a put watches a load before it decides whether a core is unused.
const lookAtLoad = 50 * time.Millisecond

func (p *pace) isOver() bool {
	select {
	case <-p.loaded:
		return true
	default:
		return false
	}
}

// watchLoad watches a load that has just begun and may not use all cores yet. Only the thread that puts calls it.
func (p *pace) watchLoad(ctx context.Context) {
	p.cores = idle.New()
	select {
	case <-p.loaded:
	case <-ctx.Done():
	case <-time.After(lookAtLoad):
	}
}

// awaitCore waits for an unused core. It returns false after the load, and errLater if the put must wait until then.
func (p *pace) awaitCore() (isAhead bool, err error) {
	if p == nil || p.isOver() {
		return false, nil
	}
	if p.read.DirectBytes() == 0 && p.cores.Wait(p.isOver) {
		return true, nil
	}
	if p.isOver() {
		return false, nil
	}
	return false, errLater
}

// puts has the files that wait for a store. They are put into it in the background, one at a time.
var puts = &putQueue{seen: map[string]bool{}}

type putQueue struct {
	mu      sync.Mutex
	waiting []func()
	seen    map[string]bool // names that wait, and names that a store has refused
	running bool
}

// maxWaiting is how many files may wait, each with an open descriptor.
const maxWaiting = 256

// add queues an open file for the store at path. It does nothing if the file is waiting, if the same load has already
// added it, if the store has refused it, or if the queue is full.
func (q *putQueue) add(path, name string, fd int, uri string, p *pace) {
	key := path + "\x00" + name
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.seen[key] || p.isAdded && !p.isLate || len(q.waiting) >= maxWaiting {
		return
	}
	src, err := file.FromFD(fd, uri)
	if err != nil {
		return
	}
	q.seen[key], p.isAdded, p.isLate = true, true, false
	q.waiting = append(q.waiting, func() {
		defer src.Close()
		if q.putOne(path, key, src, p) {
			q.putOne(path, key, src, p)
		}
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
		q.mu.Lock()
		if len(q.waiting) == 0 {
			q.running = false
			q.mu.Unlock()
			return
		}
		next := q.waiting[0]
		q.waiting = q.waiting[1:]
		q.mu.Unlock()
		next()
	}
}

// putOne puts a file into a store. It returns true if the put must be repeated, because it gave way to a load that has
// ended meanwhile. If that load still runs, its end adds the file again.
func (q *putQueue) putOne(path, key string, src source.Source, p *pace) (repeat bool) {
	ctx := spawn.Context()
	p.watchLoad(ctx)
	err := putWith(ctx, path, src, func(c *Client) (string, error) {
		return c.putPaced(ctx, src, func(int64) {}, p)
	})
	if err != nil && !errors.Is(err, errLater) {
		var no *refusalError
		source.Notice(fmt.Sprintf("host store: %s is not kept in memory: %s",
			errs.OneLine(errs.RedactURI(src.URI())), errs.Message(err)))
		if errors.As(err, &no) && !errors.Is(err, errs.ErrMemory) { // would be refused again, after another copy
			return false
		}
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	if errors.Is(err, errLater) {
		if p.isOver() {
			return true
		}
		p.isLate = true
	}
	delete(q.seen, key)
	return false
}

// AwaitPuts waits until all files in the queue have been put, but at most d. It reports whether they have. Puts that
// must wait for the end of a load do not count.
func AwaitPuts(d time.Duration) bool {
	for end := time.Now().Add(d); ; time.Sleep(5 * time.Millisecond) {
		puts.mu.Lock()
		running := puts.running
		puts.mu.Unlock()
		if !running || time.Now().After(end) {
			return !running
		}
	}
}

// putWith connects to the store at path, and counts what put puts there.
func putWith(ctx context.Context, path string, src source.Source, put func(c *Client) (string, error)) error {
	client, err := Dial(ctx, path)
	if err != nil {
		return err
	}
	defer client.Close()
	state, err := put(client)
	if err == nil && state == "kept" {
		counts.puts.Add(1)
		counts.putBytes.Add(src.Size())
	}
	return err
}
