package device

import (
	"context"
	"time"
	"unsafe"
)

// A Slot is one piece of staging memory. The caller that got it from a Queue owns
// it until Submit or Put.
type Slot interface {
	// Memory is the slot's bytes: pinned, where the device needs that.
	Memory() []byte
	// View lets b take the place of the slot's own bytes until the slot is back:
	// memory of the caller's that is not longer, stays as it is, and was
	// registered with the device, where that needs it.
	View(b []byte)
	// DeviceMirror is the memory on the device to which Submit copies the slot's
	// bytes; nil: the device needs none. A caller that asks has put the bytes there
	// before Submit, which then copies none, and takes raw chunks only.
	DeviceMirror() unsafe.Pointer
}

// A Reader brings bytes of a source straight into the device's memory.
type Reader interface {
	// ReadInto fills n bytes at dst, in a slot's DeviceMirror, from off on, all of
	// them, or returns an error, as source.Source does.
	ReadInto(ctx context.Context, dst unsafe.Pointer, n, off int64) error
}

// A Span is told what a device did when: "copy" or "decode", on which of its
// streams, and how many bytes were copied or made.
type Span = func(verb string, stream int, begin, end time.Time, bytes int64)

// A Queue is the ordered work of one device for one load: a fixed set of slots,
// each with one owner at a time, of which it takes staged pieces and lands their
// chunks. Any number of workers may use it at once.
type Queue interface {
	// Get waits for a free slot, or for the end of ctx.
	Get(ctx context.Context) (Slot, error)
	// Put gives a slot back that was not submitted. Giving one back twice is a
	// bug, and panics.
	Put(s Slot)
	// Submit decodes the tasks, whose Src lie in the first n bytes of the slot,
	// to where they belong, and gives the slot back by itself. done is called
	// once for each task, perhaps later and by another goroutine, when the task's
	// bytes are in place or its error is known; it must not wait for the queue.
	// After an error of Submit itself, done is not called.
	Submit(s Slot, n int64, tasks []DecodeTask, done func(task int, err error)) error
	// Drain waits until every done call has returned, or for the end of ctx. It
	// returns the error that broke the device, if one did.
	Drain(ctx context.Context) error
	// Asynchronous says that Submit returns before its tasks are done, and that
	// the device has times of its own.
	Asynchronous() bool
	// Time has an asynchronous queue tell what it did with each piece, once that
	// has landed; nil: no more. Nothing is under way.
	Time(span Span) error
	// StagingBytes is the host memory of all slots.
	StagingBytes() int64
	// Close waits until every slot is back and for what is under way, and releases
	// the queue.
	Close()
}
