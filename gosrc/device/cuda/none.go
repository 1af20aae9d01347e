//go:build !cgo

package cuda

// This file stands in for GPUs in builds without cgo: none can be opened, so nothing has
// the methods that it lists, and none is called.

import (
	"context"
	"time"
	"unsafe"

	"github.com/overwire/overwire/gosrc/codec/digest"
	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/device/cuda/driver"
	"github.com/overwire/overwire/gosrc/internal/nodes"
	"github.com/overwire/overwire/gosrc/tensor"
)

// The types and functions of the package, as in builds with cgo.
type (
	Device struct{ gpu }
	Queue  struct{ queue }
	Slot   struct {
		slot
		Bytes []byte
	}
	Event  struct{ event }
	Batch  struct{ batch }
	Packer struct{ packer }
)

func Open(int) (*Device, error) { return nil, driver.Available() }
func Trim() error               { return nil }
func CanCast(device.Cast) bool  { return false }
func Decodes(uint32) bool       { return false }
func Scratch([]Stream) int64    { return 0 }

type gpu interface {
	Index() int
	Place() *nodes.Place
	NoteStream(stream uintptr)
	Alloc(sizes []int64) ([]device.Memory, error)
	Trim() error
	Free() (unused, total int64, err error)
	Read(dst []byte, m device.Memory) error
	Register(b []byte) error
	Unregister(b []byte, then func())
	Queue(slots int, slotBytes int64) (*Queue, error)
	Prepare(slots int, slotBytes int64)
	IsMakingQueue() bool
	WithContext(fn func() error) error
	NewEvent() (*Event, error)
	NewPacker(sums bool) (*Packer, error)
	Decode(on Order, format uint32, streams []Stream) (*Batch, error)
	Peek(on Order, kind Kind, format uint32, streams []Stream) ([]Peeked, error)
	Encode(on Order, streams []Stream, scratch uint64) (*Batch, error)
	Digest(on Order, views []digest.View) ([]digest.Sum, error)
	ReserveDelta(chunks []DeltaChunk) error
	ApplyDelta(on Order, chunks []DeltaChunk) error
	EncodeDelta(ctx context.Context, on Order, chunks []DeltaChunk, progress func(n int64)) error
	Copy(on Order, dst, src uint64, n int64, wait bool) error
	CopyRows(on Order, dst, dstPitch, src, srcPitch uint64, width, rows int64) error
	Share(m device.Memory) (string, error)
	Attach(name string) (unsafe.Pointer, error)
	Detach(at unsafe.Pointer)
	Follow(stream uintptr, after ...uintptr) error
	NewStream() (uintptr, error)
	FreeStream(stream uintptr) error
	EndStream(stream uintptr)
	SyncStream(stream uintptr) error
	OwnsStream(stream uintptr) error
}

type queue interface {
	device.Queue
	SubmitAll(pieces []Filled) error
	InPlace()
	Exchange()
	Staging() (base unsafe.Pointer, n int64, err error)
	WaitFor(stream uintptr) error
	Cast(ctx context.Context, dst, src device.Memory, from, to tensor.DType) error
	Floor(n int64, count int) (time.Duration, error)
	RunAgain(count int) (time.Duration, error)
}

type slot interface {
	device.Slot
	ViewDevice(p uintptr, n int64)
	Order(after, then *Event)
	Loose()
}

type event interface {
	Free()
	Before(stream uintptr) error
}

type batch interface {
	Sizes() []int64
	Done() bool
	Wait() ([]error, error)
}

type packer interface {
	Device() *Device
	Slots() int
	Slot() int64
	Bytes() int64
	Sum(slot int, all []Packed) error
	Encode(slot int, all []Packed) error
	Fetch(slot int, all []Packed) error
	Wait(slot int) error
	Sample(at []uint64, n int64, got func(i int, b []byte)) error
	Close()
}
