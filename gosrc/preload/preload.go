// Package preload is the load that starts by itself, when overwire is imported
// with a preload variable set. It needs neither Python nor its lock: it opens,
// reads and decodes while the interpreter imports other things. What it has
// loaded is handed over once, to the first load of the same files.
package preload

import (
	"context"
	"errors"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/overwire/overwire/gosrc/fault"
	"github.com/overwire/overwire/gosrc/internal/spawn"
	"github.com/overwire/overwire/gosrc/load"
	"github.com/overwire/overwire/gosrc/source/open"
)

// A Preload is one background load, from its opening on.
type Preload struct {
	key     string
	cancel  context.CancelCauseFunc // ends the opening
	opened  chan struct{}           // closed when the three below are set
	model   *load.Model
	loading *load.Loading
	err     error
}

// errCancelled is what the opening of a preload that was given up fails with.
var errCancelled = fault.New(fault.ErrCancelled, "by the caller")

var (
	mu    sync.Mutex
	ready = map[string]*Preload{}
)

// Start begins to load everything that spec names. A second Start of the same
// files returns the first, unless that was handed over already.
func Start(spec load.Spec, opt load.Options) *Preload {
	key := keyOf(spec)
	mu.Lock()
	defer mu.Unlock()
	if p := ready[key]; p != nil {
		return p
	}
	ctx, cancel := context.WithCancelCause(context.Background())
	p := &Preload{key: key, cancel: cancel, opened: make(chan struct{})}
	ready[key] = p
	spawn.Go("preload", func() {
		defer cancel(nil)
		defer close(p.opened)
		p.err = spawn.Guard("preload", func() (err error) {
			if p.model, err = load.Open(ctx, spec); err != nil {
				return err
			}
			p.loading, err = p.model.Start(nil, opt)
			return err
		})
		if errors.Is(p.err, context.Canceled) { // by whichever part noticed first
			p.err = errCancelled
		}
	})
	return p
}

// Take finds the preload of what spec names and hands it over: the caller owns it,
// and no later Take gets it. It returns nil if there is none.
func Take(spec load.Spec) *Preload {
	key := keyOf(spec)
	mu.Lock()
	defer mu.Unlock()
	p := ready[key]
	delete(ready, key)
	return p
}

// Drop forgets the preload, unless it was handed over, and cancels it.
func (p *Preload) Drop() {
	mu.Lock()
	mine := ready[p.key] == p
	if mine {
		delete(ready, p.key)
	}
	mu.Unlock()
	if !mine {
		return
	}
	p.Discard()
}

// Discard ends a preload that was handed over, or is dropped, wherever it is, and
// frees what it has. It does not wait.
func (p *Preload) Discard() {
	p.cancel(errCancelled)
	spawn.Go("preload discard", func() {
		<-p.opened
		if p.loading != nil {
			p.loading.Close()
		}
		if p.model != nil {
			p.model.Close()
		}
	})
}

// Opened waits, at most for d (for ever if negative), until the files are open
// and the load runs, and returns both. done is false when d has passed first.
func (p *Preload) Opened(d time.Duration) (m *load.Model, l *load.Loading, done bool, err error) {
	select {
	case <-p.opened: // also when d is 0: a timer might win against it
		return p.model, p.loading, true, p.err
	default:
	}
	var late <-chan time.Time // never
	if d >= 0 {
		t := time.NewTimer(d)
		defer t.Stop()
		late = t.C
	}
	select {
	case <-p.opened:
		return p.model, p.loading, true, p.err
	case <-late:
		return nil, nil, false, nil
	}
}

// keyOf names a list of files however their paths were written, and how they
// are reached: nobody gets what another's credentials have fetched.
func keyOf(spec load.Spec) string {
	keys := make([]string, len(spec.URIs))
	for i, u := range spec.URIs {
		keys[i] = u
		path := u
		switch open.Scheme(u) {
		case "":
		case "file":
			p, err := open.FilePath(u)
			if err != nil {
				continue
			}
			path = p
		default:
			continue
		}
		if abs, err := filepath.Abs(path); err == nil {
			path = abs
		}
		if real, err := filepath.EvalSymlinks(path); err == nil {
			path = real
		}
		keys[i] = path
	}
	return strings.Join(keys, "\x00") + spec.Storage.Key()
}
