package planes

// The tests in this file compare each step with its definition, and used encoders with new ones.

import (
	"bytes"
	"math"
	"math/big"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"
)

// For any number of elements, the planes are the bytes of the rotated elements.
func TestSplitAndMerge(t *testing.T) {
	r := rand.New(rand.NewPCG(11, 1))
	for transform := uint8(1); isKnown(transform); transform++ {
		f := transforms[transform]
		if f.width == 1 {
			continue // the chunk is the only plane
		}
		for n := range 20 {
			src := make([]byte, n*f.width)
			var want, got [maxPlanes][]byte
			for i := range f.width {
				want[i], got[i] = make([]byte, n), make([]byte, n)
			}
			for k := range n {
				e := new(big.Int)
				for i := range f.width {
					src[k*f.width+i] = byte(r.Uint32())
					e.Or(e, new(big.Int).Lsh(big.NewInt(int64(src[k*f.width+i])), uint(8*i)))
				}
				if f.rotate {
					top := e.Bit(8*f.width - 1)
					e.SetBit(e.Lsh(e.SetBit(e, 8*f.width-1, 0), 1), 0, top)
				}
				for i, b := range e.FillBytes(make([]byte, f.width)) {
					want[f.width-1-i][k] = b
				}
			}
			splitPlanes(src, &got, f.width, f.rotate)
			back := make([]byte, len(src))
			mergePlanes(back, &want, f.width, f.rotate)
			if !bytes.Equal(back, src) {
				t.Fatalf("%s: merge of %d elements", Name(transform), n)
			}
			for i := range f.width {
				if !bytes.Equal(got[i], want[i]) {
					t.Fatalf("%s: plane %d of %d elements", Name(transform), i, n)
				}
			}
		}
	}
}

// Chunks of every length around the ends of lanes and blocks round-trip, with Decode and with the slow decoder.
func TestLengths(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 6))
	lengths := []int{blockBytes - 1, blockBytes, blockBytes + 1, 2*blockBytes - 1, 2*blockBytes + 1}
	for n := 1; n < 90; n++ {
		lengths = append(lengths, n)
	}
	var s slots
	for _, zeros := range []int{1, 100, 2048, 3500, scale - 1} {
		tab, stored := coin(zeros)
		tab.expandSlots(&s)
		for _, n := range lengths {
			n := min(n, blockBytes)
			text := make([]byte, n)
			for i := range text {
				if r.IntN(scale) >= zeros {
					text[i] = 1
				}
			}
			p := chunk(uint32(n), formBlocks, kindOwn, stored, new(Encoder).encodeBlock(nil, text, &tab))
			got := make([]byte, n)
			if err := Decode(got, p, Bytes); err != nil || !bytes.Equal(got, text) {
				t.Fatalf("%d bytes, %d zeros in %d: %v", n, zeros, scale, err)
			}
			if n < 200 || zeros == 3500 {
				agree(t, n, p, Bytes)
			}
		}
	}
	for _, n := range lengths {
		text := bytes.Repeat([]byte{0, 1, 2, 3, 2, 1, 1, 1, 0, 0, 0}, n/11+1)[:n]
		if p, ok := new(Encoder).Encode(nil, text, Bytes); ok {
			agree(t, n, p, Bytes)
		}
	}
}

// A fitted table has slots for exactly the values that occur and uses all slots.
func TestFit(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 7))
	hists := []histogram{{0: 1, 255: 1}, {0: 1, 1: 16 << 20}, {7: 4095, 8: 1}, {7: 1 << 16, 8: 1, 9: 1, 10: 1}, {}, {}}
	for v := range 256 {
		hists[4][v], hists[5][v] = 1, 1
	}
	hists[5][9] = 16<<20 - 255
	for range 60 {
		var h histogram
		for range 2 + r.IntN(300) {
			h[r.IntN(256)] += 1 + r.Uint32N(1<<r.IntN(16))
		}
		h[0]++
		h[1]++
		hists = append(hists, h)
	}
	for i, h := range hists {
		n, sum := uint32(0), 0
		for _, c := range h {
			n += c
		}
		tab := fitTable(&h, n)
		for v, f := range tab.freq {
			if sum += int(f); (f > 0) != (h[v] > 0) || f >= scale {
				t.Errorf("histogram %d: value %d, with %d of %d counts, has %d slots", i, v, h[v], n, f)
			}
		}
		if sum != scale {
			t.Errorf("histogram %d: %d slots in total", i, sum)
		}
		var again table
		if _, err := again.readTable(tab.appendTable(nil)); err != nil || again != tab {
			t.Errorf("histogram %d: the reader refuses the table: %v", i, err)
		}
		if again.freq[0], again.freq[1] = 0, 0; again.costOf(&h) != math.MaxUint32 && h[0]+h[1] > 0 {
			t.Errorf("histogram %d: values without slots have the cost %d", i, again.costOf(&h))
		}
	}
	for x := uint32(1); x < scale; x++ {
		if got, want := float64(logOf(x)), 65536*math.Log2(float64(x)); math.Abs(got-want) > 1 {
			t.Fatalf("log(%d) is %v, want %v", x, got, want)
		}
	}
}

// countValues counts the values of blocks of any length.
func TestCount(t *testing.T) {
	for n := range 40 {
		p := make([]byte, n)
		var want histogram
		for i := range p {
			p[i] = byte(i * i * 37)
			want[p[i]]++
		}
		if got := countValues(p); got != want {
			t.Errorf("%d bytes: got the counts %v", n, got)
		}
	}
}

// The results of an encoder, a chunk and Zipped, do not depend on what it encoded before.
func TestEncoderKeepsNoState(t *testing.T) {
	r := rand.New(rand.NewPCG(12, 1))
	all := append(samples(r, 4*blockBytes), samples(r, 300)...)
	all = append(all, sample{"half an element", 7, make([]byte, 4100)}, sample{"nothing", 1, nil}, sample{"no transform", 0, make([]byte, 4096)})
	type result struct {
		chunk  []byte
		ok     bool
		zipped bool
	}
	var want []result
	for _, s := range all {
		var e Encoder
		out, ok := e.Encode(nil, s.data, s.transform)
		want = append(want, result{out, ok, e.Zipped()})
	}
	var e Encoder
	for round := range 2 {
		for _, i := range r.Perm(len(all)) {
			out, ok := e.Encode([]byte("head"), all[i].data, all[i].transform)
			w := want[i]
			if string(out) != "head"+string(w.chunk) || ok != w.ok || e.Zipped() != w.zipped {
				t.Errorf("round %d, %s: %d bytes, %v, zipped %v; a new encoder %d, %v, %v",
					round, all[i].name, len(out)-4, ok, e.Zipped(), len(w.chunk), w.ok, w.zipped)
			}
		}
	}
}

// Many goroutines can decode valid and invalid chunks while buffers are reused.
func TestConcurrentDecoders(t *testing.T) {
	r := rand.New(rand.NewPCG(13, 1))
	var wg sync.WaitGroup
	for i, s := range samples(r, 5000) {
		chunk, ok := new(Encoder).Encode(nil, s.data, s.transform)
		if !ok {
			continue
		}
		wg.Go(func() {
			got := make([]byte, len(s.data))
			for k := range 20 {
				if (i+k)%3 == 0 && Decode(got, chunk[:len(chunk)-1-k%len(chunk)/2], s.transform) == nil {
					t.Errorf("%s: a truncated chunk was decoded", s.name)
				}
				if err := Decode(got, chunk, s.transform); err != nil || !bytes.Equal(got, s.data) {
					t.Errorf("%s: %v", s.name, err)
				}
			}
		})
	}
	wg.Wait()
}

// Transforms have the expected names, and only transforms 2 to 4 are for integers.
func TestNames(t *testing.T) {
	var names []string
	for transform := range uint8(9) {
		names = append(names, Name(transform))
		if Integers(transform) != (transform == 2 || transform == 3 || transform == 4) {
			t.Errorf("Integers(%d) is wrong", transform)
		}
	}
	if want := []string{"transform 0", "bytes", "words", "dwords", "qwords", "float16", "float32", "float64", "transform 8"}; !slices.Equal(names, want) {
		t.Errorf("%q", names)
	}
}
