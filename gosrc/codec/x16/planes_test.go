package x16

import (
	"bytes"
	"encoding/binary"
	"math/rand/v2"
	"testing"
)

// every returns whole tiles of elements for a transform: all elements of 4, 8 and 16 bits; for 32 bits, each single
// bit, all bits except one, and random elements.
func every(r *rand.Rand, transform uint8) []byte {
	var out []byte
	switch page[transform].width {
	case 32:
		for i := range 32 {
			out = binary.LittleEndian.AppendUint32(out, 1<<i)
			out = binary.LittleEndian.AppendUint32(out, ^uint32(1<<i))
		}
		for len(out) < 4*256*64 {
			out = binary.LittleEndian.AppendUint32(out, r.Uint32())
		}
	case 16:
		for i := range 1 << 16 {
			out = binary.LittleEndian.AppendUint16(out, uint16(i))
		}
	default:
		for i := range 1 << 12 {
			out = append(out, byte(i*(1+i>>8)))
		}
		for i := range 256 {
			out = append(out, byte(i))
		}
		out = append(out, out[:(-len(out)&255)]...)
	}
	return out
}

// byPage divides elements according to docs/format.md.
func byPage(transform uint8, src []byte) (vals []byte, planes [maxPlanes][]byte) {
	f := page[transform]
	n := len(src) * 8 / f.width
	vals = make([]byte, n)
	for k, bits := range f.planes {
		planes[k] = make([]byte, n*len(bits)/8)
	}
	for i := range n {
		e := f.element(src, i)
		vals[i] = byte(pick(e, f.value))
		for k, bits := range f.planes {
			b := i * len(bits)
			planes[k][b/8] |= byte(pick(e, bits) << (b % 8))
		}
	}
	return vals, planes
}

// Each level divides every element into the symbol value and planes of docs/format.md and joins them again, for any
// number of tiles.
func TestEveryElement(t *testing.T) {
	const seed = 12
	r := rand.New(rand.NewPCG(seed, 0))
	for tr := uint8(BF16); tr <= Bytes; tr++ {
		all := every(r, tr)
		tile := sizeOf(tr, 1, 0)
		tiles := len(all) / tile
		for _, part := range [][2]int{{0, tiles}, {1, 2}, {0, 1}, {2, 5}, {tiles - 3, tiles}} {
			src := all[part[0]*tile : part[1]*tile]
			vals, planes := byPage(tr, src)
			for _, l := range Levels() {
				e := Encoder{level: l, forced: true}
				e.splitElements(tr, src, len(vals))
				if !bytes.Equal(e.vals, vals) {
					t.Errorf("%v, %s: wrong symbol values", l, Name(tr))
				}
				for k := range page[tr].planes {
					if !bytes.Equal(e.plane[k], planes[k]) {
						t.Errorf("%v, %s: wrong plane %d", l, Name(tr), k)
					}
				}
				dst := bytes.Repeat([]byte{0xa5}, len(src)+64)
				if out := dst[:len(src):len(src)]; l == Scalar || !mergeFast(l, tr, out, vals, &planes) {
					mergeScalar(tr, out, vals, &planes)
				}
				if !bytes.Equal(dst[:len(src)], src) {
					t.Errorf("%v, %s: joined to wrong elements", l, Name(tr))
				}
				if !bytes.Equal(dst[len(src):], bytes.Repeat([]byte{0xa5}, 64)) {
					t.Errorf("%v, %s: wrote beyond the destination", l, Name(tr))
				}
			}
		}
	}
}

// patchEscape replaces the sentinel in an element and changes no other bit. It reports whether the element had the
// sentinel.
func TestPatch(t *testing.T) {
	const seed = 13
	r := rand.New(rand.NewPCG(seed, 0))
	var d decoder
	for tr := uint8(BF16); tr <= Bytes; tr++ {
		f := page[tr]
		if f.identity {
			d.chunk.transform, d.chunk.dst = tr, make([]byte, 64)
			if d.chunk.patchEscape(3, 1) {
				t.Errorf("%s has no escapes", Name(tr))
			}
			continue
		}
		for range 500 {
			dst := make([]byte, 16*f.width/8)
			for i := range dst {
				dst[i] = byte(r.Uint32())
			}
			at, sentinel, v := r.IntN(16), byte(r.IntN(1<<len(f.value))), byte(r.IntN(1<<len(f.value)))
			there := r.IntN(3) > 0
			if there {
				f.put(dst, at, f.element(dst, at)&^place(1<<len(f.value)-1, f.value)|place(uint32(sentinel), f.value))
			}
			there = byte(pick(f.element(dst, at), f.value)) == sentinel
			want := bytes.Clone(dst)
			f.put(want, at, f.element(dst, at)&^place(1<<len(f.value)-1, f.value)|place(uint32(v), f.value))
			d.chunk.transform, d.chunk.dst, d.chunk.symbols.sentinel = tr, dst, sentinel
			if got := d.chunk.patchEscape(at, v); got != there {
				t.Fatalf("%s: %d at %d: %v", Name(tr), sentinel, at, got)
			}
			if there && !bytes.Equal(dst, want) {
				t.Fatalf("%s: %d becomes %d: %x, want %x", Name(tr), sentinel, v, dst, want)
			}
		}
	}
}

// Constant planes have the correct value in every width. Planes in which any bit differs are not constant.
func TestConstantPlanes(t *testing.T) {
	for tr := uint8(BF16); tr <= Bytes; tr++ {
		f := page[tr]
		size := sizeOf(tr, 10, 5)
		for k, bits := range f.planes {
			for _, v := range []uint32{0, 1, 1<<len(bits) - 1, 1 << (len(bits) - 1), 5 & (1<<len(bits) - 1)} {
				src := make([]byte, size)
				for i := range size * 8 / f.width {
					f.put(src, i, place(uint32(3+i%5*i%3), f.value)|place(v, bits))
				}
				var e Encoder
				for _, odd := range []int{-1, 0, 7, 8, 2559} {
					data := bytes.Clone(src)
					if odd >= 0 {
						f.put(data, odd, f.element(data, odd)^1<<bits[len(bits)-1])
					}
					chunk, st, ok := e.Encode(nil, data, tr)
					if !ok {
						t.Fatalf("%s: the data was not compressed", Name(tr))
					}
					if constant := chunk[2]>>k&1 == 1; constant != (odd < 0) || constant && uint32(chunk[8+k]) != v {
						t.Errorf("%s, plane %d of value %d, element %d differs: got bits %b, value %d",
							Name(tr), k, v, odd, chunk[2], chunk[8+k])
					}
					if got, err := pageDecode(chunk, size, tr, st); err != nil || !bytes.Equal(got, data) {
						t.Errorf("%s: %v", Name(tr), err)
					}
					if !agree(t, chunk, size, tr, st) {
						t.Errorf("%s, plane %d: refused", Name(tr), k)
					}
				}
			}
		}
	}
}
