package delta

// The tests in this file write chunks bit by bit according to docs/format.md 7.2, and break one rule in each.

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"

	"github.com/overwire/overwire/gosrc/errs"
)

// A script is a readable form of a mode 0 chunk: the code length of each class that occurs, and the bits of each run,
// lowest first. Spaces are ignored.
type script struct {
	k, s  byte
	codes map[int]byte
	runs  []string
}

func (c script) bytes() []byte {
	head := make([]byte, Head)
	head[1], head[2] = c.k, c.s
	for class, n := range c.codes {
		head[4+class/2] |= n << (4 * (class % 2))
	}
	w := writer{}
	for _, run := range c.runs {
		bits := strings.ReplaceAll(run, " ", "")
		head = le.AppendUint16(head, uint16(len(bits)))
		for _, b := range bits {
			w.putBits(uint64(b-'0'), 1)
		}
	}
	for len(head)%4 != 0 {
		head = append(head, 0)
	}
	if w.have > 0 {
		w.putBits(0, 32-w.have)
	}
	return append(head, w.p...)
}

// judge checks that Check, Apply and the bit-by-bit decoder accept the same chunks, and that Apply writes nothing
// outside its destination.
func judge(t *testing.T, name string, p []byte, n, width int) error {
	t.Helper()
	const guard = 64
	room, want := make([]byte, n+2*guard), make([]byte, n)
	dst := room[guard : guard+n : guard+n]
	err, ok := Check(p, n, width), slow(want, p, width)
	if ok != (err == nil) || err != nil && !errors.Is(err, errs.ErrCorrupt) {
		t.Errorf("%s: Check returns %v, the slow decoder %v", name, err, ok)
	}
	if a := Apply(dst, p, width); (a == nil) != (err == nil) || err == nil && !bytes.Equal(dst, want) {
		t.Errorf("%s: Apply returns %v, Check %v, or the bytes differ", name, a, err)
	}
	if !isZero(room[:guard]) || !isZero(room[guard+n:]) {
		t.Errorf("%s: bytes outside the destination were changed", name)
	}
	return err
}

// All distances, classes and remainders that the specification allows are decoded correctly, for every width.
func TestScripts(t *testing.T) {
	one := func(class int) map[int]byte { return map[int]byte{class: 1} }
	for _, c := range []struct {
		name  string
		width int
		n     int
		chunk script
		want  map[int]byte // expected nonzero bytes
	}{
		{"the first element, by 1", 1, 8, script{codes: one(0), runs: []string{"1 0"}}, map[int]byte{0: 1}},
		{"the last element", 1, 8, script{codes: one(0), runs: []string{"00000001 0"}}, map[int]byte{7: 1}},
		{"a distance of k bits", 1, 64, script{k: 4, codes: one(0), runs: []string{"001 1010 0"}},
			map[int]byte{2<<4 | 5: 1}},
		{"neighbours", 1, 8, script{codes: one(1), runs: []string{"1 0 1 0 01 0"}}, map[int]byte{0: 3, 1: 3, 3: 3}},
		{"k of 24", 1, 8, script{k: 24, codes: one(7), runs: []string{"1 110000000000000000000000 0"}},
			map[int]byte{3: 255}},
		{"only run 2", 1, 1100, script{codes: one(0), runs: []string{"", "", "01 0"}}, map[int]byte{1025: 1}},
		{"s of 1", 1, 1100, script{k: 9, s: 1, codes: one(0), runs: []string{"01 000000000 0", "1 110000000 0"}},
			map[int]byte{512: 1, 1027: 1}},
		{"two classes", 1, 8, script{codes: map[int]byte{0: 1, 1: 1}, runs: []string{"1 0 1 1"}},
			map[int]byte{0: 1, 1: 3}},
		{"codes of 1, 2 and 2 bits", 1, 8, script{codes: map[int]byte{0: 2, 3: 1, 7: 2},
			runs: []string{"1 0 1 10 1 11"}}, map[int]byte{0: 15, 1: 1, 2: 255}},
		{"a rest of 2 bits", 1, 8, script{codes: one(10), runs: []string{"1 0 10"}}, map[int]byte{0: 5}},
		{"a rest of 15 bits", 2, 8, script{codes: one(23), runs: []string{"01 0 100000000000000"}},
			map[int]byte{2: 1, 3: 0x80}},
		{"4 bytes, a rest of 2 bits", 4, 8, script{codes: one(8), runs: []string{"1 0 01"}}, map[int]byte{0: 2}},
		{"4 bytes, a rest of 32 bits", 4, 8, script{codes: one(23),
			runs: []string{"01 0 0000 0000 0000 0000 0000 0000 0000 0001"}}, map[int]byte{7: 0x80}},
		{"8 bytes, a rest of 4 bits", 8, 16, script{codes: one(8), runs: []string{"1 0 0001"}}, map[int]byte{0: 8}},
		{"8 bytes, a rest of 64 bits", 8, 16, script{codes: one(23),
			runs: []string{"01 0 " + strings.Repeat("1000 0000 ", 7) + "0000 1001"}},
			map[int]byte{8: 1, 9: 1, 10: 1, 11: 1, 12: 1, 13: 1, 14: 1, 15: 0x90}},
	} {
		p := c.chunk.bytes()
		if err := judge(t, c.name, p, c.n, c.width); err != nil {
			t.Errorf("%s: %v", c.name, err)
		}
		got := make([]byte, c.n)
		_ = Apply(got, p, c.width) // judge has checked that Apply accepts it
		want := make([]byte, c.n)
		for i, x := range c.want {
			want[i] = x
		}
		if !bytes.Equal(got, want) {
			t.Errorf("%s: %x, want %x", c.name, got, want)
		}
	}
}

// There is only one encoding of each delta. These chunks are redundant or invalid, and are refused.
func TestScriptsThatAreRefused(t *testing.T) {
	one := func(class int) map[int]byte { return map[int]byte{class: 1} }
	for _, c := range []struct {
		name  string
		width int
		chunk script
		why   string
	}{
		{"no code", 1, script{runs: []string{"1 0"}}, "incomplete: 0 of 256"},
		{"one code of 2 bits", 1, script{codes: map[int]byte{0: 2}, runs: []string{"1 00"}}, "incomplete: 64 of 256"},
		{"three quarters", 1, script{codes: map[int]byte{0: 1, 1: 2}, runs: []string{"1 0"}},
			"incomplete: 192 of 256"},
		{"too many codes", 1, script{codes: map[int]byte{0: 1, 1: 1, 2: 8}, runs: []string{"1 0"}},
			"incomplete: 257 of 256"},
		{"code of 9 bits", 1, script{codes: map[int]byte{0: 1, 23: 9}, runs: []string{"1 0"}}, "invalid code of 9 bits"},
		{"k of 25", 1, script{k: 25, codes: one(0), runs: []string{"1 0"}}, "header"},
		{"k of 255", 1, script{k: 255, codes: one(0), runs: []string{"1 0"}}, "header"},
		{"s of 10", 1, script{s: 10, codes: one(0), runs: []string{"1 0"}}, "header"},
		{"s of 255", 1, script{s: 255, codes: one(0), runs: []string{"1 0"}}, "header"},
		{"no change", 1, script{codes: one(0), runs: []string{""}}, "0 bits in 0 bytes"},
		{"a run too many", 1, script{codes: one(0), runs: []string{"1 0", "", ""}}, "bits in"},
		{"a code that does not exist", 1, script{codes: one(0), runs: []string{"1 1"}}, "run 0"},
		{"after the last element", 1, script{codes: one(0), runs: []string{"0000 0000 1 0"}}, "element 8,"},
		{"far after the last element", 1, script{k: 24, codes: one(0),
			runs: []string{strings.Repeat("0", 100) + "1 000000000000000000000000 0"}}, "element 1677721600,"},
		{"a distance of 55 bits", 1, script{k: 24, codes: one(0),
			runs: []string{strings.Repeat("0", 30) + "1 100000000000000000000000 0"}}, "element 503316481,"},
		{"the farthest element after the last", 1, script{k: 24, codes: one(0),
			runs: []string{strings.Repeat("0", maxBits-26) + "1 111111111111111111111111 0"}},
			"element 1099075420159,"},
		{"zeros up to the end", 1, script{codes: one(0), runs: []string{strings.Repeat("0", 70)}}, "run 0"},
		{"a distance that is cut", 1, script{k: 9, codes: one(0), runs: []string{"1 0000"}}, "run 0"},
		{"a rest that is cut", 8, script{codes: one(23), runs: []string{"1 0 1111"}}, "of 6"},
		{"a bit too many", 1, script{codes: one(0), runs: []string{"1 0 0"}}, "run 0"},
		{"17 bits for 2 bytes", 1, script{codes: one(23), runs: []string{"1 0 100000000000000"}}, "run 0"},
		{"1 in a wrong class", 1, script{codes: one(8), runs: []string{"1 0"}}, "0x1 in class 8"},
		{"3 in a wrong class", 2, script{codes: one(9), runs: []string{"1 0 1"}}, "0x3 in class 9"},
		{"255 in a wrong class", 2, script{codes: one(15), runs: []string{"1 0 1111111"}}, "0xff in class 15"},
		{"4 bytes, no bit", 4, script{codes: one(8), runs: []string{"1 0 00"}}, "run 0"},
		{"4 bytes, the class above", 4, script{codes: one(9), runs: []string{"1 0 0100"}}, "0x2 in class 9"},
		{"8 bytes, no bit", 8, script{codes: one(23), runs: []string{"1 0 " + strings.Repeat("0", 64)}}, "run 0"},
		{"8 bytes, the class above", 8, script{codes: one(23),
			runs: []string{"1 0 " + strings.Repeat("0", 59) + "10000"}}, "in class 23"},
	} {
		p := c.chunk.bytes()
		if err := judge(t, c.name, p, 8, c.width); err == nil || !strings.Contains(err.Error(), c.why) {
			t.Errorf("%s: %v, want %q", c.name, err, c.why)
		}
	}
	good := script{codes: one(0), runs: []string{"1 0"}}.bytes()
	for name, p := range map[string][]byte{
		"mode 2": {2}, "mode 255": {255}, "byte 3": {0, 0, 0, 1},
	} {
		if judge(t, name, append(p, good[len(p):]...), 8, 1) == nil {
			t.Errorf("%s was accepted", name)
		}
	}
	for at := Head + 2; at < len(good); at++ { // the padding after the table and after the bits
		for bit := range 8 {
			p := bytes.Clone(good)
			p[at] ^= 1 << bit
			err := judge(t, "padding", p, 8, 1)
			if err == nil {
				t.Errorf("a flipped bit %d of byte %d was accepted", bit, at)
			}
		}
	}
}

// A small chunk of each mode and width is tested truncated at every byte, extended, and with every bit flipped.
func TestEveryByteAndBit(t *testing.T) {
	r := rand.New(rand.NewPCG(20, 1))
	for _, width := range []int{1, 2, 4, 8} {
		for mode, share := range []float64{modeCoded: 0.08, modeRaw: 1} {
			const n = 1528 // not a multiple of a run
			now, base := change(r, n, width, share, true)
			p, err := Encode(nil, now, base, width)
			if err != nil || len(p) == 0 || int(p[0]) != mode {
				t.Fatalf("width %d: %x is not of mode %d, %v", width, p, mode, err)
			}
			for k := range p {
				if err := Check(p[:k], n, width); !errors.Is(err, errs.ErrCorrupt) {
					t.Errorf("width %d, mode %d, cut to %d: %v", width, mode, k, err)
				}
			}
			for k := 1; k <= 8; k++ {
				if err := Check(append(bytes.Clone(p), make([]byte, k)...), n, width); !errors.Is(err,
					errs.ErrCorrupt) {
					t.Errorf("width %d, mode %d, %d bytes more: %v", width, mode, k, err)
				}
			}
			for at := range min(len(p), 160) {
				for bit := range 8 {
					p[at] ^= 1 << bit
					if at > 0 || bit > 0 { // this bit is the mode
						judge(t, "a flipped bit", p, n, width)
					}
					p[at] ^= 1 << bit
				}
			}
			for _, other := range []int{0, MaxBytes, n - 8, n + 8} {
				if mode == modeCoded && other > 0 && other < MaxBytes {
					continue // in mode 0, unchanged elements at the end do not encode the length
				}
				if err := Check(p, other, width); !errors.Is(err, errs.ErrCorrupt) {
					t.Errorf("width %d, mode %d, checked as %d bytes: %v", width, mode, other, err)
				}
			}
		}
	}
}

// Invalid widths and sizes are argument errors in every function, and memory is not changed.
func TestArguments(t *testing.T) {
	good := script{codes: map[int]byte{0: 1}, runs: []string{"1 0"}}.bytes()
	const most = int(^uint(0) >> 1)
	for _, c := range []struct{ n, width int }{
		{8, 0}, {8, 3}, {8, 16}, {8, -1}, {8, most}, {9, 2}, {10, 4}, {12, 8}, {-8, 1}, {-8, 8}, {-most - 1, 1},
		{MaxBytes + 8, 1}, {1 << 31, 1}, {1 << 32, 8}, {most, 1},
	} {
		if err := Check(good, c.n, c.width); !errors.Is(err, errs.ErrArgument) {
			t.Errorf("Check of %d bytes, width %d: %v", c.n, c.width, err)
		}
		if c.n < 0 || c.n > MaxBytes+8 {
			continue
		}
		p := make([]byte, c.n)
		if err := Apply(p, good, c.width); !errors.Is(err, errs.ErrArgument) || !isZero(p) {
			t.Errorf("Apply to %d bytes, width %d: %v", c.n, c.width, err)
		}
		if out, err := Encode([]byte("x"), p, p, c.width); !errors.Is(err, errs.ErrArgument) || string(out) != "x" {
			t.Errorf("Encode of %d bytes, width %d: %v", c.n, c.width, err)
		}
		if _, err := Changed(p, p, c.width); !errors.Is(err, errs.ErrArgument) && c.n <= MaxBytes {
			t.Errorf("Changed of %d bytes, width %d: %v", c.n, c.width, err)
		}
	}
	if _, err := Changed(make([]byte, 8), make([]byte, 16), 8); !errors.Is(err, errs.ErrArgument) {
		t.Errorf("Changed of unequal lengths: %v", err)
	}
	if p, err := Encode(nil, nil, nil, 8); err != nil || len(p) != 0 {
		t.Errorf("no bytes become %d: %v", len(p), err)
	}
}

// Many goroutines can check and apply the same chunk concurrently, each to its own memory.
func TestConcurrentDecoders(t *testing.T) {
	now, base := change(rand.New(rand.NewPCG(21, 1)), 50_000, 4, 0.02, true)
	p, err := Encode(nil, now, base, 4)
	if err != nil {
		t.Fatal(err)
	}
	before := bytes.Clone(p)
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			dst := bytes.Clone(base)
			for range 5 {
				if err := errors.Join(Check(p, len(dst), 4), Apply(dst, p, 4)); err != nil || !bytes.Equal(dst, now) {
					t.Errorf("not the new bytes: %v", err)
				}
				if err := Apply(dst, p, 4); err != nil || !bytes.Equal(dst, base) {
					t.Errorf("not the base: %v", err)
				}
			}
		})
	}
	if wg.Wait(); !bytes.Equal(p, before) {
		t.Error("the chunk was changed")
	}
}
