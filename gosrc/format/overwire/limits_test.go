package overwire

// The tests in this file check the tensor offsets of docs/format.md section 1 and the limits of layouts.

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/overwire/overwire/gosrc/codec/digest"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/format/safetensors"
	"github.com/overwire/overwire/gosrc/tensor"
)

// Compressed tensors come first, then plain tensors in multiples of 64 bytes, then the others by descending
// alignment. Each group is sorted by name. Every tensor is aligned for use without a copy, and empty tensors at the
// end are sorted by name.
func TestOrderAndPlaces(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 5))
	for range 300 {
		l, err := NewLayout(nil, random(r), nil, false)
		if err != nil {
			t.Fatal(err)
		}
		if _, _, err := write(l, r.Uint64()); err != nil {
			t.Fatal(err)
		}
		if l.Header()%DataAlign != 0 || l.Start()%tensor.BlobAlign != 0 {
			t.Fatalf("data from %d, chunks from %d", l.Header(), l.Start())
		}
		before, next, inFile := "", l.Start(), true
		for i := range l.Tensors {
			ten := &l.Tensors[i]
			empty := ten.Bytes == 0
			key := fmt.Sprintf("%03d", 999)
			switch {
			case ten.Alias >= 0:
			case !ten.Plain:
				key = "000"
			case ten.Bytes%64 == 0:
				key = "001"
			default:
				key = fmt.Sprintf("%03d", 100-ten.DType.Align())
			}
			if rest := l.Tensors[i:]; inFile && len(bytesIn(rest)) == 0 {
				inFile, before = false, "" // the remaining tensors have the same offset and are sorted by name
			}
			if !inFile {
				key = ""
			}
			if key += ten.Name; key <= before {
				t.Fatalf("%q comes after %q", key, before)
			}
			before = key
			if ten.Off != next || !empty && ten.Alias < 0 && ten.Off%int64(ten.DType.Align()) != 0 ||
				!ten.Plain && ten.Off%tensor.BlobAlign != 0 && inFile {
				t.Fatalf("%+v at %d, but the previous tensor ends at %d", ten, ten.Off, next)
			}
			next += ten.Stored
		}
	}
}

// bytesIn returns the numbers of the tensors with stored bytes.
func bytesIn(ts []tensor.Tensor) (out []int) {
	for i := range ts {
		if ts[i].Stored > 0 {
			out = append(out, i)
		}
	}
	return out
}

// A tensor may have 64 dimensions.
func TestMostDimensions(t *testing.T) {
	shape := append(slices.Repeat([]int64{1}, tensor.MaxRank-1), 5)
	l, err := NewLayout(nil, []Item{{Name: "w", DType: tensor.F64, Shape: shape, ChunkBytes: 4096}}, nil, false)
	if err != nil {
		t.Fatal(err)
	}
	front, size, err := write(l, 1)
	if err != nil {
		t.Fatal(err)
	}
	h, err := safetensors.Parse("x", front[:l.Header()], size, safetensors.Options{})
	if err != nil {
		t.Fatal(err)
	}
	if ix, err := Decode(front[l.Header():], &h, "x", size, nil); err != nil ||
		!slices.Equal(ix.Tensors[0].Shape, shape) {
		t.Errorf("64 dimensions: %v", err)
	}
}

// An index over its limit is refused before its chunks are allocated.
func TestIndexOverTheLimit(t *testing.T) {
	for _, items := range [][]Item{
		{{Name: "w", DType: tensor.U8, Shape: []int64{1 << 38}, ChunkBytes: 4096}},
		{{Name: "w", DType: tensor.U8, Shape: []int64{1 << 38}, ChunkBytes: 4096, Plain: true}},
		{{Name: "w", DType: tensor.U8, Shape: []int64{8, 1 << 35}, ChunkBytes: 4096, Parts: 8}},
		{{Name: "v", DType: tensor.U8, Shape: []int64{1 << 37}, ChunkBytes: 8192},
			{Name: "w", DType: tensor.U8, Shape: []int64{1 << 37}, ChunkBytes: 4096}},
		{{Name: "w", DType: tensor.U8, Shape: []int64{1 << 58}, ChunkBytes: tensor.MaxChunkBytes}},
	} {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		_, err := NewLayout(nil, items, nil, false)
		runtime.ReadMemStats(&after)
		if !errors.Is(err, errs.ErrArgument) || !strings.Contains(err.Error(), "larger chunks") {
			t.Errorf("%v in chunks of %d: %v", items[0].Shape, items[0].ChunkBytes, err)
		}
		if heap := after.TotalAlloc - before.TotalAlloc; heap > 1<<20 {
			t.Errorf("%v in chunks of %d: %d bytes of heap", items[0].Shape, items[0].ChunkBytes, heap)
		}
	}
}

// Digests are stored on request, one per tensor. If the header has no space, neither digests nor the origin are stored.
func TestSpaceForDigests(t *testing.T) {
	for _, n := range []int{0, 1, 300} {
		items := make([]Item, n)
		for i := range items {
			items[i] = Item{Name: fmt.Sprint(i), DType: tensor.U8, Shape: []int64{int64(i % 2)}, ChunkBytes: 4096}
		}
		l, err := NewLayout(nil, items, nil, true)
		if err != nil {
			t.Fatal(err)
		}
		for c := range l.Chunks {
			if _, err := l.Place(c, 1); err != nil {
				t.Fatal(err)
			}
		}
		l.Digests = Digests(make([]digest.Sum, n))
		b, size, err := l.Seal(nil)
		if err != nil {
			t.Fatal(err)
		}
		h, err := safetensors.Parse("x", b[:l.Header()], size, safetensors.Options{})
		if err != nil {
			t.Fatal(err)
		}
		if sums, err := ReadDigests(h.Metadata[MetadataKey], n); len(sums) != n || err != nil {
			t.Errorf("%d tensors: got %d digests, %v", n, len(sums), err)
		}
	}
	items := []Item{{Name: "w", DType: tensor.U8, Shape: []int64{64}, ChunkBytes: 4096}}
	if !testing.Short() { // it makes strings of 100 MB
		l, err := NewLayout(nil, items, &Origin{Size: 72, Header: strings.Repeat("A", tensor.MaxHeader)}, true)
		if err != nil || l.Digests != "" || l.Origin != nil {
			t.Errorf("without space: %d characters of digests, origin %v, %v", len(l.Digests), l.Origin != nil, err)
		}
	}
	l, err := NewLayout(nil, items, nil, true)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := l.Place(0, 64); err != nil {
		t.Fatal(err)
	}
	l.Digests = strings.Repeat("A", 3*DataAlign) // more than NewLayout reserved
	if _, _, err := l.Seal(nil); !errors.Is(err, errs.ErrEngine) {
		t.Errorf("more digests than NewLayout reserved: %v", err)
	}
}
