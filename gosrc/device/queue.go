package device

// This file defines the queue of a device and its slots.

import (
	"context"
	"time"
	"unsafe"
)

// A Slot is the staging memory of one piece. The caller that got it from a Queue owns it until it calls Submit or Put.
type Slot interface {
	// Memory returns the slot's bytes, which are in pinned memory if the device needs that.
	Memory() []byte
	// View replaces the slot's own bytes with b until the slot is returned. b must not be longer than the slot and must
	// not change until then. If the device needs registered memory, b must be registered.
	View(b []byte)
	// ViewMirror returns the device memory to which Submit copies the slot's bytes, or nil if there is none. A caller
	// of ViewMirror writes the bytes there before Submit. Submit then copies nothing and only accepts raw chunks.
	ViewMirror() unsafe.Pointer
	// CheckOnSubmit makes Submit compare the checksums of tasks that have one, if the queue supports it (CanCheck).
	CheckOnSubmit()
}

// A Reader reads bytes of a source directly into device memory.
type Reader interface {
	// ReadInto reads n bytes from offset off to dst, which is in a slot's mirror (ViewMirror). It reads all of them or
	// returns an error, like source.Source.
	ReadInto(ctx context.Context, dst unsafe.Pointer, n, off int64) error
}

// A TraceFunc is called with what a device did ("copy" or "decode"), the stream, the times, and the number of bytes.
type TraceFunc = func(verb string, stream int, begin, end time.Time, bytes int64)

// A Queue orders the work of one device for one load. It has a fixed set of slots, each with one owner at a time. It
// accepts staged pieces and decodes their chunks to the destinations. It is safe for concurrent use.
type Queue interface {
	// Get waits for a free slot, or until ctx ends.
	Get(ctx context.Context) (Slot, error)
	// GetFor is like Get for one of several readers, numbered from 0. Each reader fills separate slots. It prefers a
	// slot that the same reader has filled before, which is near the reader's core.
	GetFor(ctx context.Context, reader int) (Slot, error)
	// Put returns a slot that was not submitted. It panics if a slot is returned twice.
	Put(s Slot)
	// Submit decodes the tasks to their destinations and takes the slot back. Src of each task is in the first n bytes
	// of the slot. done is called once per task when its bytes have been written or its error is known, possibly later
	// and on another goroutine. done must not wait for the queue. If Submit itself returns an error, done is not
	// called.
	Submit(s Slot, n int64, tasks []DecodeTask, done func(task int, err error)) error
	// Drain waits until every done call has returned or ctx ends. If the device is broken, it returns the error that
	// broke it.
	Drain(ctx context.Context) error
	// CanCheck reports whether Submit compares checksums after a slot's CheckOnSubmit. A wrong checksum is an error
	// with errs.RuleChecksum, and the tensor may then contain wrong bytes. If CanCheck is false, the caller must
	// compare checksums before Submit.
	CanCheck() bool
	// Asynchronous reports whether Submit returns before its tasks are done. The device then measures times separately.
	Asynchronous() bool
	// TraceTimes makes an asynchronous queue report what it did with each piece after the piece has been decoded. nil
	// stops that. No piece may be in flight.
	TraceTimes(trace TraceFunc) error
	// PinnedBytes returns the size of all slots in host memory, in bytes.
	PinnedBytes() int64
	// Close waits until every slot has been returned and all work has ended, and frees the queue.
	Close()
}
