package cuda

import (
	"bytes"
	"math/rand/v2"
	"testing"
	"unsafe"

	"github.com/overwire/overwire/gosrc/codec/x16"
	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/device/cuda/queue"
	"github.com/overwire/overwire/gosrc/errs"
)

// A parcel is a piece for SubmitAll, with its destination and the arguments that done was called with.
type parcel struct {
	piece
	mem      device.Memory
	failures []error
	calls    []int
	bad      int // the task with changed bytes, or -1
}

// Kinds of parcels: raw tasks in the same order in the slot and at the destination, raw tasks in reverse order, and
// tasks of which one is coded. A parcel with a coded task is submitted separately.
const (
	alike = iota
	scattered
	encoded
)

func endOf(q *queue.Queue) *queue.Event {
	s := q.TryGet()
	defer q.Put(s)
	return s.EndEvent()
}

// twoEvents returns the end events of two slots.
func twoEvents(q *queue.Queue) [2]*queue.Event {
	s := q.TryGet()
	defer q.Put(s)
	return [2]*queue.Event{s.EndEvent(), endOf(q)}
}

// sending fills a slot with a parcel of a kind. Its tasks have checksums unless the kind is alike.
func sending(t *testing.T, d *Device, q *queue.Queue, r *rand.Rand, kind int,
	after *queue.Event) (*parcel, queue.FilledSlot) {
	t.Helper()
	p := &parcel{bad: -1}
	for range 2 + r.IntN(4) {
		p.bytes = append(p.bytes, make([]byte, r.IntN(queue.GapLimit))...)
		p.raw(weights(r, x16.Bytes, 1+r.IntN(20_000)))
	}
	if kind == encoded && !p.coded(weights(r, x16.BF16, 4096), x16.BF16) {
		t.Fatal("4096 bytes do not compress")
	}
	if kind != alike {
		p.sum()
	}
	mem, err := d.Alloc([]int64{int64(len(p.bytes)) + 8192})
	if err != nil {
		t.Fatal(err)
	}
	p.mem, p.failures, p.calls = mem[0], make([]error, len(p.jobs)), make([]int, len(p.jobs))
	for i := range p.jobs {
		at := int(p.jobs[i].Src)
		if kind == scattered {
			at = len(p.bytes) - at - int(p.jobs[i].Chunk.Stored)
		}
		p.jobs[i].Dst = unsafe.Add(mem[0].Ptr, at)
	}
	s, err := q.Get(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if kind != alike && r.IntN(3) == 0 {
		p.bad = r.IntN(len(p.jobs))
		c := &p.jobs[p.bad]
		p.bytes[int(c.Src)+r.IntN(int(c.Chunk.Stored))] ^= byte(1 << r.IntN(8))
	}
	copy(s.Memory(), p.bytes)
	s.CheckOnSubmit()
	own := s.(*queue.Slot)
	own.AllowGapWrites()
	own.FollowEvent(after)
	return p, queue.FilledSlot{Slot: own, N: int64(len(p.bytes)), Tasks: p.jobs,
		Done: func(i int, err error) { p.failures[i] = err; p.calls[i]++ }}
}

// Pieces that are submitted together are loaded like separate pieces. A changed bit fails only its own task, and all
// slots are freed.
func TestSubmitAll(t *testing.T) {
	r := random(t)
	d, q := open(t, queue.GroupSlots+6, 192<<10)
	events := twoEvents(q)
	for range 8 {
		var all []*parcel
		var pieces []queue.FilledSlot
		for range 1 + r.IntN(queue.GroupSlots+6) {
			kind, after := []int{alike, alike, alike, alike, scattered, encoded}[r.IntN(6)], events[r.IntN(8)/7]
			p, piece := sending(t, d, q, r, kind, after)
			all, pieces = append(all, p), append(pieces, piece)
		}
		q.SubmitAll(pieces)
		if err := q.Drain(t.Context()); err != nil {
			t.Fatal(err)
		}
		for n, p := range all {
			for i, err := range p.failures {
				wrong := errs.RuleOf(err) == errs.RuleChecksum
				if p.calls[i] != 1 || wrong != (i == p.bad) || err != nil && i != p.bad {
					t.Errorf("piece %d, task %d: %d calls, %v", n, i, p.calls[i], err)
				}
				got := make([]byte, len(p.want[i]))
				if err := d.Read(got, device.Memory{Ptr: p.jobs[i].Dst, Bytes: int64(len(got))}); err != nil {
					t.Fatal(err)
				}
				if i != p.bad && !bytes.Equal(got, p.want[i]) {
					t.Errorf("piece %d, task %d: wrong bytes", n, i)
				}
			}
			p.mem.Release()
		}
	}
}
