//go:build !cgo

package cuda

// This file stands in for GPUs in builds without cgo: nothing is available.

import (
	"context"
	"time"
	"unsafe"

	"github.com/overwire/overwire/gosrc/codec/digest"
	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/nodes"
	"github.com/overwire/overwire/gosrc/tensor"
)

var errNone = errs.New(errs.ErrNotSupported, "CUDA: this build has no cgo")

// A Device is one GPU.
type Device struct{}

// A Queue is what one load needs of a device.
type Queue struct{}

// A Slot is the staging memory of one piece.
type Slot struct{ Bytes []byte }

// Available says why there is no GPU.
func Available() error { return errNone }

// Info describes the GPUs.
func Info() ([]DeviceInfo, error) { return nil, errNone }

// Open opens a GPU.
func Open(int) (*Device, error) { return nil, errNone }

// Shutdown frees what is kept between loads.
func Shutdown() {}

// Trim frees what is kept between loads.
func Trim() error { return nil }

// Index is the number of the device.
func (d *Device) Index() int { return 0 }

// Place is the NUMA node near the device.
func (d *Device) Place() *nodes.Place { return nil }

// Used registers a stream.
func (d *Device) Used(uintptr) {}

// Alloc allocates tensors.
func (d *Device) Alloc([]int64) ([]device.Memory, error) { return nil, errNone }

// Trim frees what is kept between loads.
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
func (q *Queue) Get(context.Context) (device.Slot, error) { return nil, errNone }

// Memory is the slot's bytes.
func (s *Slot) Memory() []byte { return s.Bytes }

// View replaces the slot's memory by registered memory.
func (s *Slot) View([]byte) {}

// DeviceMirror is the slot's memory on the device.
func (s *Slot) DeviceMirror() unsafe.Pointer { return nil }

// Staging is the memory of the slots' mirrors.
func (q *Queue) Staging() (unsafe.Pointer, int64, error) { return nil, 0, errNone }

// InPlace makes the kernels read slots where they are.
func (q *Queue) InPlace() {}

// Current runs a function with the device's context.
func (d *Device) Current(func() error) error { return errNone }

// ViewDevice replaces the slot's memory by device memory.
func (s *Slot) ViewDevice(uintptr, int64) {}

// An Event is a point in a device's work.
type Event struct{}

// NewEvent makes one.
func (d *Device) NewEvent() (*Event, error) { return nil, errNone }

// Free ends the event.
func (v *Event) Free() {}

// Before makes a stream wait for it.
func (v *Event) Before(uintptr) error { return errNone }

// Order orders what a slot writes after one event and before another.
func (s *Slot) Order(_, _ *Event) {}

// TablesOnly is the size of slots that only view device memory.
const TablesOnly = 4096

// Put returns a slot.
func (q *Queue) Put(device.Slot) {}

// Submit submits a slot.
func (q *Queue) Submit(device.Slot, int64, []device.DecodeTask, func(int, error)) error {
	return errNone
}

// Drain waits for all that was submitted.
func (q *Queue) Drain(context.Context) error { return errNone }

// WaitFor makes the queue wait for a stream.
func (q *Queue) WaitFor(uintptr) error { return errNone }

// Close frees the queue.
func (q *Queue) Close() {}

// Asynchronous is that of a device.
func (q *Queue) Asynchronous() bool { return true }

// Cast casts on the device.
func (q *Queue) Cast(context.Context, device.Memory, device.Memory, tensor.DType, tensor.DType) error {
	return errNone
}

// StagingBytes is the queue's pinned memory.
func (q *Queue) StagingBytes() int64 { return 0 }

// Again measures kernels.
func (q *Queue) Again(int) (time.Duration, error) { return 0, errNone }

// Time reports when pieces were copied and decoded.
func (q *Queue) Time(device.TraceFunc) error { return errNone }

// CanCast reports whether there is a kernel for a cast.
func CanCast(device.Cast) bool { return false }

// Floor measures the link.
func (q *Queue) Floor(int64, int) (time.Duration, error) { return 0, errNone }

// A Batch is work queued on a stream.
type Batch struct{}

// Decodes reports whether a kernel decodes streams of an algorithm.
func Decodes(uint32) bool { return false }

// Decode queues the decoding of streams.
func (d *Device) Decode(Order, uint32, []Stream) (*Batch, error) { return nil, errNone }

// Peek returns the lengths of streams' contents.
func (d *Device) Peek(Order, Kind, uint32, []Stream) ([]Peeked, error) { return nil, errNone }

// Encode queues the encoding of streams.
func (d *Device) Encode(Order, []Stream, uint64) (*Batch, error) { return nil, errNone }

// Scratch is how much memory Encode needs.
func Scratch([]Stream) int64 { return 0 }

// Sizes returns the lengths of streams.
func (b *Batch) Sizes() []int64 { return nil }

// Done says whether the batch is done.
func (b *Batch) Done() bool { return true }

// Wait waits for the batch.
func (b *Batch) Wait() ([]error, error) { return nil, errNone }

// Digest computes digests.
func (d *Device) Digest(Order, []digest.View) ([]digest.Sum, error) { return nil, errNone }

// A DeltaChunk is a chunk of a tensor in device memory.
type DeltaChunk struct {
	Now, Base uint64
	Bytes     int
	Width     int
	Stored    []byte
}

// ReserveDelta gets memory.
func (d *Device) ReserveDelta([]DeltaChunk) error { return errNone }

// ApplyDelta applies deltas.
func (d *Device) ApplyDelta(Order, []DeltaChunk) error { return errNone }

// EncodeDelta encodes deltas.
func (d *Device) EncodeDelta(context.Context, Order, []DeltaChunk, func(n int64)) error {
	return errNone
}

// CopyRows queues a copy of rows.
func (d *Device) CopyRows(Order, uint64, uint64, uint64, uint64, int64, int64) error { return errNone }

// Copy queues a copy.
func (d *Device) Copy(Order, uint64, uint64, int64, bool) error { return errNone }

// Share names memory for other processes.
func (d *Device) Share(device.Memory) (string, error) { return "", errNone }

// Attach maps memory of another process.
func (d *Device) Attach(string) (unsafe.Pointer, error) { return nil, errNone }

// Detach ends that.
func (d *Device) Detach(unsafe.Pointer) {}

// Follow makes a stream wait for another.
func (d *Device) Follow(uintptr, uintptr) error { return errNone }

// NewStream makes a stream.
func (d *Device) NewStream() (uintptr, error) { return 0, errNone }

// FreeStream frees a stream.
func (d *Device) FreeStream(uintptr) error { return errNone }

// EndStream waits for a stream and frees it.
func (d *Device) EndStream(uintptr) {}

// SyncStream waits for a stream.
func (d *Device) SyncStream(uintptr) error { return errNone }

// OwnsStream refuses a stream of another device.
func (d *Device) OwnsStream(uintptr) error { return errNone }

// ThreadMode has no modes.
func ThreadMode(int) int { return -1 }

// DeviceOf is the device of an address: none.
func DeviceOf(uint64) int { return -1 }

// A Packer copies device memory to the host, encoded.
type Packer struct{}

// NewPacker makes a Packer.
func (d *Device) NewPacker() (*Packer, error) { return nil, errNone }

// Slots is how many slots it has.
func (p *Packer) Slots() int { return 0 }

// Slot is how many bytes a slot takes.
func (p *Packer) Slot() int64 { return 0 }

// Bytes is the device memory that it takes.
func (p *Packer) Bytes() int64 { return 0 }

// Encode encodes ranges.
func (p *Packer) Encode(int, []Packed) error { return errNone }

// Fetch queues the copies of ranges.
func (p *Packer) Fetch(int, []Packed) error { return errNone }

// Wait waits for the copies of a slot.
func (p *Packer) Wait(int) error { return errNone }

// Sample copies runs of device memory.
func (p *Packer) Sample([]uint64, int64, func(int, []byte)) error { return errNone }

// Close frees it.
func (p *Packer) Close() {}
