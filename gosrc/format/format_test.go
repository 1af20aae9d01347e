package format

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"math"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/format/overwire"
	"github.com/overwire/overwire/gosrc/format/safetensors"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/tensor"
)

// Every flipped bit in header and index is rejected, and so is every truncation or extension of the file. A flip in the
// index is reported as corrupt. A flip in the JSON header is reported as corrupt, as a different format, or as not
// supported.
func TestFlips(t *testing.T) {
	for name, b := range golden(t) {
		ix, err := open(b)
		if err != nil {
			t.Fatal(err)
		}
		data := ix.Sources[0].Data
		front := data
		if len(ix.Tensors) > 0 {
			front = ix.Tensors[0].Off
		} else {
			front = int64(len(b))
		}
		b = slices.Clone(b)
		for bit := range front * 8 {
			if thin && bit%61 != 0 {
				continue
			}
			b[bit/8] ^= 1 << (bit % 8)
			_, err := open(b)
			ok := errors.Is(err, errs.ErrCorrupt)
			if bit/8 < data {
				ok = ok || errors.Is(err, errs.ErrFormat) || errors.Is(err, errs.ErrNotSupported)
			}
			var at *errs.At
			if !ok || !errors.As(err, &at) || at.Source != "model.safetensors" {
				t.Errorf("%s: bit %d of byte %d: %v", name, bit%8, bit/8, err)
			}
			b[bit/8] ^= 1 << (bit % 8)
		}
		for n := range b {
			if thin && n%61 != 0 {
				continue
			}
			if _, err := open(b[:n]); !errors.Is(err, errs.ErrCorrupt) && !(n <= 8 && errors.Is(err, errs.ErrFormat)) {
				t.Errorf("%s: cut to %d bytes: %v", name, n, err)
			}
		}
		if _, err := open(append(b, 0)); !errors.Is(err, errs.ErrFormat) {
			t.Errorf("%s: an extra byte: %v", name, err)
		}
	}
}

// attack is a container with correct checksums and invalid contents.
type attack struct {
	name  string
	spoil func(blob []byte) // blob is the index
	class error
	words string
}

// attacks returns the attacks on the index of the golden file "kinds", which has 64 bytes of header, 18 dims, 11
// tensors and about 30 chunks.
func attacks(ix *tensor.Index) []attack {
	dims := 0
	for i := range ix.Tensors {
		dims += len(ix.Tensors[i].Shape)
	}
	records := 64 + 8*dims
	rec := func(i int) int { return records + 64*i }
	chunk := func(i int) int { return records + 64*len(ix.Tensors) + 32*i }
	le := binary.LittleEndian
	u8 := func(at int, v byte) func([]byte) { return func(b []byte) { b[at] = v } }
	u16 := func(at int, v uint16) func([]byte) { return func(b []byte) { le.PutUint16(b[at:], v) } }
	u32 := func(at int, v uint32) func([]byte) { return func(b []byte) { le.PutUint32(b[at:], v) } }
	u64 := func(at int, v uint64) func([]byte) { return func(b []byte) { le.PutUint64(b[at:], v) } }
	find := ix.Finder()
	whole, long, tied, two, none := find(0, "whole"), find(0, "long"), find(0, "tied"), find(0, "two"), find(0, "none")
	first := func(i int) int { return int(ix.Tensors[i].First) }
	f, ns, c := errs.ErrFormat, errs.ErrNotSupported, errs.ErrCorrupt
	return []attack{
		{"major", u16(4, 2), ns, "upgrade"},
		{"major of a draft", u16(4, 0), ns, "draft"},
		{"critical feature", u64(8, 1<<62), ns, "features 0x4000000000000000"},
		{"a feature that no chunk needs", u64(8, 1), f, "features 0x1"},
		{"another", u64(8, 2), f, "features 0x2"},
		{"a delta", u64(8, 4), ns, "this is a delta, not a model"},
		{"tensor record size", u16(28, 72), ns, "upgrade"},
		{"chunk record size", u16(30, 40), ns, "upgrade"},
		{"magic", u8(0, 'X'), c, "the index is too short"},
		{"size", u64(32, 1<<40), c, "but its header says"},
		{"tensors", u32(16, math.MaxUint32), c, "but its header says"},
		{"chunks", u32(20, math.MaxUint32), c, "but its header says"},
		{"dims", u32(24, math.MaxUint32), c, "but its header says"},
		{"a tensor for two chunks", func(b []byte) {
			le.PutUint32(b[16:], le.Uint32(b[16:])-1)
			le.PutUint32(b[20:], le.Uint32(b[20:])+2)
		}, f, "the index has 10 tensors"},
		{"a dim less, padding", func(b []byte) { le.PutUint32(b[24:], le.Uint32(b[24:])-1) }, nil, ""},
		{"reserved", u8(63, 1), f, "reserved"},
		{"negative dimension", u64(64, 1<<63), f, "negative"},
		{"huge dimension", u64(64, 1<<62), f, ""},
		{"dtype 0", u8(rec(whole), 0), f, "dtype code 0"},
		{"dtype 23", u8(rec(whole), 23), f, "dtype code 23"},
		{"another dtype", u8(rec(whole), byte(tensor.I8)), nil, ""}, // this dtype is valid
		{"another dtype of a plain tensor", u8(rec(long), byte(tensor.U64)), f, "but the header"},
		{"rank 65", u8(rec(whole)+1, 65), f, "rank 65"},
		{"rank 255", u8(rec(whole)+1, 255), f, "rank 255"},
		{"a rank more", u8(rec(whole)+1, 2), f, ""},
		{"a rank less", u8(rec(tied)+1, 0), f, "dimensions belong to no tensor"},
		{"layout 3", u8(rec(whole)+2, 3), ns, "layout 3"},
		{"plain, but is not", u8(rec(whole)+2, 1), f, "but the header"},
		{"chunks, but is plain", u8(rec(long)+2, 0), f, "expected one-dimensional U8"},
		{"an alias to no tensor", u8(rec(whole)+2, 2), f, "layout 2"},
		{"alias out of range", u32(rec(tied)+48, 1000), f, "alias of tensor 1000"},
		{"alias of an alias", u32(rec(tied)+48, uint32(find(0, "a tie of bytes"))), f, "no bytes itself"},
		{"alias of itself", u32(rec(tied)+48, uint32(tied)), f, "no bytes itself"},
		{"alias of another", u32(rec(tied)+48, uint32(whole)), f, "differs"},
		{"alias from chunks", u32(rec(whole)+48, 0), f, "does not match alias"},
		{"hash of an alias", u8(rec(tied)+32, 99), f, "differs"},
		{"parts 0", u8(rec(whole)+3, 0), f, "0 parts"},
		{"parts 3", u8(rec(whole)+3, 3), f, "column parts: 3"},
		{"parts 4", u8(rec(two)+3, 4), f, "chunks"},
		{"parts of nothing", u8(rec(none)+3, 2), f, "2 parts"},
		{"chunk bytes 0", u32(rec(whole)+4, 0), f, "chunk size: 0 "},
		{"chunk bytes 1", u32(rec(whole)+4, 1), f, "chunk size: 1 "},
		{"chunk bytes 32 MiB", u32(rec(whole)+4, 32<<20), f, "chunk size"},
		{"bytes", u64(rec(whole)+8, 8999), f, "TensorInvalidInfo"},
		{"bytes 2^64-1", u64(rec(whole)+8, math.MaxUint64), f, "bytes"},
		{"stored", u64(rec(whole)+16, 64), f, "but the header"},
		{"stored 2^63", u64(rec(whole)+16, 1<<63), f, "stored"},
		{"first", u32(rec(whole)+24, 0), f, "from number 0"},
		{"first of nothing", u32(rec(none)+24, 1<<31-1), f, "first chunk"},
		{"count", u32(rec(whole)+28, 2), f, "chunks"},
		{"count 2^32-1", u32(rec(whole)+28, math.MaxUint32), f, "chunks"},
		{"count of an alias", u32(rec(tied)+28, 1), f, ""},
		{"reserved of a tensor", u8(rec(whole)+63, 1), f, "reserved"},
		{"offset 0", u64(chunk(first(whole)), 0), f, "outside"},
		{"offset far", u64(chunk(first(whole)), 1<<40), f, "outside"},
		{"offset 2^63", u64(chunk(first(whole)), 1<<63), f, "2^63"},
		{"offset off by one", u64(chunk(first(whole)), uint64(ix.Chunks[first(whole)].Off)+1), f, ""},
		{"chunks swapped", func(b []byte) {
			x, y := b[chunk(first(whole)):], b[chunk(first(whole)+1):]
			for i := range 8 {
				x[i], y[i] = y[i], x[i]
			}
		}, f, "outside"},
		{"stored 0", u32(chunk(first(whole))+8, 0), f, "0 of 4096"},
		{"stored far", u32(chunk(first(whole))+8, math.MaxUint32), f, ""},
		{"logical", u32(chunk(first(whole))+12, 4095), f, "4095 logical"},
		{"logical 4 GiB", u32(chunk(first(whole))+12, math.MaxUint32), f, "logical"},
		{"codec", u8(chunk(first(whole))+20, 2), ns, "codec 2"},
		{"codec of a plain tensor", u8(chunk(first(long))+20, 1), f, "codec X16"},
		{"transform of raw", u8(chunk(first(whole))+21, 1), f, ""},
		{"chunk feature", u16(chunk(first(whole))+22, 1), ns, "features 0x1"},
		{"segment tiles of raw", u16(chunk(first(whole))+24, 1), f, ""},
		{"reserved of a chunk", u8(chunk(first(whole))+31, 1), f, "reserved"},
	}
}

// Every forbidden value in an index with a correct checksum is rejected with an error class and the file's name, and
// without large allocations.
func TestAttacks(t *testing.T) {
	good := golden(t)["kinds"]
	ix, err := open(good)
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range attacks(ix) {
		b := slices.Clone(good)
		a.spoil(b[4096:])
		b = restamp(b)
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		_, err := open(b)
		runtime.ReadMemStats(&after)
		if heap := after.TotalAlloc - before.TotalAlloc; heap > 4*uint64(len(b))+1<<20 {
			t.Errorf("%s: %d bytes of heap for %d", a.name, heap, len(b))
		}
		if a.class == nil {
			continue // may be valid or not, but must not panic
		}
		if !errors.Is(err, a.class) || !strings.Contains(errs.RuleOf(err)+" "+err.Error(), a.words) ||
			!strings.Contains(err.Error(), "model.safetensors") {
			t.Errorf("%s: got %v, want %v saying %q", a.name, err, a.class, a.words)
		}
	}
}

// A newer minor version may use the reserved bytes. An older reader ignores them.
func TestNewerMinor(t *testing.T) {
	b := slices.Clone(golden(t)["kinds"])
	binary.LittleEndian.PutUint16(b[4096+6:], overwire.Minor+1)
	b[4096+60] = 1
	if _, err := open(restamp(b)); err != nil {
		t.Error(err)
	}
}

// A file with only the mark or only the index of a container is never read as a plain file.
func TestHalfAContainer(t *testing.T) {
	header := func(metadata, name string) []byte {
		head, err := safetensors.AppendHeader(nil, map[string]string{"k": "v", overwire.MetadataKey: metadata},
			[]safetensors.Entry{{Name: name, DType: tensor.U8, Shape: []int64{0}}}, 0)
		if err != nil {
			t.Fatal(err)
		}
		return head
	}
	for _, c := range []struct {
		metadata, name string
		class          error
	}{
		{`{"format":"1.0","index":"overwire.index"}`, "x", errs.ErrCorrupt},
		{`{"format":"1.0","index":"x"}`, "overwire.index", errs.ErrCorrupt},
		{`{"format":"2.0","index":"overwire.index"}`, "overwire.index", errs.ErrNotSupported},
		{`{"format":"2.0","index":"other"}`, "x", errs.ErrNotSupported},
		{`{"format":"0.1","index":"overwire.index"}`, "overwire.index", errs.ErrNotSupported}, // a draft
		{`{"format":"0","index":"overwire.index"}`, "overwire.index", errs.ErrCorrupt},
		{`{"format":"x.y","index":"overwire.index"}`, "overwire.index", errs.ErrCorrupt},
		{`{}`, "overwire.index", errs.ErrCorrupt},
		{`yes`, "overwire.index", errs.ErrCorrupt},
		{`{"format":"1.0","index":"overwire.index"}`, "overwire.index", errs.ErrCorrupt}, // no bytes
		{`yes`, "x", nil}, // another program's entry in a plain file
	} {
		_, err := open(header(c.metadata, c.name))
		if c.class == nil && err != nil || c.class != nil && !errors.Is(err, c.class) {
			t.Errorf("%s with %q: %v", c.metadata, c.name, err)
		}
	}
	head, _ := safetensors.AppendHeader(nil, nil,
		[]safetensors.Entry{{Name: overwire.IndexName, DType: tensor.U8, Shape: []int64{0}}}, 0)
	if _, err := open(head); !errors.Is(err, errs.ErrCorrupt) {
		t.Errorf("an index without the mark: %v", err)
	}
}

// Several sources, plain files and containers, are joined into one consistent index.
func TestOpenMany(t *testing.T) {
	gs := golden(t)
	plain, err := safetensors.AppendHeader(nil, map[string]string{"a": "b"},
		[]safetensors.Entry{{Name: "plain", DType: tensor.U8, Shape: []int64{4}, End: 4}}, 0)
	if err != nil {
		t.Fatal(err)
	}
	files := [][]byte{gs["kinds"], append(plain, "abcd"...), gs["empty"], gs["dtypes"], gs["zeros"]}
	var srcs []source.Source
	for i, b := range files {
		srcs = append(srcs, &memory{name: string(rune('a' + i)), b: b})
	}
	ix, err := Open(context.Background(), srcs, Options{})
	if err != nil {
		t.Fatal(err)
	}
	if err := ix.Validate(nil); err != nil {
		t.Fatal(err)
	}
	if len(ix.Sources) != 5 || ix.Sources[1].Metadata["a"] != "b" || ix.Sources[1].Overwire() ||
		!ix.Sources[4].Overwire() || ix.Sources[3].URI != "d" {
		t.Errorf("wrong sources: %+v", ix.Sources)
	}
	find := ix.Finder()
	for name, source := range map[string]int{"tied": 0, "plain": 1, "t.BF16": 3, "a": 4} {
		i := find(source, name)
		if i < 0 {
			t.Fatalf("no %s", name)
		}
		if a := ix.Tensors[i].Alias; a >= 0 && ix.Tensors[a].Bytes != ix.Tensors[i].Bytes {
			t.Errorf("%s is an alias of %s", name, ix.Tensors[a].Name)
		}
	}
	for _, s := range srcs {
		if m := s.(*memory); m.reads != 1 {
			t.Errorf("%s: %d reads, want 1", m.name, m.reads)
		}
	}
	files[1] = files[1][:len(files[1])-1]
	srcs[1] = &memory{name: "b", b: files[1]}
	var at *errs.At
	if _, err := Open(context.Background(), srcs, Options{}); !errors.Is(err, errs.ErrCorrupt) ||
		!errors.As(err, &at) || at.Source != "b" {
		t.Errorf("a bad second source: %v", err)
	}
	if ix, err := Open(context.Background(), nil, Options{}); err != nil || len(ix.Tensors) != 0 {
		t.Errorf("Open without sources: %v", err)
	}
}

// An index larger than the first read costs more reads. An index over the limit is not read.
func TestLargeIndex(t *testing.T) {
	items := make([]overwire.Item, 5000)
	for i := range items {
		items[i] = overwire.Item{Name: strings.Repeat("n", i%7) + string(rune('a'+i%26)) + strings.Repeat("x", i/26),
			DType: tensor.U8,
			Shape: []int64{1}, Plain: true, ChunkBytes: 4096}
	}
	b := build(t, nil, items)
	src := &memory{name: "x", b: b}
	ix, _, err := readIndex(context.Background(), src, Options{})
	if err != nil || len(ix.Tensors) != len(items) || src.reads != 3 {
		t.Errorf("%d reads, want 3: %v", src.reads, err)
	}
	size := int64(tensor.MaxIndex) + 64
	head, err := safetensors.AppendHeader(nil,
		map[string]string{overwire.MetadataKey: `{"format":"1.0","index":"overwire.index"}`},
		[]safetensors.Entry{{Name: overwire.IndexName, DType: tensor.U8, Shape: []int64{size}, End: size}}, 4096)
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := readIndex(context.Background(), &sparse{memory{b: head}, 4096 + size}, Options{}); !errors.Is(err,
		errs.ErrFormat) {
		t.Errorf("an index of a gigabyte: %v", err)
	}
}

// sparse is a source with a size larger than its contents.
type sparse struct {
	memory
	size int64
}

func (s *sparse) Facts() source.Facts { return source.Facts{} }

func (s *sparse) Size() int64 { return s.size }

func (s *sparse) ReadAt(_ context.Context, p []byte, off int64) error {
	if off < int64(len(s.b)) {
		copy(p, s.b[off:])
	}
	return nil
}

// FuzzIndex changes containers but corrects their checksums. It varies the JSON header, the index and the number of
// bytes after them. An accepted file that is written again reads equal. No input panics or allocates more than a
// small multiple of its size. Run it with -fuzzminimizetime 1x, because the inputs are large.
func FuzzIndex(f *testing.F) {
	for _, b := range golden(f) {
		n := 8 + binary.LittleEndian.Uint64(b)
		h, err := safetensors.Parse("x", b[:n], int64(len(b)), safetensors.Options{})
		if err != nil {
			f.Fatal(err)
		}
		end := h.Tensors[0].Off + h.Tensors[0].Bytes
		for _, stamp := range []bool{true, false} {
			f.Add(bytes.TrimRight(b[8:n], " "), b[n:end], uint16(len(b)-int(end)), stamp)
		}
	}
	f.Fuzz(func(t *testing.T, head, blob []byte, tail uint16, stamp bool) {
		pad := 4096 - (8+len(head))%4096
		b := binary.LittleEndian.AppendUint64(nil, uint64(len(head)+pad))
		b = append(append(b, head...), strings.Repeat(" ", pad)...)
		b = append(append(b, blob...), make([]byte, tail)...)
		if stamp {
			b = restamp(b)
		}
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		ix, err := open(b)
		runtime.ReadMemStats(&after)
		if heap := after.TotalAlloc - before.TotalAlloc; heap > 8*uint64(len(b))+2<<20 {
			t.Errorf("%d bytes of heap for %d", heap, len(b))
		}
		if err != nil {
			var at *errs.At
			if !errors.As(err, &at) || !errs.Classed(err) {
				t.Errorf("an error without a class or location: %v", err)
			}
			return
		}
		if !ix.Sources[0].Overwire() {
			return
		}
		front := b[:ix.Sources[0].Data]
		again := append(slices.Clone(front), overwire.Append(nil, ix.Tensors, ix.Chunks, front)...)
		if len(again) > len(b) {
			t.Fatalf("written again: %d bytes of %d", len(again), len(b))
		}
		again = append(again, b[len(again):]...)
		ix2, err := open(again)
		if err != nil {
			t.Fatalf("written again: %v", err)
		}
		if !reflect.DeepEqual(ix.Tensors, ix2.Tensors) || !slices.Equal(ix.Chunks, ix2.Chunks) ||
			!maps.Equal(ix.Sources[0].Metadata, ix2.Sources[0].Metadata) {
			t.Error("written again, it reads differently")
		}
	})
}

// A torch HuggingFaceStorageWriter file is refused if its tensors may be parts, unless the caller permits parts. A
// file of whole tensors, which has only zero offsets in the same metadata, is opened.
func TestParts(t *testing.T) {
	for _, c := range []struct {
		name, info string
		whole      bool
	}{
		{"model-00001-of-00001.safetensors", `{"w":{"saved_offsets":[0]}}`, true},
		{"model.safetensors", `{}`, true},
		{"shard-00001-model-00001-of-00001.safetensors", `{"w":{"saved_offsets":[0]}}`, false},
		{"model.safetensors", `{"w":{"saved_offsets":[4]}}`, false},
		{"model.safetensors", `no JSON`, false},
	} {
		h := fmt.Sprintf(`{"__metadata__":{"DCP_SHARDING_INFO":%q},"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}`, c.info)
		b := append(binary.LittleEndian.AppendUint64(nil, uint64(len(h))), h...)
		src := &memory{name: "/m/" + c.name, b: append(b, 7)}
		for _, parts := range []bool{false, true} {
			_, err := Open(t.Context(), []source.Source{src}, Options{Parts: parts, Cache: &Cache{}})
			if isRefused := errors.Is(err, errs.ErrNotSupported); isRefused == (c.whole || parts) {
				t.Errorf("%s with %s, parts %v: %v", c.name, c.info, parts, err)
			}
		}
	}
}
