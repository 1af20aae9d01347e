package device

// The queue of a device: slots, and the pieces submitted in them.

import (
	"context"
	"time"
	"unsafe"
)

// A Slot is the staging memory of one piece. The caller that got it from a Queue
// owns it until Submit or Put.
type Slot interface {
	// Memory is the slot's bytes, in pinned memory if the device needs that.
	Memory() []byte
	// View replaces the slot's own bytes by b until the slot is back. b must not be
	// longer than the slot or change meanwhile, and must be registered with a
	// device that needs that.
	View(b []byte)
	// ViewMirror is the memory on the device to which Submit copies the slot's
	// bytes; nil: the device has none. A caller that asks for it puts the bytes
	// there itself before Submit, which then copies nothing and takes raw chunks
	// only.
	ViewMirror() unsafe.Pointer
	// CheckOnSubmit makes Submit compare the checksums of tasks that have one, if CanCheck says
	// that the queue does that.
	CheckOnSubmit()
}

// A Reader reads bytes of a source straight into device memory.
type Reader interface {
	// ReadInto fills n bytes at dst, in a slot's mirror (ViewMirror), from offset off, all
	// of them, or returns an error, as source.Source does.
	ReadInto(ctx context.Context, dst unsafe.Pointer, n, off int64) error
}

// A TraceFunc is called with what a device did: "copy" or "decode", on which
// stream, when, and how many bytes were copied or decoded.
type TraceFunc = func(verb string, stream int, begin, end time.Time, bytes int64)

// A Queue is the ordered work of one device for one load: a fixed set of slots,
// each with one owner at a time. It takes staged pieces and lands their chunks. It
// is safe for concurrent use.
type Queue interface {
	// Get waits for a free slot, or for the end of ctx.
	Get(ctx context.Context) (Slot, error)
	// GetFor is Get for one of several readers, 0 and up, that each fill slots of their own: it
	// prefers a slot that the same reader has filled and has near its core.
	GetFor(ctx context.Context, reader int) (Slot, error)
	// Put returns a slot that was not submitted. Returning one twice is a bug, and
	// panics.
	Put(s Slot)
	// Submit decodes the tasks, with Src in the first n bytes of the slot, to
	// their destinations, and takes the slot back by itself. done is called once
	// for each task, perhaps later and by another goroutine, when the task's bytes
	// are in place or its error is known; it must not wait for the queue. If Submit
	// itself returns an error, done is not called.
	Submit(s Slot, n int64, tasks []DecodeTask, done func(task int, err error)) error
	// Drain waits until every done call has returned, or for the end of ctx. It
	// returns the error that broke the device, if one did.
	Drain(ctx context.Context) error
	// CanCheck reports whether Submit compares checksums where a slot's CheckOnSubmit asks for it; a
	// wrong one is of errs.RuleChecksum, and the tensor may have got wrong bytes. Otherwise the caller
	// compares them before.
	CanCheck() bool
	// Asynchronous reports whether Submit returns before its tasks are done; the
	// device then has times of its own.
	Asynchronous() bool
	// TraceTimes makes an asynchronous queue report what it did with each piece once that
	// has landed; nil ends this. No piece may be in flight.
	TraceTimes(trace TraceFunc) error
	// PinnedBytes is the host memory of all slots.
	PinnedBytes() int64
	// Close waits until every slot is back and all work has ended, and frees the
	// queue.
	Close()
}
