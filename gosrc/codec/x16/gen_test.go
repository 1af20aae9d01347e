package x16

import (
	"encoding/binary"
	"math"
	"math/rand/v2"
)

// A sample is generated data for one transform.
type sample struct {
	name      string
	transform uint8
	data      []byte
	packs     bool // whether it must be compressible
}

func float16(f float32) uint16 {
	b := math.Float32bits(f)
	sign := uint16(b>>16) & 0x8000
	exp := int(b>>23&255) - 127 + 15
	switch {
	case exp <= 0:
		if exp < -10 {
			return sign
		}
		return sign | uint16((b&0x7fffff|0x800000)>>(14-exp))
	case exp >= 31:
		return sign | 0x7c00
	}
	return sign | uint16(exp)<<10 | uint16(b>>13)&0x3ff
}

// gaussian returns n weights as float32. As in trained matrices, each row of 4096 has its own scale.
func gaussian(r *rand.Rand, n int) []float32 {
	w := make([]float32, n)
	scale := 0.0
	for i := range w {
		if i%4096 == 0 {
			scale = 0.02 * math.Exp(0.1*r.NormFloat64())
		}
		w[i] = float32(scale * r.NormFloat64())
	}
	return w
}

// samples returns samples of about n elements for every transform: weights, and values that are likely to cause
// errors.
func samples(r *rand.Rand, n int) []sample {
	w := gaussian(r, n)
	var bf, hf, f32, f32b, e4, e5, i8, i4, wide []byte
	le := binary.LittleEndian
	for _, x := range w {
		b := math.Float32bits(x)
		bf = le.AppendUint16(bf, uint16(b>>16))
		hf = le.AppendUint16(hf, float16(x))
		f32 = le.AppendUint32(f32, b)
		f32b = le.AppendUint32(f32b, b&0xffff0000)
		h := float16(x * 16)
		e5 = append(e5, byte(h>>8))
		exp := max(0, min(15, int(b>>23&255)-127+7+5))
		e4 = append(e4, byte(b>>24&0x80)|byte(exp)<<3|byte(b>>20&7))
		i8 = append(i8, byte(int8(max(-127, min(127, x*800)))))
		wide = append(wide, byte(r.IntN(4)*r.IntN(4)))
		if len(i4) < n/2 {
			a, b := int(4*r.NormFloat64()/2), int(4*r.NormFloat64()/2)
			i4 = append(i4, byte(a&15|b&15<<4))
		}
	}
	uniform := make([]byte, 2*n)
	for i := range uniform {
		uniform[i] = byte(r.Uint32())
	}
	equal := make([]byte, 2*n)
	for i := range equal {
		equal[i] = []byte{0x80, 0x3f}[i&1]
	}
	hostile := []uint16{0x7fc1, 0xffff, 0x7f81, 0x0001, 0x8001, 0x7f80, 0xff80, 0x8000, 0, 0x0080}
	var even17, nan, rare []byte
	for i := range n {
		even17 = le.AppendUint16(even17, uint16(100+r.IntN(17))<<7|uint16(r.Uint32()&0x807f))
		nan = le.AppendUint16(nan, hostile[r.IntN(len(hostile))])
		v := uint16(0x3f80)
		if i%1000 == 999 {
			v = uint16(r.Uint32())
		}
		rare = le.AppendUint16(rare, v)
	}
	out := []sample{
		{"gaussian bf16", BF16, bf, true},
		{"gaussian fp16", FP16, hf, true},
		{"gaussian fp32", FP32, f32, true},
		{"fp32 that holds bf16", FP32, f32b, true},
		{"e4m3", E4M3, e4, true},
		{"e5m2", E5M2, e5, true},
		{"int8", Int8, i8, true},
		{"int4 pairs", Nibbles, i4, true},
		{"few bytes", Bytes, wide, true},
		{"17 exponents", BF16, even17, true},
		{"NaN payloads and subnormals", BF16, nan, true},
		{"rare escapes", BF16, rare, true},
	}
	for t := uint8(BF16); t <= Bytes; t++ {
		out = append(out,
			sample{"all equal " + Name(t), t, equal, true},
			sample{"uniform " + Name(t), t, uniform, false},
			sample{"bf16 read as " + Name(t), t, bf, false})
	}
	return out
}
