package digest

// The tests in this file compare all implementations of the digest with its definition, for any first word, any
// parts, and many goroutines. They also compare docs/format.md with the code.

import (
	"context"
	"errors"
	"fmt"
	"os"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"unsafe"

	"github.com/overwire/overwire/gosrc/errs"
)

// The code computes the digests that docs/format.md lists.
func TestDocumentedDigests(t *testing.T) {
	page, err := os.ReadFile("../../../docs/format.md")
	if err != nil {
		t.Fatal(err)
	}
	_, section, _ := strings.Cut(string(page), "\n## 6. Digest\n")
	section, _, _ = strings.Cut(section, "\n## ")
	rows := regexp.MustCompile("(?m)^\\| (\\d+) \\| `([0-9a-f]{32})` \\|$").FindAllStringSubmatch(section, -1)
	if len(rows) < 9 {
		t.Fatalf("got %d goldens in docs/format.md, want at least 9", len(rows))
	}
	for _, row := range rows {
		n, _ := strconv.Atoi(row[1])
		if got := Of(bytesOf(n)).String(); got != row[2] {
			t.Errorf("%d bytes: got %s, but docs/format.md has %s", n, got, row[2])
		}
	}
	for name, c := range map[string]uint64{"step": stepA, "first factor": mulM1, "second factor": mulM2,
		"size": sizeB} {
		if !strings.Contains(section, fmt.Sprintf("%#x", c)) {
			t.Errorf("docs/format.md does not have the %s %#x", name, c)
		}
	}
}

// mix has an inverse, so a change inside one word always changes the digest, as docs/format.md promises.
func TestMixIsABijection(t *testing.T) {
	inverse := func(m uint64) uint64 { // inverts an odd number modulo 2^64 by Newton's method
		x := m
		for range 5 {
			x *= 2 - m*x
		}
		return x
	}
	unmix := func(x uint64) uint64 {
		x = (x ^ x>>32) * inverse(mulM2)
		x = (x ^ x>>32) * inverse(mulM1)
		return x ^ x>>32
	}
	r := random(t)
	for i := range 5000 {
		x := r.Uint64() >> (i % 64)
		if got := unmix(mixWord(x)); got != x {
			t.Fatalf("the round trip of %#x returns %#x", x, got)
		}
	}
}

// sumFast gives the same result as sumScalar from any first word of a tensor, including the largest possible ones.
func TestFastFromAnyWord(t *testing.T) {
	r := random(t)
	data := make([]byte, 4096+64)
	for i := range data {
		data[i] = byte(r.Uint32())
	}
	first := []uint64{0, 1, 7, 8, 15, 16, 1<<31 - 3, 1 << 31, 1<<32 - 9, 1 << 32, 1<<60 - 1, 1<<61 - 300, 1<<64 - 2}
	for words := range 200 {
		off := r.IntN(64)
		p := data[off : off+WordBytes*words]
		for _, i := range append(first, r.Uint64()) {
			var got, want State
			n := sumFast(&got, i, p)
			if n < 0 || n > words || n == 0 && got != (State{}) {
				t.Fatalf("sumFast summed %d words of %d", n, words)
			}
			sumScalar(&want, i, p[:n*WordBytes])
			if got != want {
				t.Fatalf("%d words from word %d at address %d: %v, want %v", words, i, off, got, want)
			}
			got, want = State{1, 2}, State{1, 2} // Add must keep the existing sums
			got.Add(int64(i&(1<<60-1))*WordBytes, p)
			sumScalar(&want, i&(1<<60-1), p)
			if got != want {
				t.Fatalf("Add of %d words from word %d", words, i)
			}
		}
	}
}

// For every cut at a multiple of a word, the merged parts give the digest of the whole, even in many goroutines.
func TestEveryCut(t *testing.T) {
	for _, n := range []int{0, 1, 8, 15, 64, 129, 300} {
		p := bytesOf(n)
		want := Of(p)
		for cut := 0; cut <= n; cut += WordBytes {
			var a, b State
			a.Add(int64(cut), p[cut:])
			b.Add(0, p[:cut])
			if a.Merge(b); a.Sum(int64(n)) != want {
				t.Errorf("%d bytes cut at %d: %v, want %v", n, cut, a.Sum(int64(n)), want)
			}
		}
		if n > 0 {
			var s State
			if s.Add(0, p); s.Sum(int64(n-1)) == want || s.Sum(int64(n+1)) == want {
				t.Errorf("%d bytes have the digest of a different length", n)
			}
		}
	}
	p := bytesOf(100_003)
	var mu sync.Mutex
	var all State
	var wg sync.WaitGroup
	for at := 0; at < len(p); at += 4096 {
		wg.Go(func() {
			var s State
			s.Add(int64(at), p[at:min(at+4096, len(p))])
			mu.Lock()
			defer mu.Unlock()
			all.Merge(s)
		})
	}
	if wg.Wait(); all.Sum(int64(len(p))) != Of(p) {
		t.Error("concurrent sums give a different digest")
	}
}

// String returns the digits of both halves, the high half first.
func TestTextsOfDigests(t *testing.T) {
	for _, s := range []Sum{{}, {1, 0}, {0, 1}, {^uint64(0), ^uint64(0)}, {0x0123456789abcdef, 1 << 63}} {
		text := s.String()
		high, _ := strconv.ParseUint(text[:16], 16, 64)
		low, err := strconv.ParseUint(text[16:], 16, 64)
		if got := (Sum{high, low}); err != nil || got != s || len(text) != 32 {
			t.Errorf("%q: %v, %v", text, got, err)
		}
	}
}

// Views are accepted up to the maximum size and refused above it.
func TestSizesOfViews(t *testing.T) {
	for _, c := range []struct {
		name string
		view View
		want int64 // -1 if refused
	}{
		{"one element", View{8, 16, nil, nil}, 16},
		{"2^62 bytes", View{8, 1, []int64{1 << 62}, []int64{1}}, 1 << 62},
		{"2^62 bytes in two dimensions", View{8, 4, []int64{1 << 30, 1 << 30}, []int64{0, 0}}, 1 << 62},
		{"2^62 + 1 bytes", View{8, 1, []int64{1<<62 + 1}, []int64{1}}, -1},
		{"2^63 bytes", View{8, 2, []int64{1 << 62}, []int64{2}}, -1},
		{"2^64 bytes", View{8, 8, []int64{1 << 61}, []int64{8}}, -1},
		{"the largest dimension", View{8, 1, []int64{1<<63 - 1}, []int64{1}}, -1},
		{"2^64 + 8 bytes, by overflow 8", View{8, 8, []int64{1<<61 + 1}, []int64{8}}, -1},
		{"64 dimensions", View{8, 1, slices.Repeat([]int64{1}, 64), make([]int64, 64)}, 1},
		{"65 dimensions", View{8, 1, slices.Repeat([]int64{1}, 65), make([]int64, 65)}, -1},
		{"no elements at address 0", View{0, 2, []int64{3, 0}, []int64{2, 2}}, 0},
		{"no elements, otherwise too large", View{8, 8, []int64{1 << 62, 1 << 62, 0}, []int64{8, 8, 8}}, 0},
		{"no elements, and a dimension below 0", View{8, 8, []int64{0, -1}, []int64{8, 8}}, -1},
		{"the smallest dimension", View{8, 1, []int64{-1 << 63}, []int64{1}}, -1},
		{"elements of -8 bytes", View{8, -8, nil, nil}, -1},
		{"elements of the smallest size", View{8, -1 << 63, nil, nil}, -1},
		{"more strides than dimensions", View{8, 1, nil, []int64{1}}, -1},
		{"address 0", View{0, 1, nil, nil}, -1},
	} {
		got, err := c.view.Bytes()
		if c.want < 0 && !errors.Is(err, errs.ErrArgument) || c.want >= 0 && (err != nil || got != c.want) {
			t.Errorf("%s: %d, %v", c.name, got, err)
		}
	}
}

// Dimensions are only merged if they are adjacent in memory.
func TestMergedViews(t *testing.T) {
	dims := func(d ...int64) []int64 { return d }
	for _, c := range []struct {
		name       string
		in, want   View
		contiguous bool
	}{
		{"a scalar", View{64, 4, nil, nil}, View{64, 1, dims(4), dims(1)}, true},
		{"row-major", View{64, 2, dims(2, 3, 4), dims(24, 8, 2)}, View{64, 1, dims(48), dims(1)}, true},
		{"dimensions of size 1 with any stride", View{64, 2, dims(1, 3, 1, 4), dims(-9, 8, 1<<62, 2)},
			View{64, 1, dims(24), dims(1)}, true},
		{"transposed", View{64, 2, dims(4, 3), dims(2, 8)}, View{64, 2, dims(4, 3), dims(2, 8)}, false},
		{"rows of a wider matrix", View{64, 2, dims(5, 3, 4), dims(60, 20, 2)}, View{64, 2, dims(15, 4), dims(20, 2)},
			false},
		{"every second element", View{64, 2, dims(3, 4), dims(16, 4)}, View{64, 2, dims(12), dims(4)}, false},
		{"backwards", View{64, 8, dims(3, 2), dims(-16, -8)}, View{64, 8, dims(6), dims(-8)}, false},
		{"one element repeated", View{64, 8, dims(3, 2), dims(0, 0)}, View{64, 8, dims(6), dims(0)}, false},
		{"one row repeated", View{64, 8, dims(3, 2), dims(0, 8)}, View{64, 8, dims(3, 2), dims(0, 8)}, false},
	} {
		got := c.in.Merged()
		if fmt.Sprint(got) != fmt.Sprint(c.want) || got.IsContiguous() != c.contiguous {
			t.Errorf("%s: %+v, want %+v", c.name, got, c.want)
		}
		if again := got.Merged(); fmt.Sprint(again) != fmt.Sprint(got) {
			t.Errorf("%s: a second merge changes it to %+v", c.name, again)
		}
	}
}

// A share of a view may start at any multiple of 16 bytes, even in the middle of a row.
func TestSharesOfViews(t *testing.T) {
	data := bytesOf(70_000)
	defer runtime.KeepAlive(data) // views hold only addresses
	at := uint64(uintptr(unsafe.Pointer(&data[0])))
	for _, v := range []View{
		{at, 1, []int64{40, 33, 30}, []int64{990, 30, 1}},
		{at + 1, 2, []int64{50, 7, 31}, []int64{2, 700, 100}},
		{at + 60_000, 4, []int64{9, 100, 11}, []int64{-4400, -44, -4}},
		{at, 8, []int64{3, 5000}, []int64{0, 8}},
		{at + 3, 16, []int64{61, 17}, []int64{16, 1024}},
	} {
		n, err := v.Bytes()
		if err != nil {
			t.Fatal(err)
		}
		m := v.Merged()
		var whole State
		m.addBytes(&whole, 0, n, nil)
		for _, size := range []int64{16, 48, 4096, gathered, gathered + 16, n/2&^15 + 16} {
			if size < 100 && n > 40_000 {
				continue // tiny shares of a large view take too long
			}
			var parts State
			for from := int64(0); from < n; from += size {
				m.addBytes(&parts, from, min(size, n-from), nil)
			}
			if parts != whole {
				t.Errorf("%+v in shares of %d: %v, want %v", v, size, parts, whole)
			}
		}
	}
}

// A cancelled call returns no digests, and no views give no digests. If one view is invalid, all are refused before
// any is read.
func TestAllOrNothing(t *testing.T) {
	data := bytesOf(1 << 16)
	good := Contiguous(uint64(uintptr(unsafe.Pointer(&data[0]))), int64(len(data)))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if sums, err := All(ctx, []View{good}, 2, nil); sums != nil || !errors.Is(err, errs.ErrCancelled) {
		t.Errorf("cancelled: %v, %v", sums, err)
	}
	if sums, err := All(t.Context(), nil, 2, nil); len(sums) != 0 || err != nil {
		t.Errorf("no views: %v, %v", sums, err)
	}
	unreadable := Contiguous(1, 1<<40) // reading it would crash the process
	if sums, err := All(t.Context(), []View{unreadable, {Address: 8, Item: 3}}, 2, nil); sums != nil ||
		!errors.Is(err, errs.ErrArgument) {
		t.Errorf("with an invalid view: %v, %v", sums, err)
	}
	for _, workers := range []int{-1, 0, 1, 64} {
		if sums, err := All(t.Context(), []View{good, {Item: 1, Shape: []int64{0}, Strides: []int64{1}}, good},
			workers, nil); err != nil ||
			!slices.Equal(sums, []Sum{Of(data), Of(nil), Of(data)}) {
			t.Errorf("%d workers: %v, %v", workers, sums, err)
		}
	}
}
