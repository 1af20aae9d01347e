package device

// This file defines the queue of a device: slots, and the pieces submitted in them.

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
	// View replaces the slot's own bytes by b until the slot is returned. b must not be longer than the slot or
	// change meanwhile. If the device needs registered memory, b must be registered.
	View(b []byte)
	// ViewMirror is the memory on the device to which Submit copies the slot's bytes, nil if there is none. A
	// caller that asks for it writes the bytes there itself before Submit. Submit then copies nothing and only
	// takes raw chunks.
	ViewMirror() unsafe.Pointer
	// CheckOnSubmit makes Submit compare the checksums of tasks that have one, if the queue can (CanCheck).
	CheckOnSubmit()
}

// A Reader reads bytes of a source straight into device memory.
type Reader interface {
	// ReadInto fills n bytes at dst, in a slot's mirror (ViewMirror), from offset off. It reads all of them or
	// returns an error, as source.Source does.
	ReadInto(ctx context.Context, dst unsafe.Pointer, n, off int64) error
}

// A TraceFunc is called with what a device did: "copy" or "decode", on which stream, when, and for how many
// bytes.
type TraceFunc = func(verb string, stream int, begin, end time.Time, bytes int64)

// A Queue is the ordered work of one device for one load. It has a fixed set of slots, each with one owner at a
// time. It takes staged pieces and lands their chunks. It is safe for concurrent use.
type Queue interface {
	// Get waits for a free slot or the end of ctx.
	Get(ctx context.Context) (Slot, error)
	// GetFor is Get for one of several readers, numbered from 0, that each fill slots of their own. It prefers a
	// slot that the same reader has filled, since that is near the reader's core.
	GetFor(ctx context.Context, reader int) (Slot, error)
	// Put returns a slot that was not submitted. Returning a slot twice is a bug and panics.
	Put(s Slot)
	// Submit decodes the tasks, with Src in the first n bytes of the slot, to their destinations, and takes the
	// slot back. done is called once for each task when its bytes are in place or its error is known, perhaps
	// later and on another goroutine. done must not wait for the queue. If Submit itself returns an error, done
	// is not called.
	Submit(s Slot, n int64, tasks []DecodeTask, done func(task int, err error)) error
	// Drain waits until every done call has returned or ctx ends. It returns the error that broke the device, if
	// any.
	Drain(ctx context.Context) error
	// CanCheck reports whether Submit compares checksums after a slot's CheckOnSubmit. A wrong checksum is an
	// error of errs.RuleChecksum, and wrong bytes may be in the tensor then. If CanCheck is false, the caller
	// compares checksums before Submit.
	CanCheck() bool
	// Asynchronous reports whether Submit returns before its tasks are done. The device then measures times of
	// its own.
	Asynchronous() bool
	// TraceTimes makes an asynchronous queue report what it did with each piece after the piece has landed; nil
	// stops that. No piece may be in flight.
	TraceTimes(trace TraceFunc) error
	// PinnedBytes is the host memory of all slots.
	PinnedBytes() int64
	// Close waits until every slot is returned and all work has ended, and frees the queue.
	Close()
}
