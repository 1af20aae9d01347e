package safetensors

// The tests in this file check the limits of numbers in headers and index.json files, and damage at every byte of
// small files.

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/tensor"
)

// Length accepts a header length that exceeds neither the file nor the limit. Otherwise the file has a different
// format, or is truncated if the next byte looks like the start of a header.
func TestLength(t *testing.T) {
	for _, n := range []uint64{0, 1, 2, 92, 93, 1 << 20, tensor.MaxHeader, tensor.MaxHeader + 1, 1 << 31, 1<<32 - 1,
		1 << 32, 1<<63 - 64, 1<<63 - 8, 1 << 63, math.MaxUint64 - 7, math.MaxUint64} {
		for _, first := range []byte{'{', ' ', '\n', 'x', 0} {
			head := append(binary.LittleEndian.AppendUint64(nil, n), first)
			for _, size := range []int64{9, 100, 101, tensor.MaxHeader + 8, 1 << 40, math.MaxInt64} {
				var want error
				switch {
				case n > tensor.MaxHeader:
					want = errs.ErrFormat
				case int64(n) > size-8 && (first == 'x' || first == 0):
					want = errs.ErrFormat
				case int64(n) > size-8:
					want = errs.ErrCorrupt
				}
				got, err := Length("", head, size)
				if !errors.Is(err, want) || err == nil && uint64(got) != n || err != nil && got != 0 {
					t.Errorf("length %d before %q in a file of %d: %d, %v", n, first, size, got, err)
				}
			}
		}
	}
	for size := range int64(8) {
		if _, err := Length("", make([]byte, size), size); !errors.Is(err, errs.ErrFormat) ||
			errs.RuleOf(err) != "HeaderTooSmall" {
			t.Errorf("a file of %d bytes: %v", size, err)
		}
	}
}

// A header is parsed completely or not at all. Parsing with too few or too many header bytes gives an argument error,
// and a file that is longer or shorter than its header says is invalid.
func TestEveryByteOfAHeader(t *testing.T) {
	head, err := AppendHeader(nil, map[string]string{"a": "b"},
		[]Entry{{"w", tensor.F32, []int64{2, 1}, 0, 8}, {"x", tensor.U8, []int64{1}, 8, 9}}, 0)
	if err != nil {
		t.Fatal(err)
	}
	size := int64(len(head)) + 9
	if h := parse(t, head, size); len(h.Tensors) != 2 || h.Data != int64(len(head)) {
		t.Fatalf("%+v", h)
	}
	for k := range head {
		want := errs.ErrArgument
		if k < 8 {
			want = errs.ErrFormat
		}
		if _, err := Parse("x", head[:k], size, Options{}); !errors.Is(err, want) {
			t.Errorf("cut to %d bytes: %v", k, err)
		}
		if _, err := Parse("x", head[:k], int64(k), Options{}); !errors.Is(err, errs.ErrCorrupt) &&
			!(k <= 8 && errors.Is(err, errs.ErrFormat)) {
			t.Errorf("a file cut to %d bytes: %v", k, err)
		}
	}
	if _, err := Parse("x", append(bytes.Clone(head), ' '), size, Options{}); !errors.Is(err, errs.ErrArgument) {
		t.Errorf("an extra byte: %v", err)
	}
	for n := int64(len(head)); n < size+9; n++ {
		want := errs.ErrFormat // bytes after the last tensor
		if n < size {
			want = errs.ErrCorrupt // a tensor's bytes are missing
		}
		if _, err := Parse("x", head, n, Options{}); n != size && !errors.Is(err, want) {
			t.Errorf("a file of %d bytes instead of %d: %v", n, size, err)
		}
	}
	good := parse(t, head, size)
	for bit := 64; bit < 8*len(head); bit++ { // the JSON has no checksum, but Sum must change
		p := bytes.Clone(head)
		p[bit/8] ^= 1 << (bit % 8)
		h, err := Parse("x", p, size, Options{})
		if err == nil && h.Sum == good.Sum {
			t.Errorf("bit %d of byte %d changes nothing", bit%8, bit/8)
		}
		var at *errs.At
		if err != nil && (!errors.As(err, &at) || at.Source != "x" || at.Offset > size || !errs.Classed(err)) {
			t.Errorf("bit %d of byte %d: %v", bit%8, bit/8, err)
		}
	}
}

// An index.json that is truncated at any byte is refused. With a flipped bit it is refused, or names only
// files in its folder.
func TestEveryByteOfAnIndex(t *testing.T) {
	text := []byte(`{"metadata":{"total_size":12,"a":[1,{"b":null}]},"weight_map":{"w":"1.safetensors","x":"2.safetensors"},"more":true}`)
	if s, err := ReadIndexJSON("x", text); err != nil || len(s.Weights) != 2 || s.TotalSize != 12 ||
		s.Metadata["a"] != `[1,{"b":null}]` {
		t.Fatalf("%+v, %v", s, err)
	}
	for k := range text {
		if _, err := ReadIndexJSON("x", text[:k]); !errors.Is(err, errs.ErrFormat) {
			t.Errorf("cut to %d bytes: %v", k, err)
		}
	}
	for bit := range 8 * len(text) {
		p := bytes.Clone(text)
		p[bit/8] ^= 1 << (bit % 8)
		s, err := ReadIndexJSON("x", p)
		if err != nil {
			if !errors.Is(err, errs.ErrFormat) {
				t.Errorf("bit %d of byte %d: %v", bit%8, bit/8, err)
			}
			continue
		}
		for _, name := range s.Files {
			if name == "" || strings.ContainsAny(name, "/\\:\x00") || filepath.Base(name) != name || name == ".." {
				t.Errorf("bit %d of byte %d: the file %q", bit%8, bit/8, name)
			}
		}
		for _, w := range s.Weights {
			if w.File < 0 || w.File >= len(s.Files) || !slices.IsSorted(s.Files) {
				t.Errorf("bit %d of byte %d: %+v of %v", bit%8, bit/8, w, s.Files)
			}
		}
	}
}

// An invalid total_size is ignored, because it is only informative.
func TestTotalSize(t *testing.T) {
	for text, want := range map[string]int64{
		"0": 0, "-0": 0, "1": 1, "9223372036854775807": math.MaxInt64, "9223372036854775808": -1,
		"18446744073709551615": -1, "-1": -1,
		"1.5": 1, "2e3": 2000, "4.5e18": 4500000000000000000, "4.7e18": -1, "-1e3": -1, `"12"`: -1, "null": -1,
		"[]": -1, "{}": -1, "true": -1,
	} {
		s, err := ReadIndexJSON("x", []byte(`{"metadata":{"total_size":`+text+`},"weight_map":{}}`))
		if err != nil || s.TotalSize != want || len(s.Metadata) != 0 {
			t.Errorf("%s: %d, want %d, %v", text, s.TotalSize, want, err)
		}
	}
}

// Readers and the writer accept metadata entries up to the limit, and refuse more.
func TestMuchMetadata(t *testing.T) {
	entries := func(n int) (m map[string]string, text string) {
		m = make(map[string]string, n)
		var b strings.Builder
		for i := range n {
			m[fmt.Sprint(i)] = ""
			fmt.Fprintf(&b, `,"%d":""`, i)
		}
		return m, "{" + b.String()[1:] + "}"
	}
	for n, ok := range map[int]bool{maxMetadata: true, maxMetadata + 1: false} {
		m, text := entries(n)
		head, err := AppendHeader(nil, m, nil, 0)
		if (err == nil) != ok || !ok && !errors.Is(err, errs.ErrArgument) {
			t.Errorf("%d entries are written: %v", n, err)
		}
		if ok && len(parse(t, head, int64(len(head))).Metadata) != n {
			t.Errorf("%d entries are not read back", n)
		}
		b := file(`{"__metadata__":`+text+`}`, "")
		for _, lenient := range []bool{false, true} {
			if _, err := Parse("x", b, int64(len(b)), Options{Lenient: lenient}); (err == nil) != ok ||
				!ok && !errors.Is(err, errs.ErrFormat) {
				t.Errorf("%d entries are read, lenient %v: %v", n, lenient, err)
			}
		}
		if s, err := ReadIndexJSON("x", []byte(`{"metadata":`+text+`,"weight_map":{}}`)); (err == nil) != ok ||
			ok && len(s.Metadata) != n || !ok && !errors.Is(err, errs.ErrFormat) {
			t.Errorf("%d entries of an index.json: %d, %v", n, len(s.Metadata), err)
		}
	}
}

// failing is a source that cannot be read from a given byte on.
type failing struct {
	*memory
	from int64
}

func (f failing) ReadAt(ctx context.Context, p []byte, off int64) error {
	if off+int64(len(p)) > f.from {
		return errs.New(errs.ErrIO, "byte %d cannot be read", f.from)
	}
	return f.memory.ReadAt(ctx, p, off)
}

// If reading the start or the rest of a long header fails, the error keeps its class and has the offset of the read.
func TestReadFailsLater(t *testing.T) {
	entries, size := model(5000)
	head, err := AppendHeader(nil, nil, entries, 0)
	if err != nil || len(head) <= source.HeadBytes {
		t.Fatalf("a header of %d bytes: %v", len(head), err)
	}
	b := append(head, make([]byte, size)...)
	for from, want := range map[int64]int64{0: 0, source.HeadBytes - 1: 0, source.HeadBytes: source.HeadBytes,
		int64(len(head)) - 1: source.HeadBytes} {
		var at *errs.At
		_, err := Read(t.Context(), failing{inMemory(b), from}, Options{})
		if !errors.Is(err, errs.ErrIO) || !errors.As(err, &at) || at.Offset != want ||
			at.Source != "model.safetensors" {
			t.Errorf("from byte %d on: %v", from, err)
		}
	}
	if _, err := Read(t.Context(), failing{inMemory(b), int64(len(head))}, Options{}); err != nil {
		t.Errorf("more than the header was read: %v", err)
	}
}
