//go:build owfake

package stream

import (
	"bytes"
	"encoding/binary"
	"math/bits"
	"math/rand/v2"
	"testing"
)

// A cascade describes how a Cascaded block is encoded. See gosrc/nvcomp/cascaded for the layout.
type cascade struct {
	kind, rles, deltas int
	pack               bool
}

func (c cascade) size() int { return 1 << (c.kind / 2) }

func roundUp(n, to int) int { return (n + to - 1) / to * to }

func padded(b []byte, to int) []byte { return append(b, make([]byte, roundUp(len(b), to)-len(b))...) }

func appendElement(b []byte, size int, v uint64) []byte {
	return append(b, binary.LittleEndian.AppendUint64(nil, v)[:size]...)
}

// array appends values of a given size, packed or not.
func (c cascade) array(b []byte, values []uint64, size int) []byte {
	if !c.pack {
		for _, v := range values {
			b = appendElement(b, size, v)
		}
		return b
	}
	shift, least, most := 64-8*size, int64(0), int64(0)
	for i, v := range values {
		x := int64(v<<shift) >> shift
		if i == 0 {
			least, most = x, x
		}
		least, most = min(least, x), max(most, x)
	}
	width := bits.Len64(uint64(most - least))
	at := len(b)
	b = padded(appendElement(b, size, uint64(least)), 4)
	b = binary.LittleEndian.AppendUint16(b, uint16(len(values)))
	b = binary.LittleEndian.AppendUint16(b, uint16(width))
	for (len(b)-at)%max(4, size) != 0 {
		b = append(b, 0)
	}
	words := make([]byte, (len(values)*width+31)/32*4)
	for i, v := range values {
		x := uint64(int64(v<<shift)>>shift - least)
		for k := range width {
			words[(i*width+k)/8] |= byte(x>>k&1) << ((i*width + k) % 8)
		}
	}
	return append(b, words...)
}

// encode encodes elements to a block, in chunks of 4096 bytes.
func (c cascade) encode(values []uint64) []byte {
	size := c.size()
	mask := ^uint64(0) >> (64 - 8*size)
	b := []byte{byte(c.rles), byte(c.deltas), 0, byte(c.kind)}
	if c.pack {
		b[2] = 1
	}
	b = binary.LittleEndian.AppendUint32(b, uint32(len(values)*size))
	if c.rles+c.deltas == 0 && !c.pack {
		for _, v := range values {
			b = appendElement(b, size, v)
		}
		return padded(b, 4)
	}
	for len(values) > 0 {
		n := min(len(values), 4096/size)
		in := values[:n]
		values = values[n:]
		sizes, firsts, arrays := []uint32{0}, []byte(nil), []byte(nil)
		for layer := range max(c.rles, c.deltas) {
			if layer < c.rles {
				var vals, times []uint64
				for i, v := range in {
					if i > 0 && v == in[i-1] {
						times[len(times)-1]++
					} else {
						vals, times = append(vals, v), append(times, 1)
					}
				}
				in = vals
				a := c.array(nil, times, 2)
				sizes, arrays = append(sizes, uint32(len(a))), append(arrays, padded(a, 4)...)
			}
			if layer < c.deltas {
				if len(in) == 0 {
					return cascade{kind: c.kind}.encode(append(in, values...)) // wrong content; the caller detects it
				}
				firsts = appendElement(firsts, size, in[0])
				var out []uint64
				for i := range in[1:] {
					out = append(out, (in[i+1]-in[i])&mask)
				}
				in = out
			}
		}
		chunk := make([]byte, 4*(c.rles+2))
		chunk = append(padded(chunk, size), firsts...)
		chunk = append(padded(chunk, 4), arrays...)
		chunk = padded(chunk, max(4, size))
		a := c.array(nil, in, size)
		chunk = padded(append(chunk, a...), max(4, size))
		sizes[0] = uint32(len(chunk))
		for i, n := range append(sizes, uint32(len(a))) {
			binary.LittleEndian.PutUint32(chunk[4*i:], n)
		}
		b = append(b, chunk...)
	}
	return b
}

// plainCascaded decodes element by element. It returns false for a block that it rejects.
func plainCascaded(src []byte, room int) ([]byte, bool) {
	le := binary.LittleEndian
	if len(src) < 8 || src[0] > 7 || src[1] > 7 || src[2] > 1 || src[3] > 7 {
		return nil, false
	}
	c := cascade{int(src[3]), int(src[0]), int(src[1]), src[2] == 1}
	size, n := c.size(), int(le.Uint32(src[4:]))
	if n%size != 0 || n > (len(src)-8)*512 || n > room {
		return nil, false
	}
	load := func(p []byte, size int) (v uint64) {
		for i := range size {
			v |= uint64(p[i]) << (8 * i)
		}
		return
	}
	if src = src[8:]; c.rles+c.deltas == 0 && !c.pack {
		if len(src) < n || len(src) > roundUp(n, 4) {
			return nil, false
		}
		return src[:n], true
	}
	most := 4096 / size
	array := func(b []byte, size int) (out []uint64, ok bool) {
		if !c.pack {
			for i := 0; i+size <= len(b); i += size {
				out = append(out, load(b[i:], size))
			}
			return out, len(b)%size == 0 && len(out) <= most
		}
		word := max(4, size)
		head := roundUp(word+4, word)
		if len(b) < head {
			return nil, false
		}
		count, width := int(le.Uint16(b[word:])), int(le.Uint16(b[word+2:]))
		if width > 8*size || count > most || (count*width+31)/32*4 != len(b)-head {
			return nil, false
		}
		for i := range count {
			var v uint64
			for k := range width {
				at := i*width + k
				v |= uint64(b[head+at/8]>>(at%8)&1) << k
			}
			out = append(out, v+load(b, size))
		}
		return out, true
	}
	var content []byte
	for len(src) > 0 {
		firsts := roundUp(4*(c.rles+2), size)
		at := roundUp(firsts+size*c.deltas, 4)
		if len(src) < at {
			return nil, false
		}
		used := int(le.Uint32(src))
		if used < at || used > len(src) || used%max(4, size) != 0 {
			return nil, false
		}
		var runs [8][]uint64
		var vals []uint64
		for i := range c.rles + 1 {
			width := 2
			if i == c.rles {
				at, width = roundUp(at, max(4, size)), size
			}
			n := int(le.Uint32(src[4*(i+1):]))
			if at > used || n > used-at {
				return nil, false
			}
			a, ok := array(src[at:at+n], width)
			if !ok {
				return nil, false
			}
			if i == c.rles {
				vals = a
			} else {
				runs[i] = a
			}
			at = roundUp(at+n, 4)
		}
		for layer := max(c.rles, c.deltas) - 1; layer >= 0; layer-- {
			if layer < c.deltas {
				sum := []uint64{load(src[firsts+layer*size:], size)}
				for i, v := range vals {
					sum = append(sum, sum[i]+v)
				}
				vals = sum
			}
			if layer < c.rles {
				var out []uint64
				if len(runs[layer]) != len(vals) {
					return nil, false
				}
				for i, times := range runs[layer] {
					if times > uint64(most-len(out)) {
						return nil, false
					}
					for range times {
						out = append(out, vals[i])
					}
				}
				vals = out
			}
			if len(vals) > most {
				return nil, false
			}
		}
		if len(vals) == 0 || len(vals)*size > n-len(content) {
			return nil, false
		}
		for _, v := range vals {
			content = appendElement(content, size, v)
		}
		src = src[used:]
	}
	if len(content) != n {
		return nil, false
	}
	return content, true
}

func randomCascade(r *rand.Rand) cascade {
	return cascade{r.IntN(8), r.IntN(4) * r.IntN(3), r.IntN(4) * r.IntN(2), r.IntN(3) > 0}
}

// integers returns n integers: in runs, rising, or unrelated.
func integers(r *rand.Rand, n int) []uint64 {
	out := make([]uint64, n)
	way, v, step := r.IntN(5), r.Uint64(), r.Uint64()>>r.IntN(64)
	for i := range out {
		switch way {
		case 0:
			v = r.Uint64()
		case 1:
			if r.IntN(30) == 0 {
				v = r.Uint64() >> 40
			}
		case 2:
			v += step
		case 3:
			v += uint64(r.IntN(7) - 3)
		case 4:
			v = uint64(i / 100 % 3)
		}
		out[i] = v
	}
	return out
}

// Blocks of every type and number of layers decode to the same integers.
func TestTwinCascaded(t *testing.T) {
	r := random(t)
	for range 250 {
		c := randomCascade(r)
		values := integers(r, r.IntN(3)*r.IntN(3000))
		var want []byte
		for _, v := range values {
			want = appendElement(want, c.size(), v)
		}
		stored := c.encode(values)
		if plain, ok := plainCascaded(stored, len(want)); !ok || !bytes.Equal(plain, want) {
			continue // no values were left for a layer, so encode returned wrong content
		}
		if got, status := twinOne(t, "cascaded", stored, len(want), 0); status != 0 || !bytes.Equal(got, want) {
			t.Fatalf("%+v, %d values: status %d, or wrong bytes", c, len(values), status)
		}
	}
}

// The twin accepts and rejects the same damaged blocks as the plain decoder, and decodes accepted ones to the same
// bytes.
func TestTwinCascadedDamage(t *testing.T) {
	r := random(t)
	refused, accepted := 0, 0
	for range 1500 {
		c := randomCascade(r)
		values := integers(r, 1+r.IntN(700))
		stored := c.encode(values)
		for range r.IntN(3) {
			i := r.IntN(len(stored))
			if r.IntN(2) == 0 {
				i = r.IntN(min(len(stored), 60))
			}
			stored[i] ^= 1 << r.IntN(8)
		}
		if r.IntN(4) == 0 {
			stored = stored[:r.IntN(len(stored)+1)]
		}
		room := len(values)*c.size() + r.IntN(2)*r.IntN(30)
		want, ok := plainCascaded(stored, room)
		got, status := twinOne(t, "cascaded", stored, room, 0)
		if ok != (status == 0) || !bytes.Equal(got, want) {
			t.Fatalf("%+v: status %d, plain decoder %v, of %x with room for %d", c, status, ok, stored, room)
		}
		if ok {
			accepted++
		} else {
			refused++
		}
	}
	t.Logf("%d rejected, %d still valid", refused, accepted)
	if refused < 300 || accepted < 300 {
		t.Error("too few blocks were accepted or rejected")
	}
}
