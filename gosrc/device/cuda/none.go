//go:build !cgo

package cuda

import (
	"context"
	"time"
	"unsafe"

	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/fault"
	"github.com/overwire/overwire/gosrc/tensor"
)

var errNone = fault.New(fault.ErrNotSupported, "CUDA: this build has no cgo")

// A Device is one GPU.
type Device struct{}

// A Queue is what one load needs of a device.
type Queue struct{}

// A Slot is one piece's staging memory.
type Slot struct{ Bytes []byte }

// Available says why there is no GPU.
func Available() error { return errNone }

// Info describes the GPUs.
func Info() ([]DeviceInfo, error) { return nil, errNone }

// Open opens a GPU.
func Open(int) (*Device, error) { return nil, errNone }

// Shutdown gives everything back that is kept between loads.
func Shutdown() {}

// Trim gives everything back that is kept between loads: nothing.
func Trim() error { return nil }

// Index is the number of the device.
func (d *Device) Index() int { return 0 }

// Used tells of a stream.
func (d *Device) Used(uintptr) {}

// Alloc allocates tensors.
func (d *Device) Alloc([]int64) ([]device.Memory, error) { return nil, errNone }

// Trim gives back what is kept between loads.
func (d *Device) Trim() error { return errNone }

// Free and total memory of the device.
func (d *Device) Free() (unused, total int64, err error) { return 0, 0, errNone }

// Read copies device memory to dst.
func (d *Device) Read([]byte, device.Memory) error { return errNone }

// Register pins memory.
func (d *Device) Register([]byte) error { return errNone }

// Unregister undoes it.
func (d *Device) Unregister([]byte, func()) {}

// Queue makes a queue.
func (d *Device) Queue(int, int64) (*Queue, error) { return nil, errNone }

// Prepare makes a queue.
func (d *Device) Prepare() {}

// Get waits for a slot.
func (l *Queue) Get(context.Context) (device.Slot, error) { return nil, errNone }

// Memory is the slot's bytes.
func (s *Slot) Memory() []byte { return s.Bytes }

// View lets registered memory take the place of the slot's.
func (s *Slot) View([]byte) {}

// DeviceMirror is the slot's memory on the device.
func (s *Slot) DeviceMirror() unsafe.Pointer { return nil }

// Staging is the memory that has the slots' mirrors.
func (l *Queue) Staging() (unsafe.Pointer, int64) { return nil, 0 }

// Current runs a function with the device's context.
func (d *Device) Current(func() error) error { return errNone }

// ViewDevice lets memory of the device take the place of the slot's.
func (s *Slot) ViewDevice(uintptr, int64) {}

// An Event is a point in a device's work.
type Event struct{}

// NewEvent makes one.
func (d *Device) NewEvent() (*Event, error) { return nil, errNone }

// Free ends the event.
func (v *Event) Free() {}

// Before makes a stream go on after it.
func (v *Event) Before(uintptr) error { return errNone }

// Order puts what a slot writes between two events.
func (s *Slot) Order(_, _ *Event) {}

// TablesOnly is the size of slots that only view memory of the device.
const TablesOnly = 4096

// Put gives a slot back.
func (l *Queue) Put(device.Slot) {}

// Submit sends a slot's bytes on their way.
func (l *Queue) Submit(device.Slot, int64, []device.DecodeTask, func(int, error)) error {
	return errNone
}

// Drain waits for all that was submitted.
func (l *Queue) Drain(context.Context) error { return errNone }

// WaitFor lets the queue wait for a stream.
func (l *Queue) WaitFor(uintptr) error { return errNone }

// Close gives the queue back.
func (l *Queue) Close() {}

// Asynchronous is that of a device.
func (l *Queue) Asynchronous() bool { return true }

// Cast casts on the device.
func (l *Queue) Cast(context.Context, device.Memory, device.Memory, tensor.DType, tensor.DType) error {
	return errNone
}

// StagingBytes is the queue's pinned memory.
func (l *Queue) StagingBytes() int64 { return 0 }

// Across measures the device's memory.
func (l *Queue) Across(int64, int) (time.Duration, error) { return 0, errNone }

// Again measures the kernels.
func (l *Queue) Again(int) (time.Duration, error) { return 0, errNone }

// Time has pieces tell when they were copied and decoded.
func (l *Queue) Time(device.Span) error { return errNone }

// CanCast says whether there is a kernel for a cast.
func CanCast(device.Cast) bool { return false }

// Floor measures the wire.
func (l *Queue) Floor(int64, int) (time.Duration, error) { return 0, errNone }

// A Batch is work that was queued on a stream.
type Batch struct{}

// Decodes says whether a kernel decodes streams of an algorithm.
func Decodes(uint32) bool { return false }

// Decode queues the decoding of streams.
func (d *Device) Decode(Order, uint32, []Stream) (*Batch, error) { return nil, errNone }

// Peek asks streams how long their content is.
func (d *Device) Peek(Order, Kind, uint32, []Stream) ([]Peeked, error) { return nil, errNone }

// Encode queues the making of streams.
func (d *Device) Encode(Order, []Stream, uint64) (*Batch, error) { return nil, errNone }

// Scratch is the memory that Encode needs.
func Scratch([]Stream) int64 { return 0 }

// Sizes is how long streams became.
func (b *Batch) Sizes() []int64 { return nil }

// Done says whether the batch is done.
func (b *Batch) Done() bool { return true }

// Wait waits for the batch.
func (b *Batch) Wait() ([]error, error) { return nil, errNone }

// Copy queues a copy.
func (d *Device) Copy(Order, uint64, uint64, int64, bool) error { return errNone }

// Follow makes a stream wait for another.
func (d *Device) Follow(uintptr, uintptr) error { return errNone }

// NewStream makes a stream.
func (d *Device) NewStream() (uintptr, error) { return 0, errNone }

// FreeStream ends a stream.
func (d *Device) FreeStream(uintptr) error { return errNone }

// SyncStream waits for a stream.
func (d *Device) SyncStream(uintptr) error { return errNone }

// OwnsStream refuses a stream of another device.
func (d *Device) OwnsStream(uintptr) error { return errNone }

// ThreadMode has no modes.
func ThreadMode(int) int { return -1 }

// DeviceOf is the device of an address: none.
func DeviceOf(uint64) int { return -1 }
