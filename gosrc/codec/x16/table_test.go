package x16

import (
	"math"
	"math/rand/v2"
	"testing"
)

// randomFreq returns random frequencies of m symbols that sum to 256.
func randomFreq(r *rand.Rand, m int) (f [16]uint8) {
	left := 256
	at := r.Perm(16)[:m]
	for i, k := range at {
		rest := m - i - 1
		n := 1
		if most := min(255, left-rest); i < m-1 && most > 1 {
			n = 1 + r.IntN(most)
			if r.IntN(2) == 0 {
				n = 1 + r.IntN(min(most, 512/m))
			}
		} else if i == m-1 {
			n = left
		}
		if left-n > 255*rest {
			n = left - 255*rest
		}
		f[k] = uint8(n)
		left -= n
	}
	return f
}

// Every alias table of the encoder passes the check. Each rank of each symbol occurs in exactly one slot.
func TestAliasTables(t *testing.T) {
	const seed = 5
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	for range 5000 {
		freq := randomFreq(r, 2+r.IntN(15))
		tb := newTable(freq)
		if err := tb.checkParts(); err != nil {
			t.Fatalf("%v: %v", freq, err)
		}
		var seen [16][256]bool
		for s, e := range tb.expandSlots() {
			if e.rank >= freq[e.symbol] || seen[e.symbol][e.rank] {
				t.Fatalf("%v: slot %d is wrong: %v", freq, s, e)
			}
			seen[e.symbol][e.rank] = true
		}
	}
}

// checkParts refuses inconsistent tables.
func TestTableCheck(t *testing.T) {
	good := newTable([16]uint8{100, 50, 50, 25, 25, 6})
	if err := good.checkParts(); err != nil {
		t.Fatal(err)
	}
	full := 0
	for good.divider[full] != 16 {
		full++
	}
	for name, hurt := range map[string]func(*table){
		"a sum of 257":                 func(t *table) { t.freq[0]++ },
		"two frequencies off by one":   func(t *table) { t.freq[0]++; t.freq[1]-- },
		"a divider of 17":              func(t *table) { t.divider[0] = 17 },
		"another divider":              func(t *table) { t.divider[5]++ },
		"an alias of 16":               func(t *table) { t.alias[9] = 16 },
		"another alias":                func(t *table) { t.alias[15] ^= 1 },
		"all zero":                     func(t *table) { *t = table{} },
		"an alias of a full bucket":    func(t *table) { t.alias[full] ^= 1 },
		"a full bucket with divider 0": func(t *table) { t.divider[full] = 0 },
	} {
		b := good
		hurt(&b)
		if b.checkParts() == nil {
			t.Errorf("%s: accepted", name)
		}
	}
}

// The frequencies are optimal: moving a slot from any symbol to another never reduces the size.
func TestFitFreq(t *testing.T) {
	const seed = 6
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	size := func(c *[16]int, f *[16]uint8) (bits float64) {
		for k, n := range c {
			if n > 0 {
				bits += float64(n) * (8 - math.Log2(float64(f[k])))
			}
		}
		return
	}
	for range 2000 {
		var c [16]int
		n, kinds := 0, 2+r.IntN(15)
		for k := range kinds {
			c[k] = 1 + int(math.Exp(r.Float64()*12))
			n += c[k]
		}
		f, bits := fitFreq(&c, n)
		sum := 0
		for k, x := range f {
			sum += int(x)
			if (x > 0) != (c[k] > 0) {
				t.Fatalf("%v: symbol %d has frequency %d", c, k, x)
			}
		}
		if sum != 256 || math.Abs(bits-size(&c, &f)) > 1e-6*bits {
			t.Fatalf("%v: %v has the sum %d and costs %v", c, f, sum, bits)
		}
		for i := range kinds {
			for j := range kinds {
				g := f
				if i == j || g[i] == 255 || g[j] == 1 {
					continue
				}
				g[i]++
				g[j]--
				if size(&c, &g) < bits*(1-1e-12) {
					t.Fatalf("%v: %v is worse than %v", c, f, g)
				}
			}
		}
	}
}

// A value is escaped if this is cheaper than a slot. The encoded size matches the model, except for the states' 16
// bits.
func TestModelCost(t *testing.T) {
	var hist [256]int
	hist[120], hist[121], hist[122], hist[7], hist[9] = 300000, 200000, 99993, 3, 4
	m := fitModel(&hist, 600000, false)
	if m.escape < 0 || m.freq[m.escape] != 1 || m.palette[3] != 0 {
		t.Errorf("7 of 600000 values were not escaped: %+v", m)
	}
	hist[122], hist[7] = 90000, 9996
	if m = fitModel(&hist, 600000, false); m.palette[3] != 7 {
		t.Errorf("1.7 %% of the values were escaped: %+v", m)
	}
	src := benchSample(BF16, 1<<18)
	var e Encoder
	chunk, _, _ := e.Encode(nil, src, BF16)
	h := e.hist
	var all [256]int
	for i := range h {
		for v, n := range h[i] {
			all[v] += int(n)
		}
	}
	m = fitModel(&all, 1<<18, false)
	segs := (1 << 18) / tileSyms / defaultSegTiles
	want := headerBytes + 8*(segs+1) + segs*stateBytes + int(m.bits/8) + 1<<18
	if d := len(chunk) - want; d < -segs*32 || d > segs*32+16 {
		t.Errorf("got %d bytes, but the model says %d", len(chunk), want)
	}
}

// Segments are within the length limits. If a chunk is long enough for four segments, each is at most a quarter of it.
func TestGrid(t *testing.T) {
	for tiles := 1; tiles < 5000; tiles++ {
		s, g := segmentGrid(tiles, 0)
		if s < 1 || s > defaultSegTiles || (tiles+s-1)/s != g ||
			g > 1 && s < minSegTiles || tiles >= 4*minSegTiles && s > (tiles+3)/4 {
			t.Fatalf("%d tiles: %d segments of %d", tiles, g, s)
		}
	}
}

// The vector encoder gives the same bytes as the scalar encoder for every sample.
func TestEncodersAgree(t *testing.T) {
	const seed = 8
	t.Logf("seed %d", seed)
	for _, s := range samples(rand.New(rand.NewPCG(seed, 0)), 1<<15+300) {
		a := Encoder{level: Scalar, forced: true}
		want, st, ok := a.Encode(nil, s.data, s.transform)
		for _, l := range Levels()[1:] {
			b := Encoder{level: l, forced: true}
			got, st2, ok2 := b.Encode(nil, s.data, s.transform)
			if st != st2 || ok != ok2 || string(got) != string(want) {
				t.Errorf("%v, %s: the level gives a different chunk", l, s.name)
			}
		}
	}
}
