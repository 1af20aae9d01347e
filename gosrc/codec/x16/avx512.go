//go:build goexperiment.simd && amd64 && !scalar

package x16

import (
	"math/bits"
	"simd/archsimd"
	"unsafe"

	"github.com/overwire/overwire/gosrc/internal/avx"
)

// The AVX-512 kernel keeps 16 states in one register and a chunk's tables in three registers. Go's compiler uses 15 of
// the 32 vector registers and moves all loads to the start of a basic block. Therefore the unit of work is half the
// lanes of two segments for a pair of steps, which just fits. States are stored to memory between units, and the
// processor overlaps the units. (Measured: one segment per unit is 5 % slower, four segments are 2 % slower, and two
// pairs of steps are 25 % slower.)

type v16 = archsimd.Uint32x16

// step512 decodes one symbol in 16 lanes. It returns the new states and the entries, which have the labels in their
// top nibbles. (ShiftAllRightConcat with zero is a plain shift that the compiler encodes with an immediate.)
func step512(x, above, entry0, entry1, low8, not15 v16, pick archsimd.Int8x64) (v16, v16) {
	var none v16
	r := x.Or(not15) // position - 16
	z := above.Permute(x.RotateAllRight(4)).Add(r)
	e := entry0.ConcatPermute(entry1, z.RotateAllRight(4))
	bias := e.AsUint8x64().DotProductPairsSaturated(pick).AsInt32x16().AsUint32x16()
	return e.And(low8).Mul(x.ShiftAllRightConcat(8, none)).Add(r.Add(bias)), e
}

// refill512 gives the lanes below 2^16 their next words. At least 16 words must be at p. It returns the number of
// bytes that were used.
func refill512(x, start v16, p *[16]uint16) (v16, int) {
	need := x.Less(start)
	w := archsimd.LoadUint16x16(p).ExtendToUint32().Expand(need)
	m := need.ToBits()
	return x.ShiftAllLeft(16).Or(w).Merge(x, need), int(wordBytes[uint8(m)]) + int(wordBytes[m>>8])
}

// pickBias makes VPMADDUBSW zero-extend byte 1 of each dword.
var pickBias = func() (p [64]int8) {
	for i := 1; i < 64; i += 4 {
		p[i] = 1
	}
	return
}()

// order512 sorts labels into their original order. The labels are the low and the high nibbles of 16 lanes'
// accumulators: index i selects byte i of the high nibbles, and index 64 + i selects byte i of the low
// nibbles.
var order512 = func() (o [2][64]uint8) {
	for l := range 16 {
		for t := range 8 {
			src := 4*l + 3 - t/2 + t%2*64
			at := unitStart(l) + t
			o[at/64][at%64] = uint8(src)
		}
	}
	return
}()

// tile512 converts a tile's labels, 8 per lane in each of two registers, to 256 symbol values at out. It returns the
// number of escapes.
func tile512(a, b v16, values, order0, order1, low4, limit archsimd.Uint8x64, out *[tileSyms]byte) int {
	aLo := a.AsUint8x64().And(low4)
	aHi := a.ShiftAllRightConcat(4, a).AsUint8x64().And(low4)
	bLo := b.AsUint8x64().And(low4)
	bHi := b.ShiftAllRightConcat(4, b).AsUint8x64().And(low4)
	p := unsafe.Pointer(out)
	lo, hi := values.Permute(aLo), values.Permute(aHi)
	hi.ConcatPermute(lo, order0).Store(at[[64]uint8](p, 0))
	hi.ConcatPermute(lo, order1).Store(at[[64]uint8](p, 64))
	lo, hi = values.Permute(bLo), values.Permute(bHi)
	hi.ConcatPermute(lo, order0).Store(at[[64]uint8](p, 128))
	hi.ConcatPermute(lo, order1).Store(at[[64]uint8](p, 192))
	if aLo.Max(aHi).Max(bLo.Max(bHi)).GreaterEqual(limit).ToBits() == 0 {
		return 0
	}
	return bits.OnesCount64(aLo.GreaterEqual(limit).ToBits()) +
		bits.OnesCount64(aHi.GreaterEqual(limit).ToBits()) +
		bits.OnesCount64(bLo.GreaterEqual(limit).ToBits()) +
		bits.OnesCount64(bHi.GreaterEqual(limit).ToBits())
}

// kernel512 decodes tiles of all segments of run in parallel until one segment has enough tiles or too few input bytes.
func (d *decoder) kernel512(run []*segment) {
	st, acc := &d.lanes.states, &d.lanes.labels
	var cursor [4]int
	want := batch
	for i := range st {
		// Segments are decoded in pairs. The first segment stands in for a missing one, which is safe.
		s := run[0]
		if i < len(run) {
			s = run[i]
		}
		st[i], cursor[i] = s.x, s.cur
		want = min(want, s.want-s.got)
	}
	above := archsimd.LoadUint32x16(&d.fast.above)
	entry0 := archsimd.LoadUint32x16((*[16]uint32)(d.fast.entry[:16]))
	entry1 := archsimd.LoadUint32x16((*[16]uint32)(d.fast.entry[16:]))
	low8, not15 := archsimd.BroadcastUint32x16(255), archsimd.BroadcastUint32x16(^uint32(15))
	begin, pick := archsimd.BroadcastUint32x16(start), archsimd.LoadInt8x64(&pickBias)
	base := unsafe.Pointer(unsafe.SliceData(d.chunk.src))
	most := len(d.chunk.src) - slack
	tiles := 0
	for ; tiles < want && max(cursor[0], cursor[1], cursor[2], cursor[3]) <= most; tiles++ {
		for range 4 {
			for i := 0; i < len(run); i += 2 {
				s0, s1 := &st[i&2], &st[i&2|1]
				l0, l1 := &acc[i&2], &acc[i&2|1]
				cur0, cur1 := cursor[i&2], cursor[i&2|1]
				for h := 0; h < lanes; h += 16 {
					var e v16
					var n int
					p0, p1 := (*[16]uint32)(s0[h&16:]), (*[16]uint32)(s1[h&16:])
					q0, q1 := (*[16]uint32)(l0[h&16:]), (*[16]uint32)(l1[h&16:])
					x0, x1 := archsimd.LoadUint32x16(p0), archsimd.LoadUint32x16(p1)
					a0, a1 := archsimd.LoadUint32x16(q0), archsimd.LoadUint32x16(q1)
					x0, e = step512(x0, above, entry0, entry1, low8, not15, pick)
					a0 = a0.ShiftAllLeftConcat(4, e)
					x1, e = step512(x1, above, entry0, entry1, low8, not15, pick)
					a1 = a1.ShiftAllLeftConcat(4, e)
					x0, e = step512(x0, above, entry0, entry1, low8, not15, pick)
					a0 = a0.ShiftAllLeftConcat(4, e)
					x1, e = step512(x1, above, entry0, entry1, low8, not15, pick)
					a1 = a1.ShiftAllLeftConcat(4, e)
					x0, n = refill512(x0, begin, at[[16]uint16](base, cur0))
					cur0 += n
					x1, n = refill512(x1, begin, at[[16]uint16](base, cur1))
					cur1 += n
					x0.Store(p0)
					x1.Store(p1)
					a0.Store(q0)
					a1.Store(q1)
				}
				cursor[i&2], cursor[i&2|1] = cur0, cur1
			}
		}
		d.emit512(run, acc, tiles)
	}
	avx.Clear()
	for i, s := range run {
		s.x, s.cur, s.got = st[i&3], cursor[i&3], s.got+tiles
	}
}

// emit512 writes a tile of every segment of run from the labels in acc. tile is the number of tiles that this call of
// kernel512 has already written.
func (d *decoder) emit512(run []*segment, acc *[4][lanes]uint32, tile int) {
	values := archsimd.LoadUint8x64(&d.fast.values)
	order0, order1 := archsimd.LoadUint8x64(&order512[0]), archsimd.LoadUint8x64(&order512[1])
	low4, limit := archsimd.BroadcastUint8x64(15), archsimd.BroadcastUint8x64(d.fast.limit)
	for i := range run {
		a := archsimd.LoadUint32x16((*[16]uint32)(acc[i][:16]))
		b := archsimd.LoadUint32x16((*[16]uint32)(acc[i][16:]))
		out := (*[tileSyms]byte)(run[i].vals[(run[i].got+tile)*tileSyms:])
		run[i].escs += tile512(a, b, values, order0, order1, low4, limit, out)
	}
}

// wordBytes is 2 for every set bit of the index. (In a GOAMD64=v1 build, math/bits.OnesCount tests for POPCNT each
// time, which splits the kernel's basic block.)
var wordBytes = func() (t [256]uint8) {
	for i := range t {
		t[i] = uint8(2 * bits.OnesCount8(uint8(i)))
	}
	return
}()
