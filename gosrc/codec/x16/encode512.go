//go:build goexperiment.simd && amd64 && !scalar

package x16

import (
	"math"
	"math/bits"
	"simd/archsimd"
	"unsafe"

	"github.com/overwire/overwire/gosrc/internal/avx"
)

// The AVX-512 encoder gives exactly the same bits as the scalar encoder. It processes the states of four segments in
// parallel, 16 lanes per register, from the last tile to the first. It divides by frequencies in two steps, with an
// exact result (divide512).

type (
	b64 = archsimd.Uint8x64
	f16 = archsimd.Float32x16
)

// fastCoder holds the tables by symbol, the slots by cumulative frequency + rank, and the symbols by value.
type fastCoder struct {
	freq, small, first [16]uint32
	inverse            [16]float32
	slot, syms         [4][64]uint8
}

// prepareFast builds the vector tables for a model.
func (e *Encoder) prepareFast(m *model) {
	if e.level != AVX512 {
		return
	}
	c := &e.fast
	first := 0
	for k, f := range m.freq {
		c.freq[k], c.small[k], c.first[k], c.inverse[k] = 0, 0, uint32(first), 0
		if f == 0 {
			continue
		}
		c.freq[k] = uint32(f)
		c.small[k] = (1<<20 + uint32(f) - 1) / uint32(f)
		// The inverse is too small by a relative error of 1.6 to 1.7 x 2^-23, including rounding. So all roundings of
		// divide512 together cannot make the result too large.
		c.inverse[k] = float32(1 / float64(f) * (1 - 1.65*math.Pow(2, -23)))
		for r := range int(f) {
			c.slot[(first+r)/64][(first+r)%64] = e.slots[k][r]
		}
		first += int(f)
	}
	for v, k := range e.syms {
		c.syms[v/64][v%64] = k
	}
}

// lookup256 looks up 64 bytes i in a table of 256 bytes.
func lookup256(t0, t1, t2, t3, i, half b64) b64 {
	return t2.ConcatPermute(t3, i).Merge(t0.ConcatPermute(t1, i), i.GreaterEqual(half))
}

// symbolsFast is the vector part of turnIntoSymbols. It returns the number of values that it has replaced.
func (e *Encoder) symbolsFast(m *model) int {
	if e.level != AVX512 {
		return 0
	}
	t := &e.fast.syms
	t0, t1 := archsimd.LoadUint8x64(&t[0]), archsimd.LoadUint8x64(&t[1])
	t2, t3 := archsimd.LoadUint8x64(&t[2]), archsimd.LoadUint8x64(&t[3])
	half := archsimd.BroadcastUint8x64(128)
	esc := archsimd.BroadcastUint8x64(uint8(m.escape)) // 255, which never occurs, if there is no escape
	for i := 0; i < len(e.vals); i += 64 {
		p := (*[64]uint8)(e.vals[i:])
		k := lookup256(t0, t1, t2, t3, archsimd.LoadUint8x64(p), half)
		for mask := k.Equal(esc).ToBits(); mask != 0; mask &= mask - 1 {
			j := bits.TrailingZeros64(mask)
			e.escs = append(e.escs, escape{i + j, p[j]})
		}
		k.Store(p)
	}
	avx.Clear()
	return len(e.vals)
}

// divide512 returns x / f and the remainder, for x < f << 24.
//
// The floating-point product is too small by at most 7. x and the product each have a relative error of 2^-24, and
// inverse has 1.7 x 2^-23. Together this is 3.2 x 2^-23, for a quotient below 2^24. The remaining dividend is less
// than 8 f. Multiplying it by ceil(2^20 / f) divides it exactly, because 8 f x f < 2^20.
func divide512(x, f, small v16, inverse f16) (q, r v16) {
	q = x.ConvertToFloat32().Mul(inverse).ConvertToUint32()
	r = x.Sub(q.Mul(f))
	var none v16
	more := r.Mul(small).ShiftAllRightConcat(20, none)
	return q.Add(more), r.Sub(more.Mul(f))
}

// pack512 packs half a tile of symbols into 8 nibbles in each of 16 lanes, with the first symbol in the lowest nibble.
func pack512(p *[128]byte, weights archsimd.Int8x64, order v16) v16 {
	a := archsimd.LoadUint8x64((*[64]uint8)(p[:64])).DotProductPairsSaturated(weights)
	b := archsimd.LoadUint8x64((*[64]uint8)(p[64:])).DotProductPairsSaturated(weights)
	var both b64
	both = both.SetLo(a.AsUint16x32().TruncateToUint8()).SetHi(b.AsUint16x32().TruncateToUint8())
	return both.AsUint32x16().Permute(order)
}

var (
	packWeights = func() (w [64]int8) {
		for i := range w {
			w[i] = int8(1 + i%2*15)
		}
		return
	}()
	packOrder = func() (o [16]uint32) {
		for l := range o {
			o[l] = uint32(unitStart(l) / 8)
		}
		return
	}()
)

// groupFast encodes up to four segments. syms[i] are the symbols of segment i. The results are in e.group[i] and
// e.words[i].
func (e *Encoder) groupFast(syms [][]byte) bool {
	if e.level != AVX512 {
		return false
	}
	most := 0
	for i, s := range syms {
		g := &e.group[i]
		for l := range g.states {
			g.states[l] = start
		}
		g.at = len(e.words[i])
		most = max(most, len(s))
	}
	c := &e.fast
	weights, order := archsimd.LoadInt8x64(&packWeights), archsimd.LoadUint32x16(&packOrder)
	var nibbles [4][2][16]uint32
	for t := most - tileSyms; t >= 0; t -= tileSyms {
		for i, s := range syms {
			if t < len(s) {
				pack512((*[128]byte)(s[t:]), weights, order).Store(&nibbles[i][0])
				pack512((*[128]byte)(s[t+128:]), weights, order).Store(&nibbles[i][1])
			}
		}
		for range 4 {
			for i, s := range syms {
				if t < len(s) {
					e.pair512(c, &e.group[i], e.words[i], &nibbles[i])
				}
			}
		}
	}
	avx.Clear()
	return true
}

// pair512 encodes a pair of steps of a segment. The symbols are in the two highest nibbles of each lane; the nibbles
// are then rotated to the next pair.
func (e *Encoder) pair512(c *fastCoder, g *coding, words []byte, nibbles *[2][16]uint32) {
	freq, first := archsimd.LoadUint32x16(&c.freq), archsimd.LoadUint32x16(&c.first)
	small, inverse := archsimd.LoadUint32x16(&c.small), archsimd.LoadFloat32x16(&c.inverse)
	xa := archsimd.LoadUint32x16((*[16]uint32)(g.states[:16]))
	xb := archsimd.LoadUint32x16((*[16]uint32)(g.states[16:]))
	na := archsimd.LoadUint32x16(&nibbles[0]).RotateAllLeft(4)
	nb := archsimd.LoadUint32x16(&nibbles[1]).RotateAllLeft(4)
	ma, mb := na.RotateAllLeft(4), nb.RotateAllLeft(4)
	ma.Store(&nibbles[0])
	mb.Store(&nibbles[1])
	fa, fb := freq.Permute(na), freq.Permute(nb)
	ha, hb := freq.Permute(ma), freq.Permute(mb)

	// Compress the words of the lanes that overflow, lowest lane first, to end where the previous words start.
	fullA := xa.GreaterEqual(fa.Mul(ha).ShiftAllLeft(16))
	fullB := xb.GreaterEqual(fb.Mul(hb).ShiftAllLeft(16))
	var low archsimd.Uint16x32
	low = low.SetLo(xa.TruncateToUint16()).SetHi(xb.TruncateToUint16())
	full := uint32(fullA.ToBits()) | uint32(fullB.ToBits())<<16
	n := bits.OnesCount32(full)
	g.at -= 2 * n
	if n > 0 {
		out := (*[32]uint16)(unsafe.Pointer(&words[g.at]))
		low.Compress(archsimd.Mask16x32FromBits(full)).StoreMasked(out,
			archsimd.Mask16x32FromBits(^uint32(0)>>((32-n)&31)))
	}
	// Shift by a register of counts, because the compiler emits an invalid instruction for a masked shift by a
	// constant.
	sixteen := archsimd.BroadcastUint32x16(16)
	xa = xa.ShiftRight(sixteen).Merge(xa, fullA)
	xb = xb.ShiftRight(sixteen).Merge(xb, fullB)

	t0, t1 := archsimd.LoadUint8x64(&c.slot[0]), archsimd.LoadUint8x64(&c.slot[1])
	t2, t3 := archsimd.LoadUint8x64(&c.slot[2]), archsimd.LoadUint8x64(&c.slot[3])
	half, low8 := archsimd.BroadcastUint8x64(128), archsimd.BroadcastUint32x16(255)
	qa, ra := divide512(xa, fa, small.Permute(na), inverse.Permute(na))
	qb, rb := divide512(xb, fb, small.Permute(nb), inverse.Permute(nb))
	sa := lookup256(t0, t1, t2, t3, ra.Add(first.Permute(na)).AsUint8x64(), half).AsUint32x16().And(low8)
	sb := lookup256(t0, t1, t2, t3, rb.Add(first.Permute(nb)).AsUint8x64(), half).AsUint32x16().And(low8)
	xa, xb = qa.ShiftAllLeft(8).Or(sa), qb.ShiftAllLeft(8).Or(sb)

	qa, ra = divide512(xa, ha, small.Permute(ma), inverse.Permute(ma))
	qb, rb = divide512(xb, hb, small.Permute(mb), inverse.Permute(mb))
	sa = lookup256(t0, t1, t2, t3, ra.Add(first.Permute(ma)).AsUint8x64(), half).AsUint32x16().And(low8)
	sb = lookup256(t0, t1, t2, t3, rb.Add(first.Permute(mb)).AsUint8x64(), half).AsUint32x16().And(low8)
	qa.ShiftAllLeft(8).Or(sa).Store((*[16]uint32)(g.states[:16]))
	qb.ShiftAllLeft(8).Or(sb).Store((*[16]uint32)(g.states[16:]))
}
