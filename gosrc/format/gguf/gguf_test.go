package gguf

import (
	"bytes"
	"encoding/binary"
	"errors"
	"math"
	"math/rand/v2"
	"reflect"
	"runtime"
	"strings"
	"testing"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/source/sourcetest"
)

// A writer writes headers in either byte order.
type writer struct {
	bytes.Buffer
	order binary.ByteOrder
}

func (w *writer) put(values ...any) *writer {
	for _, v := range values {
		if text, ok := v.(string); ok {
			v = []byte(text)
			_ = binary.Write(w, w.order, uint64(len(text)))
		}
		_ = binary.Write(w, w.order, v) // cannot fail: the sizes are fixed and w is in memory
	}
	return w
}

// header returns a writer with the start of a version 3 file.
func header(order binary.ByteOrder, tensors, entries uint64) *writer {
	w := &writer{order: order}
	w.WriteString("GGUF")
	return w.put(uint32(3), tensors, entries)
}

// whole returns a file with entries of several types and two tensors.
func whole(order binary.ByteOrder) []byte {
	w := header(order, 2, 8)
	w.put("general.alignment", uint32(kindU32), uint32(64))
	w.put("name", uint32(kindText), "a \xff b")
	w.put("eps", uint32(kindF32), math.Float32bits(1e-5))
	w.put("wide", uint32(kindI64), int64(-7))
	w.put("yes", uint32(kindBool), uint8(1))
	w.put("shape", uint32(kindArray), uint32(kindI32), uint64(2), int32(-1), int32(5))
	w.put("words", uint32(kindArray), uint32(kindText), uint64(20))
	for range 20 {
		w.put("word")
	}
	w.put("nested", uint32(kindArray), uint32(kindArray), uint64(1), uint32(kindU8), uint64(3), [3]byte{})
	w.put("q", uint32(2), uint64(256), uint64(3), uint32(12), uint64(64)) // Q4_K
	w.put("scale", uint32(0), uint32(0), uint64(0))                       // F32
	w.Write(make([]byte, -w.Len()&63+64+3*144))
	return w.Bytes()
}

func read(t *testing.T, data []byte) (File, error) {
	t.Helper()
	return ReadHeader(t.Context(), &sourcetest.Mem{Name: "x.gguf", Data: data})
}

// Headers in either byte order are read correctly. Short values are shown as text, long arrays as their length;
// shapes have the slowest dimension first.
func TestReadHeader(t *testing.T) {
	for _, order := range []binary.ByteOrder{binary.LittleEndian, binary.BigEndian} {
		data := whole(order)
		f, err := read(t, data)
		if err != nil {
			t.Fatal(err)
		}
		want := map[string]string{
			"general.alignment": "64", "name": "a \uFFFD b", "eps": "1e-05", "wide": "-7", "yes": "true",
			"shape": "[-1, 5]", "words": "20 of string", "nested": "1 of array",
		}
		if !reflect.DeepEqual(f.Metadata, want) {
			t.Errorf("got the metadata %q, want %q", f.Metadata, want)
		}
		at := f.Header
		tensors := []Tensor{{"q", "Q4_K", []int64{3, 256}, at + 64, 3 * 144}, {"scale", "F32", nil, at, 4}}
		if at%64 != 0 || !reflect.DeepEqual(f.Tensors, tensors) || at+64+3*144 != int64(len(data)) {
			t.Errorf("%+v, header of %d in %d bytes", f.Tensors, at, len(data))
		}
	}
}

// A long header is read in windows, which may end inside a value.
func TestWindows(t *testing.T) {
	w := header(binary.LittleEndian, 1, 1)
	w.put("words", uint32(kindArray), uint32(kindText), uint64(200_000))
	rng := rand.New(rand.NewPCG(1, 2))
	for range 200_000 {
		w.put(strings.Repeat("x", rng.IntN(40)))
	}
	w.put("t", uint32(1), uint64(5), uint32(24), uint64(0))
	end := w.Len()
	w.Write(make([]byte, -end&31+5))
	f, err := read(t, w.Bytes())
	if err != nil || f.Metadata["words"] != "200000 of string" || f.Tensors[0].Off != int64(end+-end&31) {
		t.Fatal(f, err)
	}
}

// An invalid header gives an error with the right class and text, before anything large is allocated.
func TestHostileHeaders(t *testing.T) {
	le := binary.LittleEndian
	many := uint64(1) << 60
	tensor := func(values ...any) []byte {
		w := header(le, 1, 0).put(values...)
		w.Write(make([]byte, 4096))
		return w.Bytes()
	}
	entry := func(values ...any) []byte {
		w := header(le, 0, 1).put(values...)
		w.Write(make([]byte, 4096))
		return w.Bytes()
	}
	twice := func(off uint64, second string) []byte {
		w := header(le, 2, 0).put("a", uint32(1), uint64(64), uint32(24), uint64(0), second, uint32(1), uint64(64),
			uint32(24), off)
		w.Write(make([]byte, 4096))
		return w.Bytes()
	}
	nested := []any{"k", uint32(kindArray)}
	for range 9 {
		nested = append(nested, uint32(kindArray), uint64(1))
	}
	version := func(n uint32) []byte {
		return append([]byte("GGUF"), (&writer{order: le}).put(n, many, many).Bytes()...)
	}
	for what, one := range map[string]struct {
		data  []byte
		class error
		text  string
	}{
		"another file":      {[]byte("GGUX and more"), errs.ErrFormat, "not a GGUF file"},
		"version 1":         {version(1), errs.ErrNotSupported, "version 1"},
		"version 4":         {version(4), errs.ErrNotSupported, "version 4"},
		"counts":            {header(le, many, 1).Bytes(), errs.ErrFormat, "at most"},
		"entries":           {header(le, 1, many).Bytes(), errs.ErrFormat, "at most"},
		"no entry":          {header(le, 0, 1).Bytes(), errs.ErrCorrupt, "truncated"},
		"long key":          {entry(many), errs.ErrFormat, "a key has"},
		"key":               {entry("\xff", uint32(0), uint8(1)), errs.ErrFormat, "UTF-8"},
		"kind":              {entry("k", uint32(13)), errs.ErrFormat, "its type has the unknown number 13"},
		"long text":         {entry("k", uint32(kindText), many), errs.ErrFormat, "a string is too long"},
		"text past the end": {entry("k", uint32(kindText), uint64(5000)), errs.ErrCorrupt, "truncated"},
		"long array":        {entry("k", uint32(kindArray), uint32(kindF64), many), errs.ErrFormat, "an array is too long"},
		"array past the end": {entry("k", uint32(kindArray), uint32(kindF64), uint64(5000)), errs.ErrCorrupt,
			"truncated"},
		"texts past the end":  {entry("k", uint32(kindArray), uint32(kindText), many), errs.ErrCorrupt, "truncated"},
		"elements":            {entry("k", uint32(kindArray), uint32(99), uint64(1)), errs.ErrFormat, "the type of its elements"},
		"arrays in arrays":    {entry(nested...), errs.ErrFormat, "deep"},
		"alignment 0":         {entry(alignmentAt, uint32(kindU32), uint32(0)), errs.ErrFormat, "power of two"},
		"alignment 48":        {entry(alignmentAt, uint32(kindU32), uint32(48)), errs.ErrFormat, "power of two"},
		"alignment as a text": {entry(alignmentAt, uint32(kindText), "32"), errs.ErrFormat, "power of two"},
		"rank":                {tensor("t", uint32(5)), errs.ErrFormat, "rank is 5"},
		"any rank":            {tensor("t", uint32(1)<<26), errs.ErrFormat, "rank is 67108864"},
		"shape":               {tensor("t", uint32(2), many, many, uint32(0), uint64(0)), errs.ErrFormat, "too large"},
		"bytes": {tensor("t", uint32(1), uint64(1)<<61, uint32(27), uint64(0)), errs.ErrFormat,
			"block size of I64"},
		"a dimension and 0": {tensor("t", uint32(2), uint64(0), uint64(math.MaxUint64), uint32(0), uint64(0)),
			errs.ErrFormat, "too large"},
		"blocks": {tensor("t", uint32(1), uint64(33), uint32(2), uint64(0)), errs.ErrFormat,
			"block size of Q4_0"},
		"offset": {tensor("t", uint32(1), uint64(32), uint32(24), uint64(16)), errs.ErrFormat,
			"not a multiple of 32"},
		"far": {tensor("t", uint32(1), uint64(32), uint32(24), uint64(1)<<62), errs.ErrCorrupt,
			"end after"},
		"past the end": {tensor("t", uint32(1), uint64(4064), uint32(24), uint64(1024)), errs.ErrCorrupt,
			"end after"},
		"names":   {twice(64, "a"), errs.ErrFormat, "two tensors"},
		"overlap": {twice(32, "b"), errs.ErrFormat, "overlap those of the previous tensor"},
		"two entries": {header(le, 0, 2).put("k", uint32(0), uint8(1), "k", uint32(0), uint8(1)).Bytes(),
			errs.ErrFormat, "two entries"},
	} {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		_, err := read(t, one.data)
		if runtime.ReadMemStats(&after); after.TotalAlloc-before.TotalAlloc > 16<<20 {
			t.Errorf("%s: %d bytes were allocated", what, after.TotalAlloc-before.TotalAlloc)
		}
		if !errors.Is(err, one.class) || !strings.Contains(err.Error(), one.text) ||
			!strings.Contains(err.Error(), "x.gguf") {
			t.Errorf("%s: %v", what, err)
		}
	}
	data := whole(le)
	for n := range data { // truncated at every length
		if _, err := read(t, data[:n]); err == nil {
			t.Errorf("accepted with %d of %d bytes", n, len(data))
		}
	}
}

// A tensor of an unknown type is listed without its size. It must start inside the file and after the previous tensor.
// The other tensors are listed completely.
func TestLaterTypes(t *testing.T) {
	le := binary.LittleEndian
	file := func(later uint64, dims ...uint64) (File, error) {
		w := header(le, 3, 1).put("name", uint32(kindText), "n")
		w.put("a", uint32(1), uint64(64), uint32(24), uint64(0)) // I8
		w.put("later", uint32(len(dims)), dims, uint32(42), later)
		w.put("b", uint32(1), uint64(32), uint32(24), uint64(128))
		w.Write(make([]byte, -w.Len()&31+160))
		return read(t, w.Bytes())
	}
	f, err := file(64, 256, 3)
	want := []Tensor{{"a", "I8", []int64{64}, 0, 64}, {"later", "type 42, not known", []int64{3, 256}, 64, Unsized},
		{"b", "I8", []int64{32}, 128, 32}}
	for i := range want {
		want[i].Off += f.Header
	}
	if err != nil || f.Metadata["name"] != "n" || !reflect.DeepEqual(f.Tensors, want) {
		t.Errorf("got %+v, %v; want the tensors %+v", f, err, want)
	}
	if _, err := file(0, 0); err != nil { // a tensor without values takes no bytes
		t.Error(err)
	}
	for later, text := range map[uint64]string{32: "overlap those of the previous", 128: "overlap those of the previous",
		160: "end after", 192: "end after", 65: "multiple of 32"} {
		if _, err := file(later, 7); err == nil || !strings.Contains(err.Error(), text) {
			t.Errorf("at %d: %v", later, err)
		}
	}
}

// FuzzHeader reads arbitrary bytes. They are rejected with an error class, or all tensors are in the file and do not
// overlap.
func FuzzHeader(f *testing.F) {
	f.Add(whole(binary.LittleEndian))
	f.Add(whole(binary.BigEndian))
	f.Fuzz(func(t *testing.T, data []byte) {
		file, err := read(t, data)
		if err != nil {
			if !errs.Classed(err) {
				t.Fatal(err)
			}
			return
		}
		covered := map[int64]bool{}
		for _, tensor := range file.Tensors {
			if tensor.Bytes == Unsized {
				tensor.Bytes = 0
			}
			if tensor.Off < file.Header || tensor.Bytes < 0 || tensor.Off+tensor.Bytes > int64(len(data)) {
				t.Fatalf("%+v is not inside the file of %d bytes", tensor, len(data))
			}
			for at := tensor.Off; at < tensor.Off+tensor.Bytes; at++ {
				if covered[at] {
					t.Fatalf("%+v overlaps another tensor", tensor)
				}
				covered[at] = true
			}
		}
	})
}
