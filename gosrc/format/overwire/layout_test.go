package overwire

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/format/safetensors"
	"github.com/overwire/overwire/gosrc/tensor"
)

// random returns random items of every kind.
func random(r *rand.Rand) []Item {
	items := make([]Item, r.IntN(12))
	for i := range items {
		it := &items[i]
		*it = Item{Name: fmt.Sprintf("%c%d", 'a'+r.IntN(26), i), DType: tensor.DType(1 + r.IntN(tensor.NumDTypes)),
			Plain:      r.IntN(2) == 0,
			ChunkBytes: int64(4096 * (1 + r.IntN(3)))}
		for range r.IntN(4) {
			it.Shape = append(it.Shape, int64(r.IntN(24)))
		}
		n, err := tensor.Size(it.DType, it.Shape)
		if err != nil {
			it.DType = tensor.BF16
			n, _ = tensor.Size(it.DType, it.Shape)
		}
		ten := tensor.Tensor{DType: it.DType, Shape: it.Shape, Bytes: n}
		if parts := 1 << r.IntN(4); !it.Plain && ten.Splits(parts) {
			it.Parts = parts
		}
		if to := r.IntN(i + 1); to < i && items[to].Alias == 0 && r.IntN(3) == 0 {
			if m, _ := tensor.Size(items[to].DType, items[to].Shape); m > 0 {
				*it = Item{Name: it.Name, DType: items[to].DType, Shape: items[to].Shape, Alias: to + 1}
			}
		}
	}
	return items
}

// write places all chunks, some of them as compressed, and seals the layout.
func write(l *Layout, seed uint64) ([]byte, int64, error) {
	r := rand.New(rand.NewPCG(seed, 2))
	for i := range l.Tensors {
		t := &l.Tensors[i]
		if t.Alias < 0 {
			t.Hash = [16]byte{byte(i), 1}
		}
		for c := t.First; c < t.First+t.Count; c++ {
			ch := &l.Chunks[c]
			stored := ch.Logical
			if !t.Plain && stored > 1 && r.IntN(2) == 0 {
				stored, ch.Codec, ch.Transform, ch.SegTiles = 1+r.Uint32N(stored-1), tensor.CodecX16, 1, 64
			}
			ch.Sum = r.Uint32()
			if _, err := l.Place(int(c), stored); err != nil {
				return nil, 0, err
			}
		}
	}
	return l.Seal(nil)
}

// Every layout is read back unchanged, and its header and index have exactly the reserved size. Writing it again
// gives the same bytes.
func TestLayoutRoundTrip(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 1))
	for round := range 300 {
		items := random(r)
		metadata := map[string]string{"round": fmt.Sprint(round)}
		l, err := NewLayout(metadata, items, nil, false)
		if err != nil {
			t.Fatal(err)
		}
		front, size, err := write(l, seed+uint64(round))
		if err != nil || int64(len(front)) != l.Start() {
			t.Fatalf("%d bytes before the chunks at %d, %v", len(front), l.Start(), err)
		}
		n, err := safetensors.Length("", front, size)
		if err != nil {
			t.Fatal(err)
		}
		h, err := safetensors.Parse("x", front[:8+n], size, safetensors.Options{})
		if err != nil {
			t.Fatal(err)
		}
		if ours, err := Is(&h); !ours || err != nil {
			t.Fatal(ours, err)
		}
		ix, err := Decode(front[8+n:], &h, "x", size, nil)
		if err != nil {
			t.Fatal(err)
		}
		for i := range l.Tensors { // nil and empty shapes are the same shape
			if l.Tensors[i].Shape == nil {
				l.Tensors[i].Shape = []int64{}
			}
		}
		if !reflect.DeepEqual(ix.Tensors, l.Tensors) || !slices.Equal(ix.Chunks, l.Chunks) ||
			!maps.Equal(ix.Sources[0].Metadata, metadata) {
			t.Fatalf("got  %+v\nwant %+v", ix.Tensors, l.Tensors)
		}
		for i, item := range l.Items {
			if it := items[item]; l.Tensors[i].Name != it.Name || l.Tensors[i].DType != it.DType {
				t.Fatalf("tensor %d is not item %d", i, item)
			}
		}
		l2, _ := NewLayout(maps.Clone(metadata), items, nil, false)
		if again, _, err := write(l2, seed+uint64(round)); err != nil || !bytes.Equal(again, front) {
			t.Fatalf("the second write differs: %v", err)
		}
	}
}

// Items that cannot be stored are refused before anything is written.
func TestLayoutRefuses(t *testing.T) {
	ok := Item{Name: "a", DType: tensor.U8, Shape: []int64{4}, ChunkBytes: 4096}
	change := func(fn func(*Item)) []Item { it := ok; fn(&it); return []Item{it} }
	for name, items := range map[string][]Item{
		"reserved name":    change(func(it *Item) { it.Name = IndexName }),
		"metadata's name":  change(func(it *Item) { it.Name = safetensors.MetadataKey }),
		"not UTF-8":        change(func(it *Item) { it.Name = "\xff" }),
		"twice":            {ok, ok},
		"dtype":            change(func(it *Item) { it.DType = 0 }),
		"shape":            change(func(it *Item) { it.Shape = []int64{-1} }),
		"huge":             change(func(it *Item) { it.Shape = []int64{1 << 60} }),
		"rank":             change(func(it *Item) { it.Shape = make([]int64, 65) }),
		"no chunk bytes":   change(func(it *Item) { it.ChunkBytes = 0 }),
		"odd chunk bytes":  change(func(it *Item) { it.ChunkBytes = 5000 }),
		"large chunks":     change(func(it *Item) { it.ChunkBytes = 32 << 20 }),
		"three parts":      change(func(it *Item) { it.Shape, it.Parts = []int64{4, 12}, 3 }),
		"sixteen parts":    change(func(it *Item) { it.Shape, it.Parts = []int64{4, 16}, 16 }),
		"unsplittable":     change(func(it *Item) { it.Parts = 2 }),
		"plain in parts":   change(func(it *Item) { it.Shape, it.Parts, it.Plain = []int64{4, 4}, 2, true }),
		"alias of itself":  change(func(it *Item) { it.Alias = 1 }),
		"alias of no item": change(func(it *Item) { it.Alias = 2 }),
		"alias negative":   change(func(it *Item) { it.Alias = -1 }),
		"alias, size":      {ok, {Name: "b", DType: tensor.U8, Shape: []int64{5}, Alias: 1}},
		"alias, dtype":     {ok, {Name: "b", DType: tensor.I8, Shape: []int64{4}, Alias: 1}},
		"alias of nothing": {{Name: "n", DType: tensor.U8, Shape: []int64{0}},
			{Name: "b", DType: tensor.U8, Shape: []int64{0}, Alias: 1}},
		"alias of alias": {ok, {Name: "b", DType: tensor.U8, Shape: []int64{4}, Alias: 1},
			{Name: "c", DType: tensor.U8, Shape: []int64{4}, Alias: 2}},
	} {
		if _, err := NewLayout(nil, items, nil, false); !errors.Is(err, errs.ErrArgument) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := NewLayout(map[string]string{MetadataKey: "x"}, nil, nil, false); !errors.Is(err, errs.ErrArgument) {
		t.Errorf("our metadata entry: %v", err)
	}
	if _, err := NewLayout(nil, []Item{{Name: strings.Repeat("n", tensor.MaxHeader), DType: tensor.U8}}, nil,
		false); !errors.Is(err, errs.ErrArgument) {
		t.Errorf("a header over the limit: %v", err)
	}
}

// Placing chunks out of order or with an invalid size, and sealing too early, are errors.
func TestLayoutMisuse(t *testing.T) {
	items := []Item{{Name: "a", DType: tensor.U8, Shape: []int64{9000}, ChunkBytes: 4096}}
	for name, use := range map[string]func(*Layout) error{
		"out of order": func(l *Layout) error { _, err := l.Place(1, 1); return err },
		"too large":    func(l *Layout) error { _, err := l.Place(0, 4097); return err },
		"empty":        func(l *Layout) error { _, err := l.Place(0, 0); return err },
		"too early":    func(l *Layout) error { _, _, err := l.Seal(nil); return err },
		"too many": func(l *Layout) error {
			for c := range 3 {
				if _, err := l.Place(c, 1); err != nil {
					return nil
				}
			}
			_, err := l.Place(3, 1)
			return err
		},
		"wrong codec": func(l *Layout) error {
			for c := range 3 {
				l.Chunks[c].Codec = 9
				if _, err := l.Place(c, 1); err != nil {
					return nil
				}
			}
			_, _, err := l.Seal(nil)
			return err
		},
	} {
		l, err := NewLayout(nil, items, nil, false)
		if err != nil {
			t.Fatal(err)
		}
		if err := use(l); !errors.Is(err, errs.ErrEngine) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// Measures the time per tensor of decoding an index.
func BenchmarkDecode(b *testing.B) {
	items := make([]Item, 18_867)
	for i := range items {
		items[i] = Item{Name: fmt.Sprintf("model.layers.%d.mlp.experts.%d.gate_proj.weight", i/256, i%256),
			DType: tensor.BF16,
			Shape: []int64{64, 64}, ChunkBytes: 4096}
	}
	l, err := NewLayout(nil, items, nil, false)
	if err != nil {
		b.Fatal(err)
	}
	front, size, err := write(l, 1)
	if err != nil {
		b.Fatal(err)
	}
	n, _ := safetensors.Length("", front, size)
	h, err := safetensors.Parse("x", front[:8+n], size, safetensors.Options{})
	if err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	for b.Loop() {
		if _, err := Decode(front[8+n:], &h, "x", size, nil); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(len(items)), "ns/tensor")
}
