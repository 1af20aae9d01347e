// Package parts implements source.Draft for stores that receive an object as numbered parts of one size and
// make it visible when all parts have arrived.
//
// Bytes arrive by offset, in almost ascending order. The beginning of a file (its header) arrives last because
// it is known last. A part is sent as soon as each of its bytes was written or skipped. Memory holds the copied
// bytes of parts that are incomplete or being sent. New limits the number of parts that are sent in parallel; a
// writer that completes another part waits.
package parts

import (
	"bytes"
	"cmp"
	"context"
	"slices"
	"sync"
	"time"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/sizes"
	"github.com/overwire/overwire/gosrc/internal/spawn"
)

// A Store receives the parts of one object.
type Store interface {
	URI() string
	// Part sends part k, counted from 0. Its content is the concatenation of p. Calls run in parallel. Part
	// does not retain p.
	Part(ctx context.Context, k int, p [][]byte) error
	// Publish makes an object of n parts visible. If the object fits into one part, no part was sent: n is 0
	// and whole is its content.
	Publish(ctx context.Context, n int, whole []byte) error
	// UndoPublish removes the published object; see source.Draft.
	UndoPublish(ctx context.Context) error
	// Abort removes the parts that were sent. It is called at most once, and not after a successful Publish.
	Abort()
}

// A Draft implements source.Draft.
type Draft struct {
	store Store
	part  int64
	ctx   context.Context // new calls do not begin after it ends
	stop  context.CancelCauseFunc
	cut   context.CancelCauseFunc // cancels the calls that have begun
	sends context.Context         // context of the calls that have begun

	mu    sync.Mutex
	open  map[int]*partial // not sent yet
	sent  map[int]bool
	free  [][]byte
	size  int64
	err   error // the first error
	ended bool

	tokens chan struct{} // one for each part being sent
}

// A partial is an incomplete part.
type partial struct {
	buf    []byte // copied bytes, zeros elsewhere; nil if nothing was copied
	views  []piece
	filled int64
}

// A piece is a range of a part that refers to the caller's bytes.
type piece struct {
	p  []byte
	at int64
}

// zeros fill skipped ranges of parts without a buffer.
var zeros = make([]byte, 64<<10)

// listBytes returns the first n bytes of the part, in order.
func (t *partial) listBytes(n int64) (all [][]byte) {
	slices.SortFunc(t.views, func(a, b piece) int { return cmp.Compare(a.at, b.at) })
	end := int64(0)
	fillTo := func(to int64) {
		if t.buf != nil && end < to {
			all = append(all, t.buf[end:to])
			end = to
		}
		for ; end < to; end += min(to-end, int64(len(zeros))) {
			all = append(all, zeros[:min(to-end, int64(len(zeros)))])
		}
	}
	for _, one := range t.views {
		fillTo(one.at)
		all = append(all, one.p)
		end += int64(len(one.p))
	}
	fillTo(n)
	return all
}

// New begins a draft with parts of size bytes. parallel is the number of parts that may be sent in parallel.
func New(ctx context.Context, store Store, size int64, parallel int) *Draft {
	d := &Draft{store: store, part: size, open: map[int]*partial{}, sent: map[int]bool{},
		tokens: make(chan struct{}, parallel)}
	d.ctx, d.stop = context.WithCancelCause(ctx)
	d.sends, d.cut = context.WithCancelCause(context.WithoutCancel(ctx))
	return d
}

// URI returns the name of the object.
func (d *Draft) URI() string { return d.store.URI() }

// Write copies p; see source.Draft.
func (d *Draft) Write(p []byte, off int64) error { return d.takeBytes(p, off, false) }

// WriteView does not copy p; see source.Draft.
func (d *Draft) WriteView(p []byte, off int64) error { return d.takeBytes(p, off, true) }

func (d *Draft) takeBytes(p []byte, off int64, view bool) error {
	for len(p) > 0 {
		k, at := int(off/d.part), off%d.part
		n := min(int64(len(p)), d.part-at)
		if err := d.fillPart(k, at, n, p[:n], view); err != nil {
			return err
		}
		p, off = p[n:], off+n
	}
	return nil
}

// Skip counts a range as written; see source.Draft.
func (d *Draft) Skip(lo, hi int64) error {
	for lo < hi {
		k, at := int(lo/d.part), lo%d.part
		n := min(hi-lo, d.part-at)
		if err := d.fillPart(k, at, n, nil, false); err != nil {
			return err
		}
		lo += n
	}
	return nil
}

// fillPart adds n bytes to part k and sends the part when it is complete. If p is nil, the bytes are zeros.
func (d *Draft) fillPart(k int, at, n int64, p []byte, view bool) error {
	if err := d.lockDraft(); err != nil {
		return err
	}
	t := d.partAt(k)
	if view {
		t.views = append(t.views, piece{p, at})
	} else if p != nil && t.buf == nil {
		t.buf = d.newBuffer()
	}
	d.mu.Unlock()

	if !view && p != nil {
		copy(t.buf[at:], p)
	}

	d.mu.Lock()
	t.filled += n
	full := t.filled == d.part
	d.mu.Unlock()
	// The first part is not sent yet: an object of one part is passed to Publish as a whole.
	if !full || k == 0 {
		return nil
	}
	return d.sendPart(k, t, d.part)
}

// partAt returns part k, and creates it if necessary. The caller holds d.mu.
func (d *Draft) partAt(k int) *partial {
	t := d.open[k]
	if t == nil {
		t = &partial{}
		d.open[k] = t
	}
	return t
}

// newBuffer returns a zeroed buffer for a part. The caller holds d.mu.
func (d *Draft) newBuffer() []byte {
	if n := len(d.free); n > 0 {
		b := d.free[n-1]
		d.free = d.free[:n-1]
		clear(b)
		return b
	}
	return make([]byte, d.part)
}

// lockDraft locks d.mu. If the draft cannot continue, it returns an error and does not hold the lock.
func (d *Draft) lockDraft() error {
	d.mu.Lock()
	err := d.failure()
	if err != nil {
		d.mu.Unlock()
	}
	return err
}

// failure returns an error if the draft cannot continue. The caller holds d.mu.
func (d *Draft) failure() error {
	switch {
	case d.err != nil:
		return d.err
	case d.ctx.Err() != nil:
		return errs.FromOS(context.Cause(d.ctx))
	case d.ended:
		return errs.New(errs.ErrArgument, "the draft has ended")
	}
	return nil
}

// sendPart waits until another part may be sent, and sends part k in the background.
func (d *Draft) sendPart(k int, t *partial, n int64) error {
	d.mu.Lock()
	delete(d.open, k)
	d.sent[k] = true
	d.mu.Unlock()
	select {
	case d.tokens <- struct{}{}:
	case <-d.ctx.Done():
		d.mu.Lock()
		defer d.mu.Unlock()
		return d.failure()
	}
	spawn.Go("source.part", func() {
		err := errs.New(errs.ErrEngine, "the function that sends a part did not return")
		defer func() {
			d.mu.Lock()
			if err != nil && d.err == nil {
				d.err = err
				d.stop(err)
			}
			if t.buf != nil {
				d.free = append(d.free, t.buf)
			}
			d.mu.Unlock()
			<-d.tokens
		}()
		err = d.store.Part(d.sends, k, t.listBytes(n))
	})
	return nil
}

// Finish sends the remaining parts; see source.Draft.
func (d *Draft) Finish(size int64) error {
	if err := d.lockDraft(); err != nil {
		return err
	}
	d.size = size
	d.mu.Unlock()
	if size > d.part {
		for k := range int(sizes.CeilDiv(size, d.part)) {
			d.mu.Lock()
			if d.sent[k] {
				d.mu.Unlock()
				continue
			}
			t := d.partAt(k)
			d.mu.Unlock()
			if err := d.sendPart(k, t, min(d.part, size-int64(k)*d.part)); err != nil {
				return err
			}
		}
	}
	d.waitForParts(d.ctx)
	d.mu.Lock()
	defer d.mu.Unlock()
	d.free = nil // Publish may be called much later
	return d.failure()
}

// Publish makes the object visible; see source.Draft.
func (d *Draft) Publish() error {
	if err := d.lockDraft(); err != nil {
		return err
	}
	n, whole := int(sizes.CeilDiv(d.size, d.part)), []byte(nil)
	if d.size <= d.part {
		n, whole = 0, bytes.Join(d.partAt(0).listBytes(d.size), nil)
	}
	d.mu.Unlock()
	if err := d.store.Publish(d.ctx, n, whole); err != nil {
		return err
	}
	d.mu.Lock()
	d.ended = true
	d.open, d.free = nil, nil
	d.mu.Unlock()
	d.stop(nil)
	d.cut(nil)
	return nil
}

// UndoPublish removes the published object; see source.Draft. The context of the draft may be cancelled.
func (d *Draft) UndoPublish() error { return d.store.UndoPublish(context.WithoutCancel(d.ctx)) }

// StopSends aborts the sends; see source.Draft.
func (d *Draft) StopSends() {
	d.stop(errs.ErrCancelled)
	d.cut(errs.ErrCancelled)
	d.waitForParts(context.Background())
}

// Drop ends the draft; see source.Draft.
func (d *Draft) Drop() {
	d.mu.Lock()
	hasEnded := d.ended
	d.ended = true
	d.mu.Unlock()
	if hasEnded {
		return
	}
	d.stop(errs.ErrCancelled)
	// Wait for parts that are nearly sent: a part that arrives after the abort would remain in the store.
	late, end := context.WithTimeout(context.Background(), grace)
	d.waitForParts(late)
	end()
	d.cut(errs.ErrCancelled)
	d.waitForParts(context.Background())
	d.open, d.free = nil, nil
	d.store.Abort()
}

const grace = time.Second

// waitForParts waits until no part is being sent or ctx ends. No send begins while it waits.
func (d *Draft) waitForParts(ctx context.Context) {
	for range cap(d.tokens) {
		select {
		case d.tokens <- struct{}{}:
			defer func() { <-d.tokens }()
		case <-ctx.Done():
			return
		}
	}
}
