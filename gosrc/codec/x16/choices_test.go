package x16

import (
	"bytes"
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/overwire/overwire/gosrc/tensor"
)

// Other writers may write other tables than this encoder. Their expanded slots match docs/format.md, and exactly the
// tables that it forbids are refused.
func TestTablesOfOtherWriters(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	w := pageWriter{rand.New(rand.NewPCG(seed, 0))}
	good, bad := 0, 0
	for range 1500 {
		must := make([]bool, 16)
		for k := range must {
			must[k] = w.r.IntN(3) == 0
		}
		var tb table
		tb.freq, tb.divider, tb.alias = w.table(must)
		for k, m := range must {
			if m && tb.freq[k] == 0 {
				t.Fatalf("symbol %d has no slot", k)
			}
		}
		for range w.r.IntN(3) { // sometimes without changes
			k := w.r.IntN(16)
			switch w.r.IntN(4) {
			case 0:
				tb.freq[k] += byte(1 - 2*w.r.IntN(2))
			case 1:
				tb.divider[k] = byte(w.r.IntN(18))
			case 2:
				tb.alias[k] = byte(w.r.IntN(17))
			default:
				o := w.r.IntN(16)
				tb.divider[k], tb.divider[o], tb.alias[k], tb.alias[o] = tb.divider[o], tb.divider[k], tb.alias[o],
					tb.alias[k]
			}
		}
		symbol, rank, refused := pageSlots(tb.freq[:], tb.divider[:], tb.alias[:])
		if err := tb.checkParts(); (err == nil) != (refused == nil) {
			t.Fatalf("%+v: got %v, want %v", tb, err, refused)
		}
		if refused != nil {
			bad++
			continue
		}
		good++
		for s, slot := range tb.expandSlots() {
			if slot.symbol != symbol[s] || int(slot.rank) != rank[s] {
				t.Fatalf("%+v: slot %d is %v, want %d, %d", tb, s, slot, symbol[s], rank[s])
			}
		}
	}
	if good < 200 || bad < 200 {
		t.Errorf("only %d valid and %d invalid tables were compared", good, bad)
	}
}

// No other choice of values for the symbols is cheaper than fitModel's. The test tries the m most frequent values for
// every m and, if there are few different values, all subsets.
func TestFitIsCheapest(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	cost := func(hist *[256]int, n int, kept []uint8) float64 {
		escaped := n
		for _, v := range kept {
			escaped -= hist[v]
		}
		if len(kept) == 0 || len(kept) > 16 || escaped > 0 && len(kept) > 15 || escaped == 0 && len(kept) == 1 {
			return math.Inf(1)
		}
		return modelOf(kept, hist, n, escaped).bits
	}
	for range 200 {
		var hist [256]int
		n, kinds := 0, 2+r.IntN(22)
		var values []uint8
		for _, v := range r.Perm(256)[:kinds] {
			hist[v] = 1 + int(math.Exp(r.Float64()*13))
			n += hist[v]
			values = append(values, uint8(v))
		}
		got := fitModel(&hist, n, false)
		selectTop(values, &hist, kinds)
		for m := range kinds + 1 {
			if c := cost(&hist, n, values[:m]); c < got.bits*(1-1e-12) {
				t.Fatalf("%v: keeping %d values costs %v, but fitModel costs %v", hist, m, c, got.bits)
			}
		}
		if kinds > 7 {
			continue
		}
		for set := range 1 << kinds {
			var kept []uint8
			for i, v := range values {
				if set>>i&1 == 1 {
					kept = append(kept, v)
				}
			}
			if c := cost(&hist, n, kept); c < got.bits*(1-1e-12) {
				t.Fatalf("%v: keeping %v costs %v, but fitModel costs %v", hist, kept, c, got.bits)
			}
		}
	}
	for _, identity := range []bool{false, true} { // a single value, and two values, one of them rare
		for _, v := range []int{0, 7, 15} {
			var hist [256]int
			hist[v] = 512
			if m := fitModel(&hist, 512, identity); m.one < 0 || int(m.palette[m.one]) != v || m.escape >= 0 {
				t.Errorf("only the value %d: got the model %+v", v, m)
			}
			hist[(v+1)%16] = 1
			if m := fitModel(&hist, 513, identity); m.one >= 0 || m.bits <= 0 {
				t.Errorf("%d and one other: %+v", v, m)
			}
		}
	}
}

// A used Encoder gives the same chunk as a new one, whatever it encoded before: longer or shorter data, any transform,
// compressed or not.
func TestEncoderKeepsNoState(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	for _, l := range Levels() {
		used := Encoder{level: l, forced: true}
		for range 12 {
			all := samples(r, 300+r.IntN(6000))
			for _, i := range r.Perm(len(all))[:12] {
				s := all[i]
				s.data = s.data[:len(s.data)-r.IntN(min(len(s.data), 99))]
				fresh := Encoder{level: l, forced: true}
				want, st, ok := fresh.Encode(nil, s.data, s.transform)
				got, st2, ok2 := used.Encode(nil, s.data, s.transform)
				if ok != ok2 || st != st2 || !bytes.Equal(got, want) {
					t.Fatalf("%v, %s, %d bytes: a different chunk", l, s.name, len(s.data))
				}
			}
		}
	}
}

// A chunk is only compressed if it takes at most 99 % of its bytes. Invalid input is refused, and Estimate is close
// to the result of Encode.
func TestGain(t *testing.T) {
	const seed = 41
	r := rand.New(rand.NewPCG(seed, 0))
	packed, refused := 0, 0
	for _, n := range []int{1 << 16, 20000} {
		for _, s := range samples(r, n) {
			var e Encoder
			chunk, _, ok := e.Encode(nil, s.data, s.transform)
			share := Estimate(s.data, s.transform)
			if share < 0 || share > 1 {
				t.Errorf("%s: an estimate of %v", s.name, share)
			}
			if !ok {
				refused++
				if share < 0.97 {
					t.Errorf("%s: not compressed, but the estimate is %v", s.name, share)
				}
				continue
			}
			packed++
			is := float64(len(chunk)) / float64(len(s.data))
			if len(chunk) > int(gain*float64(len(s.data))) {
				t.Errorf("%s: %d bytes of %d are over the limit", s.name, len(chunk), len(s.data))
			}
			// The estimate does not count the header and the states of short segments.
			if extra := float64(headerBytes+4*(stateBytes+24)) / float64(len(s.data)); is < share-0.005 ||
				is > share+extra+0.005 {
				t.Errorf("%s: the share is %v, but the estimate is %v", s.name, is, share)
			}
		}
	}
	if packed == 0 || refused == 0 {
		t.Errorf("%d packed and %d refused, want some of both", packed, refused)
	}
	for tr := range uint8(12) { // less than a tile, or an unknown transform
		var e Encoder
		for _, n := range []int{0, 1, 127} {
			if _, _, ok := e.Encode(nil, make([]byte, n), tr); ok || Estimate(make([]byte, n), tr) != 1 {
				t.Errorf("transform %d compressed %d bytes", tr, n)
			}
		}
	}
	if Name(0) != "transform 0" || Name(9) != "transform 9" || Name(BF16) != "bf16" {
		t.Errorf("%s, %s, %s", Name(0), Name(9), Name(BF16))
	}
}

// Concurrent decoders do not share tables or escapes, even with different transforms and invalid chunks.
func TestConcurrentDecoders(t *testing.T) {
	const seed = 51
	r := rand.New(rand.NewPCG(seed, 0))
	type one struct {
		chunk, want []byte
		transform   uint8
		st          uint16
	}
	var all []one
	w := pageWriter{r}
	for tr := uint8(BF16); tr <= Bytes; tr++ {
		for range 4 {
			size := sizeOf(tr, 1+r.IntN(20), r.IntN(40))
			st := 1 + r.IntN(9)
			chunk, want := w.chunk(tr, size, st)
			all = append(all, one{chunk, want, tr, uint16(st)})
			broken := bytes.Clone(chunk)
			broken[len(broken)/2] ^= 0x40
			all = append(all, one{broken, nil, tr, uint16(st)})
		}
	}
	var wg sync.WaitGroup
	for k := range 2 * max(2, runtime.GOMAXPROCS(0)) {
		wg.Go(func() {
			r := rand.New(rand.NewPCG(seed, uint64(k)))
			for range 100 {
				c := all[r.IntN(len(all))]
				size := len(c.want)
				if c.want == nil {
					size = sizeOf(c.transform, 3, 0)
				}
				dst := make([]byte, size)
				err := DecodeAt(Levels()[r.IntN(len(Levels()))], dst, c.chunk, c.transform, c.st)
				if c.want != nil && (err != nil || !bytes.Equal(dst, c.want)) {
					t.Errorf("%s: %v", Name(c.transform), err)
					return
				}
			}
		})
	}
	wg.Wait()
}

// For a level that the machine does not support, Use selects the best level and DecodeAt fails.
func TestLevels(t *testing.T) {
	defer Use(Using())
	for _, l := range []Level{Scalar, NEON, AVX2, AVX512} {
		want := l
		if !slices.Contains(Levels(), l) {
			want = Best()
			if DecodeAt(l, nil, nil, BF16, 1) == nil {
				t.Errorf("%v decodes on a machine that does not support it", l)
			}
		}
		if Use(l); Using() != want {
			t.Errorf("Use(%v): Using returned %v", l, Using())
		}
	}
	if Scalar.String() != "scalar" || NEON.String() != "NEON" || AVX2.String() != "AVX2" ||
		AVX512.String() != "AVX-512" {
		t.Error("wrong level names")
	}
}

// FuzzCheck checks that Decode refuses every chunk that Check refuses.
func FuzzCheck(f *testing.F) {
	w := pageWriter{rand.New(rand.NewPCG(61, 0))}
	for tr := uint8(BF16); tr <= Bytes; tr++ {
		size := sizeOf(tr, 3, 5)
		chunk, _ := w.chunk(tr, size, 2)
		f.Add(chunk, uint32(size), tr, uint16(2))
	}
	f.Fuzz(func(t *testing.T, p []byte, size uint32, transform uint8, st uint16) {
		if size > 1<<16 {
			return
		}
		c := tensor.Chunk{Codec: tensor.CodecX16, Transform: transform, SegTiles: st, Logical: size,
			Stored: uint32(len(p))}
		err := Check(p, c)
		dst := make([]byte, size)
		if decoded := Decode(dst, p, transform, st); decoded == nil && err != nil {
			t.Fatalf("Decode accepts a chunk for which Check returns %v", err)
		}
		if err == nil && Segments(c) < 1 {
			t.Fatal("Check accepts a chunk without segments")
		}
	})
}
