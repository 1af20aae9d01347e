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

// The expanded slots match docs/format.md for tables that other writers may make, and a table is refused exactly where
// docs/format.md refuses it.
func TestTablesOfOthers(t *testing.T) {
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
		for range w.r.IntN(3) { // sometimes none
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
			t.Fatalf("%+v: %v, the page %v", tb, err, refused)
		}
		if refused != nil {
			bad++
			continue
		}
		good++
		for s, slot := range tb.expandSlots() {
			if slot.symbol != symbol[s] || int(slot.rank) != rank[s] {
				t.Fatalf("%+v: slot %d is %v, the page's %d, %d", tb, s, slot, symbol[s], rank[s])
			}
		}
	}
	if good < 200 || bad < 200 {
		t.Errorf("%d good tables and %d bad ones: this compares little", good, bad)
	}
}

// No choice of kept values is cheaper than fit's. All sets of the most frequent values are tried, and every set if
// there are few kinds.
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
				t.Fatalf("%v: keeping %d costs %v, fit %v", hist, m, c, got.bits)
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
				t.Fatalf("%v: keeping %v costs %v, fit %v", hist, kept, c, got.bits)
			}
		}
	}
	for _, identity := range []bool{false, true} { // one kind, and two with one rare
		for _, v := range []int{0, 7, 15} {
			var hist [256]int
			hist[v] = 512
			if m := fitModel(&hist, 512, identity); m.one < 0 || int(m.palette[m.one]) != v || m.escape >= 0 {
				t.Errorf("only %d: %+v", v, m)
			}
			hist[(v+1)%16] = 1
			if m := fitModel(&hist, 513, identity); m.one >= 0 || m.bits <= 0 {
				t.Errorf("%d and one other: %+v", v, m)
			}
		}
	}
}

// A used Encoder makes the same chunk as a new one, whatever came before: longer or shorter, any transform, packed or
// refused.
func TestEncoderForgets(t *testing.T) {
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
					t.Fatalf("%v, %s, %d bytes: another chunk", l, s.name, len(s.data))
				}
			}
		}
	}
}

// A chunk is stored only if it takes at most 99 % of its bytes, to the byte. Impossible input is refused, and Estimate
// expects about what Encode gives.
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
					t.Errorf("%s: refused, the estimate is %v", s.name, share)
				}
				continue
			}
			packed++
			is := float64(len(chunk)) / float64(len(s.data))
			if len(chunk) > int(gain*float64(len(s.data))) {
				t.Errorf("%s: %d bytes of %d are no gain", s.name, len(chunk), len(s.data))
			}
			// The sample's share leaves out the header and the states of short segments.
			if extra := float64(headerBytes+4*(stateBytes+24)) / float64(len(s.data)); is < share-0.005 ||
				is > share+extra+0.005 {
				t.Errorf("%s: %v, the estimate is %v", s.name, is, share)
			}
		}
	}
	if packed == 0 || refused == 0 {
		t.Errorf("%d packed, %d refused", packed, refused)
	}
	for tr := range uint8(12) { // too small for a tile, or an unknown transform
		var e Encoder
		for _, n := range []int{0, 1, 127} {
			if _, _, ok := e.Encode(nil, make([]byte, n), tr); ok || Estimate(make([]byte, n), tr) != 1 {
				t.Errorf("transform %d packs %d bytes", tr, n)
			}
		}
	}
	if Name(0) != "transform 0" || Name(9) != "transform 9" || Name(BF16) != "bf16" {
		t.Errorf("%s, %s, %s", Name(0), Name(9), Name(BF16))
	}
}

// Threads that decode at the same time, also other transforms and bad chunks, do not see each other's tables or
// escapes.
func TestDecodersAreApart(t *testing.T) {
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

// A level that the machine lacks selects the best one, and does not decode.
func TestLevels(t *testing.T) {
	defer Use(Using())
	for _, l := range []Level{Scalar, NEON, AVX2, AVX512} {
		want := l
		if !slices.Contains(Levels(), l) {
			want = Best()
			if DecodeAt(l, nil, nil, BF16, 1) == nil {
				t.Errorf("%v decodes on a machine without it", l)
			}
		}
		if Use(l); Using() != want {
			t.Errorf("%v: %v", l, Using())
		}
	}
	if Scalar.String() != "scalar" || NEON.String() != "NEON" || AVX2.String() != "AVX2" ||
		AVX512.String() != "AVX-512" {
		t.Error("names")
	}
}

// FuzzCheck: Decode refuses whatever a GPU's check refuses, and a chunk that decodes passes the check.
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
			t.Fatalf("decodes, and the check says %v", err)
		}
		if err == nil && Segments(c) < 1 {
			t.Fatal("no segments")
		}
	})
}
