package pipeline

import (
	"context"
	"sync"
	"unsafe"

	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/device/cpu"
	"github.com/overwire/overwire/gosrc/ring"
)

// hostLane is the host as a device: a piece is decoded by the worker that read
// it, while its bytes are in that core's cache.
type hostLane struct{ ring *ring.Ring }

// decoders serve all lanes: a pool of each would keep theirs until the garbage
// collector has run twice.
var decoders = sync.Pool{New: func() any { return new(cpu.Decoder) }}

// NewHost gives a lane with so many slots of so many bytes in host memory;
// none if nothing needs a slot.
func NewHost(slots int, size int64) (device.Lane, error) {
	l := &hostLane{}
	if size == 0 {
		l.ring = ring.New(nil, 0, 0, func() {})
		return l, nil
	}
	const page = 4096
	size = (size + page - 1) &^ (page - 1)
	base, length, err := cpu.Map(size * int64(slots))
	if err != nil {
		return nil, err
	}
	l.ring = ring.New(unsafe.Slice((*byte)(base), length), slots, size, func() { cpu.Unmap(base, length) })
	return l, nil
}

func (l *hostLane) Get(ctx context.Context) (device.Slot, error) {
	s, err := l.ring.Get(ctx)
	if err != nil {
		return nil, err // not a nil *ring.Slot in an interface
	}
	return s, nil
}

func (l *hostLane) Put(s device.Slot) { l.ring.Put(s.(*ring.Slot)) }

func (l *hostLane) Submit(s device.Slot, _ int64, jobs []device.Job, done func(job int, err error)) error {
	defer l.Put(s)
	dec := decoders.Get().(*cpu.Decoder)
	defer decoders.Put(dec)
	staged := s.Memory()
	for i := range jobs {
		j := &jobs[i]
		err := dec.Run(j, staged[j.Src:j.Src+j.Chunk.Stored])
		done(i, err)
		if err != nil {
			for k := i + 1; k < len(jobs); k++ {
				done(k, err)
			}
			return nil
		}
	}
	return nil
}

// Decode decodes the chunk of one job out of its stored bytes, on the host.
func Decode(j *device.Job, stored []byte) error {
	dec := decoders.Get().(*cpu.Decoder)
	defer decoders.Put(dec)
	return dec.Run(j, stored)
}

func (l *hostLane) Drain(context.Context) error { return nil }

func (l *hostLane) Close() { l.ring.Close() }
