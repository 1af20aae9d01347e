package cuda

import (
	"encoding/binary"
	"errors"
	"math"
	"testing"
	"unsafe"

	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/device/cuda/queue"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/tensor"
)

func upload(t *testing.T, d *Device, l *queue.Queue, b []byte) device.Memory {
	t.Helper()
	mem, err := d.Alloc([]int64{int64(len(b))})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(mem[0].Release)
	for at := 0; at < len(b); {
		s, err := l.Get(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		n := copy(s.Memory(), b[at:])
		job := []device.DecodeTask{{Chunk: tensor.Chunk{Stored: uint32(n), Logical: uint32(n)},
			Dst: unsafe.Add(mem[0].Ptr, at)}}
		if err := l.Submit(s, int64(n), job, func(_ int, err error) {
			if err != nil {
				t.Error(err)
			}
		}); err != nil {
			t.Fatal(err)
		}
		at += n
	}
	if err := l.Drain(t.Context()); err != nil {
		t.Fatal(err)
	}
	return mem[0]
}

// small returns the value of a small float with e exponent and m mantissa bits.
func small(v uint32, e, m int, fn bool) float64 {
	exp, man := int(v>>m)&(1<<e-1), int(v)&(1<<m-1)
	x := 0.0
	switch bias := 1<<(e-1) - 1; {
	case fn && exp == 15 && man == 7:
		x = math.NaN()
	case !fn && exp == 1<<e-1 && man != 0:
		x = math.NaN()
	case !fn && exp == 1<<e-1:
		x = math.Inf(1)
	case exp == 0:
		x = math.Ldexp(float64(man), 1-bias-m)
	default:
		x = math.Ldexp(float64(man|1<<m), exp-bias-m)
	}
	if v>>(e+m)&1 != 0 {
		x = -x
	}
	return x
}

func value(d tensor.DType, v uint32) float64 {
	switch d {
	case tensor.F32:
		return float64(math.Float32frombits(v))
	case tensor.BF16:
		return float64(math.Float32frombits(v << 16))
	case tensor.F16:
		return small(v, 5, 10, false)
	case tensor.F8E4M3:
		return small(v, 4, 3, true)
	}
	return small(v, 5, 2, false)
}

// nearest reports whether got is x rounded to a 16-bit type, with ties to even.
func nearest(d tensor.DType, x float64, got uint32) bool {
	g := value(d, got)
	if math.IsNaN(x) || math.IsNaN(g) {
		return math.IsNaN(x) && math.IsNaN(g)
	}
	if x == 0 {
		return g == 0 && math.Signbit(x) == math.Signbit(g)
	}
	if math.IsInf(x, 0) {
		return g == x
	}
	if math.Signbit(x) != (got>>15 > 0) {
		return false
	}
	a := math.Abs(x)
	at := func(bits uint32) float64 { // infinity is the next larger value
		v := value(d, bits)
		if !math.IsInf(v, 0) {
			return v
		}
		below := value(d, bits-1)
		return below + (below - value(d, bits-2))
	}
	mag := got & 0x7fff
	dist := math.Abs(at(mag) - a)
	if mag > 0 {
		if o := math.Abs(at(mag-1) - a); o < dist || o == dist && mag&1 == 1 {
			return false
		}
	}
	if !math.IsInf(value(d, mag), 0) {
		if o := math.Abs(at(mag+1) - a); o < dist || o == dist && mag&1 == 1 {
			return false
		}
	}
	return true
}

// Every value of the small types, and many float32 values, are rounded correctly.
func TestCast(t *testing.T) {
	r := random(t)
	d, l := open(t, 1, 1<<20)
	read := func(b []byte, bits int, i int) uint32 {
		switch bits {
		case 8:
			return uint32(b[i])
		case 16:
			return uint32(binary.LittleEndian.Uint16(b[2*i:]))
		}
		return binary.LittleEndian.Uint32(b[4*i:])
	}
	for _, from := range []tensor.DType{tensor.F32, tensor.BF16, tensor.F16, tensor.F8E4M3, tensor.F8E5M2} {
		var b []byte
		n := 1 << min(16, from.Bits())
		for i := range n {
			switch from.Bits() {
			case 8:
				b = append(b, byte(i))
			case 16:
				b = binary.LittleEndian.AppendUint16(b, uint16(i))
			default:
				v := r.Uint32()
				switch i % 4 {
				case 1: // ties of both 16-bit types, and neighbouring values
					v = v&^0xffff | 0x8000 + uint32(r.IntN(3)) - 1
				case 2:
					v = v&^0x1fff | 0x1000 + uint32(r.IntN(3)) - 1
				}
				if i%3 == 0 { // the range of F16
					v = v&^0x7f800000 | uint32(127-26+r.IntN(45))<<23
				}
				b = binary.LittleEndian.AppendUint32(b, v)
			}
		}
		src := upload(t, d, l, b)
		for _, to := range []tensor.DType{tensor.F32, tensor.BF16, tensor.F16} {
			mem, err := d.Alloc([]int64{int64(n * to.Bits() / 8)})
			if err != nil {
				t.Fatal(err)
			}
			if err := l.CastAndWait(t.Context(), mem[0], src, from, to); err != nil {
				t.Fatal(err)
			}
			got := make([]byte, mem[0].Bytes)
			if err := d.Read(got, mem[0]); err != nil {
				t.Fatal(err)
			}
			mem[0].Release()
			for i := range n {
				in, out := read(b, from.Bits(), i), read(got, to.Bits(), i)
				x := value(from, in)
				good := nearest(to, x, out)
				if to == tensor.F32 {
					y := value(to, out)
					good = x == y && math.Signbit(x) == math.Signbit(y) || math.IsNaN(x) && math.IsNaN(y)
				}
				if !good {
					t.Fatalf("%v %#x (%g) was cast to %v %#x (%g)", from, in, x, to, out, value(to, out))
				}
			}
		}
	}
	if err := l.CastAndWait(t.Context(), device.Memory{}, device.Memory{}, tensor.I8,
		tensor.F32); !errors.Is(err, errs.ErrNotSupported) {
		t.Errorf("from I8: %v", err)
	}
}
