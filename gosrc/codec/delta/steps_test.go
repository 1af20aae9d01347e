package delta

// The tests in this file compare each step of the encoder with docs/format.md 7.2.

import (
	"bytes"
	"math/bits"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

// pageClass returns the class of an XOR and its number of remaining bits, according to the table in docs/format.md.
func pageClass(x uint64, width int) (class, rest int) {
	for c := range 8 {
		if x == 1<<(c+1)-1 {
			return c, 0
		}
	}
	for g := range 16 {
		switch high := bits.Len64(x) - 1; {
		case width <= 2 && high == g:
			return 8 + g, g
		case width == 4 && high/2 == g:
			return 8 + g, 2*g + 2
		case width == 8 && high/4 == g:
			return 8 + g, 4*g + 4
		}
	}
	return -1, 0
}

// Each XOR has the class of docs/format.md and round-trips. The test uses all XORs of 16 bits, and longer XORs
// around each power of two.
func TestClasses(t *testing.T) {
	r := rand.New(rand.NewPCG(22, 1))
	for _, width := range []int{1, 2, 4, 8} {
		var xs []uint64
		for x := range uint64(1) << min(8*width, 16) {
			xs = append(xs, x)
		}
		for n := 16; n < 8*width; n++ {
			xs = append(xs, 1<<n, 1<<n-1, 1<<n+1, 1<<n|r.Uint64N(1<<n), 3<<(n-1))
		}
		xs = append(xs, 1<<(8*width)-1)
		lg := bits.TrailingZeros(uint(width))
		for _, x := range xs[1:] {
			class, rest := classOf(x, lg)
			if c, n := pageClass(x, width); class != c || rest != n || restOf(class, lg) != n {
				t.Fatalf("width %d: %#x has class %d and %d bits, want %d and %d", width, x, class, rest, c, n)
			}
			if got := valueOf(class, x&(1<<rest-1), lg); got != x {
				t.Fatalf("width %d: the round trip of %#x returns %#x", width, x, got)
			}
		}
	}
}

// Codes are complete and have at most 8 bits for any counts. A single class gets one bit. Without classes there are
// no codes.
func TestLengths(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 2))
	var counts [][classes]uint32
	for kinds := range classes + 1 {
		for _, shape := range []func(i int) uint32{
			func(int) uint32 { return 1 },
			func(int) uint32 { return ^uint32(0) },
			func(i int) uint32 { return 1 << i },
			func(i int) uint32 { return uint32(1 + (i/(classes-1))*(MaxBytes-classes)) },
			func(int) uint32 { return 1 + r.Uint32N(1<<r.IntN(24)) },
		} {
			var c [classes]uint32
			for i, at := range r.Perm(classes)[:kinds] {
				c[at] = shape(i)
			}
			counts = append(counts, c)
		}
	}
	for _, c := range counts {
		length := codeLengths(&c)
		kinds, sum := 0, 0
		for i, n := range length {
			if (n > 0) != (c[i] > 0) || n > 8 {
				t.Fatalf("%v: class %d has %d bits", c, i, n)
			}
			if n > 0 {
				kinds++
				sum += 256 >> n
			}
		}
		if want := min(kinds, 2) * 128; sum != want {
			t.Errorf("%v: %v, %d of 256", c, length, sum)
		}
		for i := range c { // the more frequent class must not have the longer code
			for j := range c {
				if c[i] > c[j] && c[j] > 0 && length[i] > length[j] {
					t.Errorf("%v: %v", c, length)
				}
			}
		}
	}
}

// Deltas of every small size equal a plain comparison, with changes at each position and for each width.
func TestSmallSizes(t *testing.T) {
	r := rand.New(rand.NewPCG(23, 1))
	for _, width := range []int{1, 2, 4, 8} {
		for n := width; n <= 24*width; n += width {
			for at := range n / width {
				base := make([]byte, n)
				for i := range base {
					base[i] = byte(r.Uint32())
				}
				now := bytes.Clone(base)
				now[at*width+r.IntN(width)] ^= byte(1 + r.IntN(255))
				now[r.IntN(n)] ^= byte(r.IntN(2))
				changed := int64(0)
				for i := 0; i < n; i += width {
					if !bytes.Equal(now[i:i+width], base[i:i+width]) {
						changed++
					}
				}
				if got, err := Changed(now, base, width); err != nil || got != changed {
					t.Fatalf("%d bytes, width %d: got %d changes, want %d: %v", n, width, got, changed, err)
				}
				p, err := Encode([]byte("head"), now, base, width)
				if err != nil || string(p[:4]) != "head" || len(p) > 4+Room(n) || (len(p) == 4) != (changed == 0) {
					t.Fatalf("%d bytes, width %d: %d stored, %v", n, width, len(p), err)
				}
				if changed == 0 {
					continue
				}
				if judge(t, "a small delta", p[4:], n, width) != nil || Apply(base, p[4:], width) != nil ||
					!bytes.Equal(base, now) {
					t.Fatalf("%d bytes, width %d: wrong bytes", n, width)
				}
			}
		}
	}
}

// Clusters of changes are encoded correctly. In some cases, a run starts after more than 32 zero bits. A run of over
// 65535 bits makes Encode use mode 1.
func TestClustersOfChanges(t *testing.T) {
	r := rand.New(rand.NewPCG(24, 1))
	for _, c := range []struct {
		name            string
		n, width        int
		every, together int // the last `together` of every `every` elements change
		mode            byte
		zeros           int // minimum number of zero bits before a run's first change
	}{
		{"bytes", 1 << 16, 1, 8192, 40, modeCoded, 32},
		{"elements of 2 bytes", 1 << 16, 2, 4096, 40, modeCoded, 48},
		{"elements of 8 bytes", 1 << 16, 8, 1024, 40, modeCoded, 48},
		{"a run of too many bits", 1 << 22, 1, 1 << 22, 8192, modeRaw, 0},
		{"one byte of the largest chunk", MaxBytes, 1, MaxBytes, 1, modeCoded, 0},
	} {
		base := make([]byte, c.n)
		now := bytes.Clone(base)
		for i := range c.n {
			if e := i / c.width; e%c.every >= c.every-c.together {
				now[i] = byte(1 + r.IntN(255))
			}
		}
		p, err := Encode(nil, now, base, c.width)
		if err != nil || p[0] != c.mode {
			t.Fatalf("%s: mode %d, %v", c.name, p[0], err)
		}
		if c.zeros > 0 {
			if q := (c.every - c.together) >> p[1]; runBytes<<p[2] < c.every*c.width || q < c.zeros {
				t.Fatalf("%s: %d zeros in runs of %d bytes: the data does not produce the intended case", c.name, q,
					runBytes<<p[2])
			}
			judge(t, c.name, p, c.n, c.width)
		}
		if err := Apply(base, p, c.width); err != nil || !bytes.Equal(base, now) {
			t.Errorf("%s: wrong bytes, %v", c.name, err)
		}
	}
}

// A reader reads back the bits that a writer wrote.
func TestBits(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 3))
	for range 300 {
		var w writer
		var want []uint64
		var sizes []int
		for range r.IntN(40) {
			n := r.IntN(65)
			v := r.Uint64() & (1<<n - 1)
			w.putBits(v, n)
			want, sizes = append(want, v), append(sizes, n)
		}
		if w.have > 0 {
			w.putBits(0, 32-w.have)
		}
		in := reader{p: slices.Clip(w.p)}
		for i, n := range sizes {
			got, low := uint64(0), min(n, 32)
			got = in.peekBits() & (1<<low - 1)
			in.pos += low
			got |= in.peekBits() & (1<<(n-low) - 1) << low
			in.pos += n - low
			if got != want[i] {
				t.Fatalf("number %d of %d bits: %#x, want %#x", i, n, got, want[i])
			}
		}
		if in.pos = 8 * len(w.p); in.peekBits() != 0 {
			t.Fatal("bits after the last one are not zero")
		}
	}
}

// A chunk's parameters only depend on its counts. This tests the limits of each value.
func TestParameters(t *testing.T) {
	for _, c := range []struct{ n, changed, s int }{
		{512, 24, 0}, {512, 23, 1}, {512, 12, 1}, {512, 11, 2}, {8, 1, 0}, {256 << 10, 24, 9}, {256 << 10, 48, 8},
		{256 << 10, 47, 9}, {MaxBytes, 1, 9}, {MaxBytes, MaxBytes, 0},
	} {
		if got := runOf(c.n, c.changed); got != c.s {
			t.Errorf("%d of %d bytes: runs of 512 << %d, want %d", c.changed, c.n, got, c.s)
		}
	}
	for _, c := range []struct{ n, changed, k int }{
		{1, 1, 0}, {100, 100, 0}, {100, 39, 0}, {100, 38, 1}, {131, 63, 0}, {MaxBytes, 1, 23}, {MaxBytes, 2, 22},
		{1 << 17, 64, 10},
	} {
		if got := riceParameter(c.n, c.changed); got != c.k {
			t.Errorf("%d of %d elements: k is %d, want %d", c.changed, c.n, got, c.k)
		}
	}
}
