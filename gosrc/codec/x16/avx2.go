//go:build goexperiment.simd && amd64 && !scalar

package x16

import (
	"math/bits"
	"simd/archsimd"
	"unsafe"

	"github.com/overwire/overwire/gosrc/internal/avx"
)

// The AVX2 kernel looks up slots with VPSHUFB in tables of 16 bytes; the index is in the low byte of a dword. A
// bucket has a divider and an alias; a symbol has a frequency. As in the AVX-512 kernel, the unit of work is one
// register of states, here 8 lanes, for two segments.

type (
	v8  = archsimd.Uint32x8
	tab = archsimd.Uint8x32
)

// tables256 holds a chunk's tables for this kernel: the first three are indexed by bucket, the others by symbol. Each
// table is stored twice.
type tables256 struct {
	divider, alias, bias [32]uint8 // bias is 16 too large
	freq, values         [32]uint8
}

func (t *tables256) build(y *symbols) {
	bias := y.table.aliasBias()
	for b := range 16 {
		for i := b; i < 32; i += 16 {
			t.divider[i] = y.table.divider[b]
			t.alias[i] = y.table.alias[b]
			t.bias[i] = uint8(16)
			if y.table.divider[b] < 16 {
				t.bias[i] = uint8(16 + bias[b])
			}
			t.freq[i] = y.table.freq[b]
			t.values[i] = y.values[b]
		}
	}
}

func lookUp256(t tab, index v8) v8 {
	return t.PermuteOrZeroGrouped(index.AsUint8x32().AsInt8x32()).AsUint32x8()
}

// step256 decodes one symbol in 8 lanes. It returns the new states and the symbols. byte0 sets all bytes of a dword
// except the index to 0x80. by8 moves the bytes of a dword down by one.
func step256(x, low4, byte0, c16 v8, by8 archsimd.Int8x32, divider, alias, bias, freq tab) (v8, v8) {
	b := x.AsInt32x8().ShiftAllRight(4).AsUint32x8().And(low4)
	r := x.And(low4)
	at := b.Or(byte0)
	own := lookUp256(divider, at).AsInt32x8().Greater(r.AsInt32x8())
	k := b.Merge(lookUp256(alias, at), own)
	f := lookUp256(freq, k.Or(byte0))
	up := c16.Merge(lookUp256(bias, at), own).Sub(c16)
	high := x.AsUint8x32().PermuteOrZeroGrouped(by8).AsUint32x8()
	return f.Mul(high).Add(r.Add(up)), k
}

// expand256 lists, for each set of lanes that need a word, which word each lane gets.
var expand256 = func() (t [256][8]uint32) {
	for m := range t {
		n := uint32(0)
		for l := range 8 {
			t[m][l] = n
			n += uint32(m >> l & 1)
		}
	}
	return
}()

// refill256 gives the lanes below 2^16 their next words. At least 8 words must be at p. It returns the number of
// bytes that were used.
func refill256(x v8, p *[8]uint16) (v8, int) {
	var none archsimd.Int32x8
	need := x.AsInt32x8().ShiftAllRight(16).Equal(none)
	m := need.ToBits()
	w := archsimd.LoadUint16x8(p).ExtendToUint32().Permute(archsimd.LoadUint32x8(&expand256[m]))
	return x.ShiftAllLeft(16).Or(w).Merge(x, need), int(wordBytes[m])
}

// kernel256 decodes tiles of all segments of run in parallel until one segment has enough tiles or too few input bytes.
func (d *decoder) kernel256(run []*segment) {
	st, acc := &d.lanes.states, &d.lanes.symbols
	var cursor [4]int
	want := batch
	for i := range st {
		s := run[0] // the first segment stands in for a missing one
		if i < len(run) {
			s = run[i]
		}
		st[i], cursor[i] = s.x, s.cur
		want = min(want, s.want-s.got)
	}
	t := &d.fast.narrow
	divider, alias := archsimd.LoadUint8x32(&t.divider), archsimd.LoadUint8x32(&t.alias)
	bias, freq := archsimd.LoadUint8x32(&t.bias), archsimd.LoadUint8x32(&t.freq)
	low4, c16 := archsimd.BroadcastUint32x8(15), archsimd.BroadcastUint32x8(16)
	byte0 := archsimd.BroadcastUint32x8(0x80808000)
	by8 := archsimd.LoadInt8x32(&shift8)
	base := unsafe.Pointer(unsafe.SliceData(d.chunk.src))
	most := len(d.chunk.src) - slack
	tiles := 0
	for ; tiles < want && max(cursor[0], cursor[1], cursor[2], cursor[3]) <= most; tiles++ {
		for pair := range 4 {
			for i := 0; i < len(run); i += 2 {
				s0, s1 := &st[i&2], &st[i&2|1]
				k0, k1 := &acc[i&2][pair&3], &acc[i&2|1][pair&3]
				cur0, cur1 := cursor[i&2], cursor[i&2|1]
				for h := 0; h < lanes; h += 8 {
					var e0, e1 v8
					var n int
					p0, p1 := (*[8]uint32)(s0[h&24:]), (*[8]uint32)(s1[h&24:])
					x0, x1 := archsimd.LoadUint32x8(p0), archsimd.LoadUint32x8(p1)
					x0, e0 = step256(x0, low4, byte0, c16, by8, divider, alias, bias, freq)
					x1, e1 = step256(x1, low4, byte0, c16, by8, divider, alias, bias, freq)
					a0, a1 := e0, e1
					x0, e0 = step256(x0, low4, byte0, c16, by8, divider, alias, bias, freq)
					x1, e1 = step256(x1, low4, byte0, c16, by8, divider, alias, bias, freq)
					a0.Or(e0.ShiftAllLeft(8)).Store((*[8]uint32)(k0[h&24:]))
					a1.Or(e1.ShiftAllLeft(8)).Store((*[8]uint32)(k1[h&24:]))
					x0, n = refill256(x0, at[[8]uint16](base, cur0))
					cur0 += n
					x1, n = refill256(x1, at[[8]uint16](base, cur1))
					cur1 += n
					x0.Store(p0)
					x1.Store(p1)
				}
				cursor[i&2], cursor[i&2|1] = cur0, cur1
			}
		}
		for i, s := range run {
			s.escs += d.tile256(&acc[i&3], (*[tileSyms]byte)(s.vals[(s.got+tiles)*tileSyms:]))
		}
	}
	avx.Clear()
	for i, s := range run {
		s.x, s.cur, s.got = st[i&3], cursor[i&3], s.got+tiles
	}
}

// shift8 moves the bytes of a dword down by one.
var shift8 = func() (s [32]int8) {
	for i := range s {
		s[i] = int8(i&15 + 1)
		if i%4 == 3 {
			s[i] = -128
		}
	}
	return
}()

var order256 = [8]uint32{0, 1, 4, 5, 2, 3, 6, 7}

// tile256 converts the symbols of a tile, two per lane for each pair of steps, to 256 symbol values in their original
// order. It returns the number of escapes.
func (d *decoder) tile256(acc *[4][lanes]uint32, out *[tileSyms]byte) (escs int) {
	values := archsimd.LoadUint8x32(&d.fast.narrow.values)
	order := archsimd.LoadUint32x8(&order256)
	for h := 0; h < lanes; h += 16 {
		v0, v1 := gather256(acc, h, values), gather256(acc, h+8, values)
		// Each 128 bits of v0 and v1 hold 8 bytes of two units q.
		lo := v0.lo.AsUint64x4().InterleaveLoGrouped(v1.lo.AsUint64x4()).AsUint32x8().Permute(order)
		hi := v0.lo.AsUint64x4().InterleaveHiGrouped(v1.lo.AsUint64x4()).AsUint32x8().Permute(order)
		lo.AsUint8x32().Store((*[32]uint8)(out[8*h:]))
		hi.AsUint8x32().Store((*[32]uint8)(out[8*h+32:]))
		lo = v0.hi.AsUint64x4().InterleaveLoGrouped(v1.hi.AsUint64x4()).AsUint32x8().Permute(order)
		hi = v0.hi.AsUint64x4().InterleaveHiGrouped(v1.hi.AsUint64x4()).AsUint32x8().Permute(order)
		lo.AsUint8x32().Store((*[32]uint8)(out[8*h+64:]))
		hi.AsUint8x32().Store((*[32]uint8)(out[8*h+96:]))
	}
	if d.chunk.symbols.escape < 0 {
		return 0
	}
	sentinel := archsimd.BroadcastUint8x32(d.chunk.symbols.sentinel)
	for i := 0; i < tileSyms; i += 32 {
		if m := archsimd.LoadUint8x32((*[32]uint8)(out[i:])).Equal(sentinel).ToBits(); m != 0 {
			escs += bits.OnesCount32(m)
		}
	}
	return escs
}

type pair256 struct{ lo, hi archsimd.Uint32x8 }

// gather256 returns the values of 8 lanes, 8 bytes per lane. The first two of every four lanes are in lo, the last
// two in hi.
func gather256(acc *[4][lanes]uint32, h int, values tab) pair256 {
	a := archsimd.LoadUint32x8((*[8]uint32)(acc[1][h:])).ShiftAllLeft(16).Or(
		archsimd.LoadUint32x8((*[8]uint32)(acc[0][h:])))
	b := archsimd.LoadUint32x8((*[8]uint32)(acc[3][h:])).ShiftAllLeft(16).Or(
		archsimd.LoadUint32x8((*[8]uint32)(acc[2][h:])))
	a, b = lookUp256(values, a), lookUp256(values, b)
	return pair256{a.InterleaveLoGrouped(b), a.InterleaveHiGrouped(b)}
}
