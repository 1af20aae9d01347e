//go:build goexperiment.simd && amd64 && !scalar

package x16

// This file measures the least that wider symbols would cost the vector decoders:
// docs/benchmarks.md has what they would save.

import (
	"math/rand/v2"
	"simd/archsimd"
	"slices"
	"testing"
	"time"
	"unsafe"
)

// A stepper runs the inner loop of a kernel in every lane of four segments, over
// random words, which decode to something.
type stepper struct {
	fast   fastTables
	states [4][lanes]uint32
	labels [4][lanes]uint32
	words  [1 << 18]byte
}

const stepperRounds = 1 << 8 // of two symbols in each lane

// next is where the words of segment i go on.
func (s *stepper) next(cur *[4]int, i int) unsafe.Pointer {
	return unsafe.Pointer(&s.words[i<<16|cur[i]&0xff80])
}

// two256 is the loop of kernel256, each256 the same with a refill for each symbol.
func (s *stepper) two256() {
	t, cur := &s.fast.narrow, [4]int{}
	divider, alias := archsimd.LoadUint8x32(&t.divider), archsimd.LoadUint8x32(&t.alias)
	bias, freq := archsimd.LoadUint8x32(&t.bias), archsimd.LoadUint8x32(&t.freq)
	low4, c16 := archsimd.BroadcastUint32x8(15), archsimd.BroadcastUint32x8(16)
	byte0, by8 := archsimd.BroadcastUint32x8(0x80808000), archsimd.LoadInt8x32(&shift8)
	for range stepperRounds {
		for i := 0; i < 4; i += 2 {
			for h := 0; h < lanes; h += 8 {
				p0, p1 := (*[8]uint32)(s.states[i&2][h&24:]), (*[8]uint32)(s.states[i&2|1][h&24:])
				x0, a0 := step256(archsimd.LoadUint32x8(p0), low4, byte0, c16, by8, divider, alias, bias, freq)
				x1, a1 := step256(archsimd.LoadUint32x8(p1), low4, byte0, c16, by8, divider, alias, bias, freq)
				x0, e0 := step256(x0, low4, byte0, c16, by8, divider, alias, bias, freq)
				x1, e1 := step256(x1, low4, byte0, c16, by8, divider, alias, bias, freq)
				a0.Or(e0.ShiftAllLeft(8)).Store((*[8]uint32)(s.labels[i&2][h&24:]))
				a1.Or(e1.ShiftAllLeft(8)).Store((*[8]uint32)(s.labels[i&2|1][h&24:]))
				x0, n0 := refill256(x0, (*[8]uint16)(s.next(&cur, i&2)))
				x1, n1 := refill256(x1, (*[8]uint16)(s.next(&cur, i&2|1)))
				cur[i&2] += n0
				cur[i&2|1] += n1
				x0.Store(p0)
				x1.Store(p1)
			}
		}
	}
}

func (s *stepper) each256() {
	t, cur := &s.fast.narrow, [4]int{}
	divider, alias := archsimd.LoadUint8x32(&t.divider), archsimd.LoadUint8x32(&t.alias)
	bias, freq := archsimd.LoadUint8x32(&t.bias), archsimd.LoadUint8x32(&t.freq)
	low4, c16 := archsimd.BroadcastUint32x8(15), archsimd.BroadcastUint32x8(16)
	byte0, by8 := archsimd.BroadcastUint32x8(0x80808000), archsimd.LoadInt8x32(&shift8)
	for range stepperRounds {
		for i := 0; i < 4; i += 2 {
			for h := 0; h < lanes; h += 8 {
				p0, p1 := (*[8]uint32)(s.states[i&2][h&24:]), (*[8]uint32)(s.states[i&2|1][h&24:])
				x0, a0 := step256(archsimd.LoadUint32x8(p0), low4, byte0, c16, by8, divider, alias, bias, freq)
				x1, a1 := step256(archsimd.LoadUint32x8(p1), low4, byte0, c16, by8, divider, alias, bias, freq)
				x0, n0 := refill256(x0, (*[8]uint16)(s.next(&cur, i&2)))
				x1, n1 := refill256(x1, (*[8]uint16)(s.next(&cur, i&2|1)))
				cur[i&2] += n0
				cur[i&2|1] += n1
				x0, e0 := step256(x0, low4, byte0, c16, by8, divider, alias, bias, freq)
				x1, e1 := step256(x1, low4, byte0, c16, by8, divider, alias, bias, freq)
				a0.Or(e0.ShiftAllLeft(8)).Store((*[8]uint32)(s.labels[i&2][h&24:]))
				a1.Or(e1.ShiftAllLeft(8)).Store((*[8]uint32)(s.labels[i&2|1][h&24:]))
				x0, n0 = refill256(x0, (*[8]uint16)(s.next(&cur, i&2)))
				x1, n1 = refill256(x1, (*[8]uint16)(s.next(&cur, i&2|1)))
				cur[i&2] += n0
				cur[i&2|1] += n1
				x0.Store(p0)
				x1.Store(p1)
			}
		}
	}
}

// two512 is the loop of kernel512, each512 the same with a refill for each symbol.
func (s *stepper) two512() {
	cur := [4]int{}
	above := archsimd.LoadUint32x16(&s.fast.above)
	entry0 := archsimd.LoadUint32x16((*[16]uint32)(s.fast.entry[:16]))
	entry1 := archsimd.LoadUint32x16((*[16]uint32)(s.fast.entry[16:]))
	low8, not15 := archsimd.BroadcastUint32x16(255), archsimd.BroadcastUint32x16(^uint32(15))
	begin, pick := archsimd.BroadcastUint32x16(start), archsimd.LoadInt8x64(&pickBias)
	for range stepperRounds {
		for i := 0; i < 4; i += 2 {
			for h := 0; h < lanes; h += 16 {
				p0, p1 := (*[16]uint32)(s.states[i&2][h&16:]), (*[16]uint32)(s.states[i&2|1][h&16:])
				q0, q1 := (*[16]uint32)(s.labels[i&2][h&16:]), (*[16]uint32)(s.labels[i&2|1][h&16:])
				x0, e0 := step512(archsimd.LoadUint32x16(p0), above, entry0, entry1, low8, not15, pick)
				x1, e1 := step512(archsimd.LoadUint32x16(p1), above, entry0, entry1, low8, not15, pick)
				a0 := archsimd.LoadUint32x16(q0).ShiftAllLeftConcat(4, e0)
				a1 := archsimd.LoadUint32x16(q1).ShiftAllLeftConcat(4, e1)
				x0, e0 = step512(x0, above, entry0, entry1, low8, not15, pick)
				x1, e1 = step512(x1, above, entry0, entry1, low8, not15, pick)
				a0.ShiftAllLeftConcat(4, e0).Store(q0)
				a1.ShiftAllLeftConcat(4, e1).Store(q1)
				x0, n0 := refill512(x0, begin, (*[16]uint16)(s.next(&cur, i&2)))
				x1, n1 := refill512(x1, begin, (*[16]uint16)(s.next(&cur, i&2|1)))
				cur[i&2] += n0
				cur[i&2|1] += n1
				x0.Store(p0)
				x1.Store(p1)
			}
		}
	}
}

func (s *stepper) each512() {
	cur := [4]int{}
	above := archsimd.LoadUint32x16(&s.fast.above)
	entry0 := archsimd.LoadUint32x16((*[16]uint32)(s.fast.entry[:16]))
	entry1 := archsimd.LoadUint32x16((*[16]uint32)(s.fast.entry[16:]))
	low8, not15 := archsimd.BroadcastUint32x16(255), archsimd.BroadcastUint32x16(^uint32(15))
	begin, pick := archsimd.BroadcastUint32x16(start), archsimd.LoadInt8x64(&pickBias)
	for range stepperRounds {
		for i := 0; i < 4; i += 2 {
			for h := 0; h < lanes; h += 16 {
				p0, p1 := (*[16]uint32)(s.states[i&2][h&16:]), (*[16]uint32)(s.states[i&2|1][h&16:])
				q0, q1 := (*[16]uint32)(s.labels[i&2][h&16:]), (*[16]uint32)(s.labels[i&2|1][h&16:])
				x0, e0 := step512(archsimd.LoadUint32x16(p0), above, entry0, entry1, low8, not15, pick)
				x1, e1 := step512(archsimd.LoadUint32x16(p1), above, entry0, entry1, low8, not15, pick)
				a0 := archsimd.LoadUint32x16(q0).ShiftAllLeftConcat(4, e0)
				a1 := archsimd.LoadUint32x16(q1).ShiftAllLeftConcat(4, e1)
				x0, n0 := refill512(x0, begin, (*[16]uint16)(s.next(&cur, i&2)))
				x1, n1 := refill512(x1, begin, (*[16]uint16)(s.next(&cur, i&2|1)))
				cur[i&2] += n0
				cur[i&2|1] += n1
				x0, e0 = step512(x0, above, entry0, entry1, low8, not15, pick)
				x1, e1 = step512(x1, above, entry0, entry1, low8, not15, pick)
				a0.ShiftAllLeftConcat(4, e0).Store(q0)
				a1.ShiftAllLeftConcat(4, e1).Store(q1)
				x0, n0 = refill512(x0, begin, (*[16]uint16)(s.next(&cur, i&2)))
				x1, n1 = refill512(x1, begin, (*[16]uint16)(s.next(&cur, i&2|1)))
				cur[i&2] += n0
				cur[i&2|1] += n1
				x0.Store(p0)
				x1.Store(p1)
			}
		}
	}
}

// wide512 is two512 for 32 symbols in 32 buckets of 8: tables of twice the size.
func (s *stepper) wide512() {
	cur := [4]int{}
	above0 := archsimd.LoadUint32x16(&s.fast.above)
	entry0 := archsimd.LoadUint32x16((*[16]uint32)(s.fast.entry[:16]))
	entry1 := archsimd.LoadUint32x16((*[16]uint32)(s.fast.entry[16:]))
	above1, entry2, entry3 := above0.Add(entry0), entry0.Add(above0), entry1.Add(above0)
	low8, not7 := archsimd.BroadcastUint32x16(255), archsimd.BroadcastUint32x16(^uint32(7))
	begin, pick := archsimd.BroadcastUint32x16(start), archsimd.LoadInt8x64(&pickBias)
	bit8 := archsimd.BroadcastUint32x16(1 << 8)
	for range stepperRounds {
		for i := 0; i < 4; i += 2 {
			for h := 0; h < lanes; h += 16 {
				p0, p1 := (*[16]uint32)(s.states[i&2][h&16:]), (*[16]uint32)(s.states[i&2|1][h&16:])
				q0, q1 := (*[16]uint32)(s.labels[i&2][h&16:]), (*[16]uint32)(s.labels[i&2|1][h&16:])
				x0, e0 := wider512(archsimd.LoadUint32x16(p0), above0, above1, entry0, entry1, entry2, entry3, low8, not7, bit8, pick)
				x1, e1 := wider512(archsimd.LoadUint32x16(p1), above0, above1, entry0, entry1, entry2, entry3, low8, not7, bit8, pick)
				a0 := archsimd.LoadUint32x16(q0).ShiftAllLeftConcat(8, e0)
				a1 := archsimd.LoadUint32x16(q1).ShiftAllLeftConcat(8, e1)
				x0, e0 = wider512(x0, above0, above1, entry0, entry1, entry2, entry3, low8, not7, bit8, pick)
				x1, e1 = wider512(x1, above0, above1, entry0, entry1, entry2, entry3, low8, not7, bit8, pick)
				a0.ShiftAllLeftConcat(8, e0).Store(q0)
				a1.ShiftAllLeftConcat(8, e1).Store(q1)
				x0, n0 := refill512(x0, begin, (*[16]uint16)(s.next(&cur, i&2)))
				x1, n1 := refill512(x1, begin, (*[16]uint16)(s.next(&cur, i&2|1)))
				cur[i&2] += n0
				cur[i&2|1] += n1
				x0.Store(p0)
				x1.Store(p1)
			}
		}
	}
}

// wider512 is step512 for such tables.
func wider512(x, above0, above1, entry0, entry1, entry2, entry3, low8, not7, bit8 v16, pick archsimd.Int8x64) (v16, v16) {
	var none v16
	r := x.Or(not7)
	z := above0.ConcatPermute(above1, x.RotateAllRight(3)).Add(r)
	at := z.RotateAllRight(3)
	e := entry0.ConcatPermute(entry1, at).Merge(entry2.ConcatPermute(entry3, at), z.And(bit8).Equal(bit8))
	bias := e.AsUint8x64().DotProductPairsSaturated(pick).AsInt32x16().AsUint32x16()
	return e.And(low8).Mul(x.ShiftAllRightConcat(8, none)).Add(r.Add(bias)), e
}

// BenchmarkWider reports what the loop of each vector kernel, without writing symbols,
// has left of its speed if symbols are wider: by the fastest quarter of alternating runs.
func BenchmarkWider(b *testing.B) {
	const seed = 5
	r := rand.New(rand.NewPCG(seed, 0))
	var s stepper
	for i := range s.words {
		s.words[i] = byte(r.Uint32())
	}
	d := decoder{table: newTable([16]uint8{70, 60, 40, 25, 15, 10, 8, 6, 5, 4, 3, 3, 2, 2, 2, 1}), escape: -1}
	for _, l := range Levels() {
		d.level = l
		ways, names := []func(){s.two256, s.each256}, []string{"", "with-a-refill-a-symbol"}
		switch l {
		case AVX512:
			ways, names = []func(){s.two512, s.each512, s.wide512}, append(names, "with-32-symbols")
		case AVX2:
		default:
			continue
		}
		d.fast.build(&d)
		s.fast = d.fast
		b.Run(l.String(), func(b *testing.B) {
			took := make([][]float64, len(ways))
			for n := 0; b.Loop(); n++ {
				for k, way := range ways {
					for i := range s.states {
						for j := range s.states[i] {
							s.states[i][j] = start + r.Uint32N(1<<30)
						}
					}
					begin := time.Now()
					way()
					took[k] = append(took[k], float64(time.Since(begin).Nanoseconds()))
				}
			}
			for k := range took {
				slices.Sort(took[k])
				if now := took[0][len(took[0])/4]; k > 0 {
					b.ReportMetric(now/took[k][len(took[k])/4], names[k])
				}
			}
		})
	}
}
