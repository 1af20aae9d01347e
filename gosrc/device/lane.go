package device

import (
	"context"
	"unsafe"
)

// A Slot is one piece of staging memory. Whoever got it from a Lane owns it
// until Submit or Put.
type Slot interface {
	// Memory is the slot's bytes: pinned, where the device needs that.
	Memory() []byte
	// Borrow lets b take the place of the slot's own bytes until the slot is
	// back: memory of the caller's that is not longer, stays as it is, and was
	// registered with the device, where that needs it.
	Borrow(b []byte)
}

// A Twinned slot has a twin on the device, to which Submit copies its bytes.
type Twinned interface {
	// Twin is where that is. Whoever asks has put them there before Submit, which
	// then copies none, and takes raw chunks only.
	Twin() unsafe.Pointer
}

// A Reader brings bytes of a source straight into the device's memory.
type Reader interface {
	// ReadInto fills n bytes of a slot's twin at dst from off on, all of them, or
	// returns an error, as source.Source does.
	ReadInto(ctx context.Context, dst unsafe.Pointer, n, off int64) error
}

// A Lane is a device at work for one load: it takes staged pieces and lands
// their chunks. Any number of workers may use it at once.
type Lane interface {
	// Get waits for a free slot, or for the end of ctx.
	Get(ctx context.Context) (Slot, error)
	// Put gives a slot back that was not submitted.
	Put(s Slot)
	// Submit decodes the jobs, whose Src lie in the first n bytes of the slot,
	// to where they belong, and gives the slot back by itself. done is called
	// once for each job, perhaps later and by another goroutine, when the job's
	// bytes are in place or its error is known; it must not wait for the lane.
	// After an error of Submit itself, done is not called.
	Submit(s Slot, n int64, jobs []Job, done func(job int, err error)) error
	// Drain waits until every done call has returned, or for the end of ctx. It
	// returns the error that broke the device, if one did.
	Drain(ctx context.Context) error
	// Close waits for what is under way and releases the lane.
	Close()
}
