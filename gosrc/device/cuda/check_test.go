package cuda

import (
	"bytes"
	"errors"
	"hash/crc32"
	"strings"
	"testing"

	"github.com/overwire/overwire/gosrc/codec/x16"
	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/device/cuda/queue"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/tensor"
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// sum sets the checksum of each task's stored bytes.
func (p *piece) sum() {
	for i := range p.jobs {
		j := &p.jobs[i]
		if int(j.Src)+int(j.Chunk.Stored) > len(p.bytes) {
			continue // the queue must refuse this task
		}
		j.Summed, j.Chunk.Sum = true, crc32.Checksum(p.bytes[j.Src:][:j.Chunk.Stored], castagnoli)
	}
}

// The device detects one changed bit in any chunk, of any size, at any offset in the slot and at the destination, and
// reports the actual checksum. The other chunks are loaded without an error.
func TestChecksums(t *testing.T) {
	r := random(t)
	d, l := open(t, 2, 12<<20)
	sizes := []int{1, 2, 3, 4, 5, 127, 128, 129, 4093, 8191, 8192, 8193, 8320, 70_001, 1<<20 - 8}
	pieces := map[string]func(p *piece){
		"raw, through a kernel": func(p *piece) {
			for _, n := range sizes {
				p.raw(weights(r, x16.Bytes, n))
			}
		},
		"raw, copied one by one": func(p *piece) {
			p.bytes = make([]byte, r.IntN(8))
			p.raw(weights(r, x16.Bytes, queue.SmallRaw+r.IntN(100)))
			p.raw(weights(r, x16.Bytes, 12_345))
		},
		"coded": func(p *piece) {
			for _, n := range []int{3000, 4096, 100_001, 2 << 20} {
				if !p.coded(weights(r, x16.BF16, n&^1), x16.BF16) {
					t.Fatalf("%d bytes do not compress", n)
				}
				p.raw(weights(r, x16.Bytes, 1+r.IntN(3000)))
			}
		},
		"columns, and a cast": func(p *piece) {
			b := weights(r, x16.BF16, 64*1000)
			p.raw(b)
			p.jobs[0].View = &device.View{Row: 64, Row1: 1000, Col0: 6, Col1: 40}
			p.want[0] = nil
			p.raw(b)
			p.jobs[1].Cast, p.want[1] = device.Cast{From: tensor.BF16, To: tensor.F32}, nil
		},
	}
	for name, make := range pieces {
		for _, loose := range []bool{false, true} {
			var p piece
			make(&p)
			p.sum()
			bad := r.IntN(len(p.jobs))
			for _, damaged := range []bool{false, true} {
				if c := &p.jobs[bad]; damaged {
					p.bytes[int(c.Src)+r.IntN(int(c.Chunk.Stored))] ^= byte(1 << r.IntN(8))
					p.want[bad] = nil
				}
				failures := p.send(t, d, l, int64(4*r.IntN(5)), func(s device.Slot) {
					copy(s.Memory(), p.bytes)
					s.CheckOnSubmit()
					if loose {
						s.(*queue.Slot).AllowGapWrites()
					}
				})
				for i, err := range failures {
					switch {
					case !damaged || i != bad:
						if err != nil {
							t.Errorf("%s: undamaged task %d: %v", name, i, err)
						}
					case errs.RuleOf(err) != errs.RuleChecksum || !errors.Is(err, errs.ErrCorrupt):
						t.Errorf("%s: task %d of %d bytes: %v", name, i, p.jobs[i].Chunk.Stored, err)
					default:
						j := &p.jobs[i]
						want := errs.NewMismatch(j.Chunk.Sum, crc32.Checksum(p.bytes[j.Src:][:j.Chunk.Stored],
							castagnoli))
						if err.Error() != want.Error() {
							t.Errorf("%s: task %d: %v, want %v", name, i, err, want)
						}
					}
				}
			}
		}
	}
}

// The device compares no checksums without CheckOnSubmit. It never checks bytes that have no checksum.
func TestUnchecked(t *testing.T) {
	r := random(t)
	d, l := open(t, 2, 1<<20)
	var p piece
	p.raw(weights(r, x16.Bytes, 5000))
	p.sum()
	p.jobs[0].Chunk.Sum ^= 1
	for _, err := range p.send(t, d, l, 0, func(s device.Slot) { copy(s.Memory(), p.bytes) }) {
		if err != nil {
			t.Error(err)
		}
	}
	p.jobs[0].Summed = false
	check := func(s device.Slot) { copy(s.Memory(), p.bytes); s.CheckOnSubmit() }
	for _, err := range p.send(t, d, l, 0, check) {
		if err != nil {
			t.Error(err)
		}
	}
	p.jobs[0].Summed, p.want[0] = true, nil
	for _, err := range p.send(t, d, l, 0, check) {
		if err == nil || !strings.Contains(err.Error(), "checksum mismatch") {
			t.Error(err)
		}
	}
}

// SumOnly detects one changed bit in a chunk of any size in device memory, and writes nothing.
func TestSumOnly(t *testing.T) {
	r := random(t)
	d, q := open(t, 2, 1<<20)
	var p piece
	for _, n := range []int{1, 5, 8191, 8193, 70_001, 300_000} {
		p.raw(weights(r, x16.Bytes, n))
	}
	p.sum()
	mem, err := d.Alloc([]int64{int64(len(p.bytes))})
	if err != nil {
		t.Fatal(err)
	}
	defer mem[0].Release()
	for bad := -1; bad < len(p.jobs); bad++ {
		if bad >= 0 {
			c := &p.jobs[bad]
			p.bytes[int(c.Src)+r.IntN(int(c.Chunk.Stored))] ^= byte(1 << r.IntN(8))
		}
		up := []device.DecodeTask{{Dst: mem[0].Ptr, Chunk: tensor.Chunk{Codec: tensor.CodecRaw,
			Stored: uint32(len(p.bytes)), Logical: uint32(len(p.bytes))}}}
		failures := make([]error, len(p.jobs))
		for _, tasks := range [][]device.DecodeTask{up, p.jobs} {
			s, err := q.Get(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			copy(s.Memory(), p.bytes)
			if &tasks[0] == &p.jobs[0] {
				for i := range tasks {
					tasks[i].Dst = mem[0].Ptr // never written
				}
				s.(*queue.Slot).ViewDevice(uintptr(mem[0].Ptr), int64(len(p.bytes)))
				s.(*queue.Slot).SumOnly()
			}
			err = q.Submit(s, int64(len(p.bytes)), tasks, func(i int, err error) { failures[i] = err })
			if err := errors.Join(err, q.Drain(t.Context())); err != nil {
				t.Fatal(err)
			}
		}
		for i, err := range failures {
			if wrong := errs.RuleOf(err) == errs.RuleChecksum; wrong != (i == bad) || err != nil && i != bad {
				t.Errorf("task %d, with changed bytes in task %d: %v", i, bad, err)
			}
		}
		got := make([]byte, len(p.bytes))
		if err := d.Read(got, mem[0]); err != nil || !bytes.Equal(got, p.bytes) {
			t.Errorf("the bytes were changed: %v", err)
		}
		if bad >= 0 {
			c := &p.jobs[bad]
			copy(p.bytes[c.Src:], p.want[bad])
		}
	}
}
