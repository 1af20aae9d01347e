package planes

import (
	"bytes"
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/overwire/overwire/gosrc/codec/codectest"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/tensor"
)

// A sample is an input for a transform.
type sample struct {
	name      string
	transform uint8
	data      []byte
}

// samples returns samples of about n bytes that cover every transform, form and kind.
func samples(r *rand.Rand, n int) (out []sample) {
	add := func(name string, transform uint8, fill func(i int) byte) {
		n := n - n%8
		data := make([]byte, n)
		for i := range data {
			data[i] = fill(i)
		}
		out = append(out, sample{name, transform, data})
	}
	normal := func(int) byte { return byte(int(128 + 9*r.NormFloat64())) }
	noise := func(int) byte { return byte(r.Uint32()) }
	for t := uint8(1); isKnown(t); t++ {
		w := transforms[t].width
		add("high-bytes-of-"+Name(t), t, func(i int) byte {
			if i%w == w-1 {
				return normal(i)
			}
			return noise(i)
		})
		add("zero-"+Name(t), t, func(int) byte { return 0 })
		add("few-"+Name(t), t, func(int) byte { return byte(r.IntN(3)) })
		add("rows-"+Name(t), t, func(i int) byte { return byte(i / 7 % 64 * 37) })
	}
	add("blocks-of-many-kinds", 1, func(i int) byte {
		switch i / 4096 * 4096 * 4 / n { // a quarter of each kind
		case 0:
			return 5
		case 1:
			return normal(i)
		case 2:
			return noise(i)
		}
		return normal(i)/4 + 100
	})
	add("noise", 1, noise)
	add("one-rare-value", 1, func(i int) byte {
		if i == n/2 {
			return 1
		}
		return 0
	})
	add("all-values-alike-but-one", 1, func(i int) byte {
		if r.IntN(4) > 0 {
			return 7
		}
		return byte(r.Uint32())
	})
	return out
}

// All samples pass the codec test suite.
func TestSuite(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	r := rand.New(rand.NewPCG(seed, 1))
	for _, n := range []int{8, 64, 2000, 3*blockBytes + 80} {
		for _, s := range samples(r, n) {
			if n > blockBytes && s.transform != Bytes { // planes of such samples have at most two blocks
				continue
			}
			var e Encoder
			codectest.Run(t, codectest.Codec{
				Encode: func(dst, src []byte) ([]byte, uint16, bool) {
					out, ok := e.Encode(dst, src, s.transform)
					return out, 0, ok
				},
				Decode: func(dst, src []byte, _ uint16) error { return Decode(dst, src, s.transform) },
			}, []codectest.Sample{{Name: s.name, Data: s.data}}, seed)
		}
	}
}

// twin decodes a chunk slowly, following docs/format.md 3.6.
func twin(size int, src []byte, transform uint8) ([]byte, error) {
	bad := errors.New("bad")
	width := map[uint8]int{1: 1, 2: 2, 3: 4, 4: 8, 5: 2, 6: 4, 7: 8}[transform]
	if width == 0 || size == 0 || size%width != 0 {
		return nil, bad
	}
	take := func(n int) []byte {
		if n > len(src) {
			panic(bad)
		}
		p := src[:n]
		src = src[n:]
		return p
	}
	table := func() (freq [256]int) {
		set := take(32)
		sum := 0
		for v := range 256 {
			if set[v/8]>>(v%8)&1 == 1 {
				f := int(take(1)[0])
				if f >= 128 {
					f = (f-128)*256 + int(take(1)[0])
					if f < 128 {
						panic(bad)
					}
				}
				if f == 0 || f > 4095 {
					panic(bad)
				}
				freq[v] = f
				sum += f
			}
		}
		if sum != 4096 {
			panic(bad)
		}
		return freq
	}
	coded := func(n int, freq [256]int) (out []byte) {
		var x [4]uint64
		for l := range x {
			if x[l] = uint64(binary.LittleEndian.Uint32(take(4))); x[l] < 65536 {
				panic(bad)
			}
		}
		words := take(2 * int(binary.LittleEndian.Uint16(take(2))))
		for i := range n {
			s := x[i%4]
			slot, v := int(s%4096), 0
			for slot >= freq[v] {
				slot -= freq[v]
				v++
			}
			s = uint64(freq[v])*(s/4096) + uint64(slot)
			if s < 65536 {
				if len(words) == 0 {
					panic(bad)
				}
				s = s*65536 + uint64(binary.LittleEndian.Uint16(words))
				words = words[2:]
			}
			x[i%4] = s
			out = append(out, byte(v))
		}
		if len(words) != 0 || x != [4]uint64{65536, 65536, 65536, 65536} {
			panic(bad)
		}
		return out
	}
	plane := func(n int) (out []byte) {
		switch take(1)[0] {
		case 2:
			return take(n)
		case 1:
			out = make([]byte, n)
			if decodeFrame(out, take(int(binary.LittleEndian.Uint32(take(4))))) != nil {
				panic(bad)
			}
			return out
		case 0:
			kinds := take((n + 65535) / 65536)
			var shared [256]int
			if slices.Contains(kinds, 3) {
				if bytes.Count(kinds, []byte{3}) < 2 {
					panic(bad)
				}
				shared = table()
			}
			for _, k := range kinds {
				m := min(65536, n-len(out))
				switch k {
				case 0:
					out = append(out, take(m)...)
				case 1:
					out = append(out, bytes.Repeat(take(1), m)...)
				case 2:
					out = append(out, coded(m, table())...)
				case 3:
					out = append(out, coded(m, shared)...)
				default:
					panic(bad)
				}
			}
			return out
		}
		panic(bad)
	}
	var out []byte
	err := func() (err error) {
		defer func() {
			if p := recover(); p != nil {
				err = p.(error)
			}
		}()
		if binary.LittleEndian.Uint32(take(4)) != uint32(size) {
			return bad
		}
		planes := make([][]byte, width)
		for i := range planes {
			planes[i] = plane(size / width)
		}
		if len(src) > 0 {
			return bad
		}
		for k := range size / width {
			e := uint64(0)
			for i := range planes {
				e |= uint64(planes[i][k]) << (8 * i)
			}
			if transform >= 5 {
				e = e>>1 | e&1<<(8*width-1)
			}
			for range width {
				out = append(out, byte(e))
				e >>= 8
			}
		}
		return nil
	}()
	return out, err
}

// agree fails the test unless the slow decoder and Decode both accept or both reject a chunk, and give the same bytes.
func agree(t *testing.T, size int, chunk []byte, transform uint8) {
	t.Helper()
	want, bad := twin(size, chunk, transform)
	got := make([]byte, size)
	err := Decode(got, chunk, transform)
	if (err == nil) != (bad == nil) || err == nil && !bytes.Equal(got, want) {
		t.Fatalf("transform %d, a chunk of %d bytes for %d: Decode returns %v, the twin %v",
			transform, len(chunk), size, err, bad)
	}
	if err != nil && !errors.Is(err, errs.ErrCorrupt) {
		t.Fatal(err)
	}
}

// Decode agrees with the slow decoder on intact and on changed chunks.
func TestTwin(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 2))
	var e Encoder
	for _, n := range []int{40, 3000, 2*blockBytes + 4096} {
		for _, s := range samples(r, n) {
			if n > blockBytes && s.transform != Bytes {
				continue
			}
			chunk, ok := e.Encode(nil, s.data, s.transform)
			if !ok {
				continue
			}
			agree(t, len(s.data), chunk, s.transform)
			for range 10 {
				p := bytes.Clone(chunk)
				p[r.IntN(min(len(p), 1+r.IntN(len(p))))] ^= 1 << r.IntN(8)
				agree(t, len(s.data), p, s.transform)
			}
		}
	}
}

// Decode and the slow decoder agree on any input.
func FuzzTwin(f *testing.F) {
	r := rand.New(rand.NewPCG(7, 3))
	var e Encoder
	for _, s := range samples(r, 1200) {
		if chunk, ok := e.Encode(nil, s.data, s.transform); ok {
			f.Add(uint32(len(s.data)), chunk, s.transform)
		}
	}
	f.Fuzz(func(t *testing.T, size uint32, chunk []byte, transform uint8) {
		agree(t, int(size%(2*blockBytes)), chunk, transform%10)
	})
}

// Any encoded input round-trips.
func FuzzRoundTrip(f *testing.F) {
	f.Add([]byte("abcabcabcabcabcabcabcabcabcabcabcabcabcabcabc0123"), uint8(1), uint8(9))
	f.Fuzz(func(t *testing.T, data []byte, transform, times uint8) {
		data = bytes.Repeat(data, int(times))
		var e Encoder
		chunk, ok := e.Encode(nil, data, transform)
		if !ok {
			return
		}
		if len(chunk) >= len(data) {
			t.Fatalf("%d bytes were encoded as %d, which is not smaller", len(data), len(chunk))
		}
		got := make([]byte, len(data))
		if err := Decode(got, chunk, transform); err != nil || !bytes.Equal(got, data) {
			t.Fatal(err)
		}
	})
}

// The samples contain every form of a plane and every kind of block, so the other tests cover all of them.
func TestEveryKind(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 4))
	var e Encoder
	kinds, forms := map[byte]bool{}, map[byte]bool{}
	for _, s := range samples(r, 8*blockBytes) {
		chunk, ok := e.Encode(nil, s.data, s.transform)
		if !ok {
			continue
		}
		forms[chunk[4]] = true
		if chunk[4] == formBlocks {
			for _, k := range e.kinds {
				kinds[k] = true
			}
		}
	}
	if len(kinds) != 4 || len(forms) != 3 {
		t.Errorf("got the kinds %v and forms %v, want 4 and 3", kinds, forms)
	}
}

// The cost of a table equals the size of the encoded words, except for rounding.
func TestCost(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 5))
	var e Encoder
	for _, spread := range []float64{0.4, 3, 30} {
		p := make([]byte, 50000)
		for i := range p {
			p[i] = byte(int(99 + spread*r.NormFloat64()))
		}
		h := countValues(p)
		table := fitTable(&h, uint32(len(p)))
		took, cost := len(e.encodeBlock(nil, p, &table))-blockHead, int(table.costOf(&h))
		if took < cost-40 || took > cost+40+cost/1000 {
			t.Errorf("%v: got %d bytes, but the cost is %d", spread, took, cost)
		}
	}
}

// Each type allows its own transform and the transform Bytes.
func TestTransforms(t *testing.T) {
	for d := tensor.DType(1); d.Valid(); d++ {
		f := transforms[TransformFor(d)]
		if w := max(1, d.Bits()/8); d != tensor.C64 && f.width != w || d == tensor.C64 && f.width != 4 {
			t.Errorf("%v: elements of %d bytes", d, f.width)
		}
		for tr := range uint8(12) {
			if Allowed(tr, d) != (tr == Bytes || tr == TransformFor(d)) {
				t.Errorf("%v: Allowed is wrong for transform %d", d, tr)
			}
		}
	}
}
