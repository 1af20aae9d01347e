package overwire

// The tests in this file check how containers and deltas are recognized: by the metadata entry, its version and
// features, and the frame of the index.

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/overwire/overwire/gosrc/codec/digest"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/format/safetensors"
	"github.com/overwire/overwire/gosrc/tensor"
)

// A container needs both the metadata entry and the index. Its version has two numbers, and the first one must be the
// number that this library writes.
func TestIs(t *testing.T) {
	mark := func(format string) string { return fmt.Sprintf(`{"format":%q,"index":"overwire.index"}`, format) }
	for _, c := range []struct {
		entry   string // "-" means no entry
		indexed bool
		ours    bool
		class   error
		words   string
	}{
		{"-", false, false, nil, ""},
		{"-", true, false, errs.ErrCorrupt, "not the metadata entry"},
		{mark("1.0"), false, false, errs.ErrCorrupt, "is missing"},
		{mark("1.0"), true, true, nil, ""},
		{mark("1.3"), true, true, nil, ""},
		{mark("1.4"), true, false, errs.ErrCorrupt, "makes other readers refuse"},
		{mark("1.65535"), true, false, errs.ErrCorrupt, "makes other readers refuse"},
		{mark("2.0"), true, false, errs.ErrNotSupported, "upgrade overwire"},
		{mark("65535.0"), true, false, errs.ErrNotSupported, "upgrade overwire"},
		{mark("0.9"), true, false, errs.ErrNotSupported, "compress the model again"},
		{`{"format":"1.0"}`, true, false, errs.ErrCorrupt, `the index "" is missing`},
		{`{"format":"1.0","index":"overwire.table"}`, true, false, errs.ErrCorrupt, `"overwire.table" is missing`},
		{`{"format":1.0,"index":"overwire.index"}`, true, false, errs.ErrCorrupt, "metadata entry"},
		{"", true, false, errs.ErrCorrupt, "metadata entry"},
		{"5", true, false, errs.ErrCorrupt, "metadata entry"},
		{"yes", false, false, nil, ""}, // an entry of another program
		{"", false, false, nil, ""},
		{"[1]", false, false, nil, ""},
		// Loading ignores the origin and the digests, even if they are invalid.
		{`{"format":"1.3","index":"overwire.index","digests":!,"origin":?`, true, true, nil, ""},
		{`{"format":"1.1","index":"overwire.index","origin":{"size":-1}}`, true, true, nil, ""},
	} {
		h := safetensors.Header{Metadata: map[string]string{MetadataKey: c.entry},
			Tensors: []tensor.Tensor{{Name: "w"}}}
		if c.entry == "-" {
			h.Metadata = nil
		}
		if c.indexed {
			h.Tensors = append(h.Tensors, tensor.Tensor{Name: IndexName})
		}
		ours, err := Is(&h)
		if ours != c.ours || !errors.Is(err, c.class) || err != nil && !strings.Contains(err.Error(), c.words) {
			t.Errorf("entry %s, index %v: Is returned %v, %v", c.entry, c.indexed, ours, err)
		}
	}
	// Since 1.4 a container has a notice. Earlier containers and other programs' files with this entry must not have
	// one.
	for _, c := range []struct {
		entry   string
		indexed bool
		class   error
	}{
		{mark("1.4"), true, nil}, {mark("1.65535"), true, nil}, {mark("1.3"), true, errs.ErrFormat},
		{mark("1.0"), true, errs.ErrFormat}, {"yes", false, errs.ErrFormat}, {mark("1.4"), false, errs.ErrCorrupt},
	} {
		h := safetensors.Header{Metadata: map[string]string{MetadataKey: c.entry}, Notice: Notice}
		if c.indexed {
			h.Tensors = []tensor.Tensor{{Name: IndexName}}
		}
		if ours, err := Is(&h); c.class == nil && !ours || !errors.Is(err, c.class) {
			t.Errorf("entry %s with a notice, index %v: Is returned %v, %v", c.entry, c.indexed, ours, err)
		}
	}
	for _, format := range []string{"", "1", ".", "1.", ".0", "1.65536", "65536.0", "1.-1", "+1.0", "-1.0", "1.0.0",
		"1.0 ", " 1.0", "1.x", "0x1.0", "1,0"} {
		h := safetensors.Header{Metadata: map[string]string{MetadataKey: mark(format)},
			Tensors: []tensor.Tensor{{Name: IndexName}}}
		if ours, err := Is(&h); ours || !errors.Is(err, errs.ErrCorrupt) || !strings.Contains(err.Error(), "format") {
			t.Errorf("format %q: Is returned %v, %v", format, ours, err)
		}
	}
}

// sealed returns a container with one tensor and one chunk with the given codec and transform.
func sealed(t *testing.T, d tensor.DType, c tensor.Chunk, o *Origin, digests bool) (f front, l *Layout) {
	t.Helper()
	l, err := NewLayout(nil, []Item{{Name: "w", DType: d, Shape: []int64{512}, ChunkBytes: 4096}}, o, digests)
	if err != nil {
		t.Fatal(err)
	}
	l.Chunks[0].Codec, l.Chunks[0].Transform, l.Chunks[0].SegTiles = c.Codec, c.Transform, c.SegTiles
	stored := l.Chunks[0].Logical
	if c.Codec != tensor.CodecRaw {
		stored--
	}
	if _, err := l.Place(0, stored); err != nil {
		t.Fatal(err)
	}
	b, size, err := l.Seal(nil)
	if err != nil {
		t.Fatal(err)
	}
	h, err := safetensors.Parse("x", b[:l.Header()], size, safetensors.Options{})
	if err != nil {
		t.Fatal(err)
	}
	return front{&h, b[l.Header():], size}, l
}

// The metadata entry and the index both state the version, and the index exactly the features that its chunks need.
func TestVersions(t *testing.T) {
	raw, planes := tensor.Chunk{}, tensor.Chunk{Codec: tensor.CodecPlanes, Transform: 1}
	x16 := tensor.Chunk{Codec: tensor.CodecX16, Transform: 8, SegTiles: 1}
	for _, c := range []struct {
		dtype    tensor.DType
		chunk    tensor.Chunk
		features uint64
	}{
		{tensor.U8, raw, 0}, {tensor.BF16, x16, 0}, {tensor.U8, x16, 0}, {tensor.F32, x16, 0},
		{tensor.C64, x16, 0},
		{tensor.I16, x16, 1}, {tensor.U16, x16, 1}, {tensor.I32, x16, 1}, {tensor.U32, x16, 1},
		{tensor.I64, x16, 1}, {tensor.U64, x16, 1},
		{tensor.U64, raw, 0}, {tensor.BF16, planes, 2}, {tensor.I32, planes, 2},
	} {
		for _, origin := range []*Origin{nil, {Size: 8}} {
			for _, digests := range []bool{false, true} {
				f, _ := sealed(t, c.dtype, c.chunk, origin, digests)
				var m struct{ Format string }
				if err := json.Unmarshal([]byte(f.h.Metadata[MetadataKey]), &m); err != nil ||
					m.Format != "1.4" {
					t.Errorf("%v, %v: the entry says %q: %v", c.dtype, c.chunk.Codec, m.Format, err)
				}
				if f.h.Notice != Notice {
					t.Errorf("%v, %v: the notice is %q", c.dtype, c.chunk.Codec, f.h.Notice)
				}
				if got := le.Uint16(f.blob[6:]); got != Minor || le.Uint64(f.blob[8:]) != c.features {
					t.Errorf("%v, %v: the index says minor %d, features %#x; want %#x", c.dtype, c.chunk.Codec, got,
						le.Uint64(f.blob[8:]), c.features)
				}
				for features := range uint64(4) {
					le.PutUint64(f.blob[8:], features)
					seal(f.blob)
					_, err := Decode(f.blob, f.h, "x", f.size, nil)
					var at *errs.At
					if want := features == c.features; want != (err == nil) ||
						err != nil && (!errors.Is(err, errs.ErrFormat) || !errors.As(err, &at) ||
							at.Offset != f.h.Data+8) {
						t.Errorf("%v, %v: features %#x, but the chunks need %#x: %v", c.dtype, c.chunk.Codec, features,
							c.features, err)
					}
				}
			}
		}
	}
}

// Digests are read back in tensor order; each half is little-endian, the high half first. A wrong number of digests
// is refused. A file without digests is valid.
func TestDigests(t *testing.T) {
	if got, want := Digests([]digest.Sum{{High: 0x0807060504030201,
		Low: 0x100f0e0d0c0b0a09}}), "AQIDBAUGBwgJCgsMDQ4PEA=="; got != want {
		t.Errorf("Digests returned %q, want %q", got, want)
	}
	r := rand.New(rand.NewPCG(31, 1))
	for n := range 6 {
		sums := make([]digest.Sum, n)
		for i := range sums {
			sums[i] = digest.Sum{High: r.Uint64(), Low: r.Uint64()}
		}
		text := markOf(&Origin{Size: 8, Header: "x"}, Digests(sums), false)
		for other := range n + 3 {
			got, err := ReadDigests(text, other)
			switch {
			case n == 0 && (got != nil || err != nil):
				t.Errorf("no digests of %d tensors: %v, %v", other, got, err)
			case n > 0 && other == n && (err != nil || fmt.Sprint(got) != fmt.Sprint(sums)):
				t.Errorf("%d digests: got %v, %v", n, got, err)
			case n > 0 && other != n && !errors.Is(err, errs.ErrFormat):
				t.Errorf("%d digests of %d tensors: %v, %v", n, other, got, err)
			}
		}
	}
	for _, text := range []string{"", "{", `{"digests":5}`, `{"digests":"AQIDBAUGBwgJCgsMDQ4PEA"}`,
		`{"digests":"AQIDBAUGBwgJCgsMDQ4PE==="}`,
		`{"digests":"-_IDBAUGBwgJCgsMDQ4PEA=="}`, `{"digests":"AQIDBAUGBwgJCgsMDQ4P"}`, `{"digests":"!"}`,
		`{"digests":"="}`} {
		if got, err := ReadDigests(text, 1); got != nil || !errors.Is(err, errs.ErrFormat) {
			t.Errorf("%s: ReadDigests returned %v, %v", text, got, err)
		}
	}
}

// deltaFile returns the start of a delta file, up to its index, with the given features and counts.
func deltaFile(t *testing.T, features uint64, tensors, chunks, dims int) (head, blob []byte, h *safetensors.Header) {
	t.Helper()
	n := int64(blobSize(uint64(tensors), uint64(chunks), uint64(dims)))
	head, err := safetensors.AppendHeader(nil, map[string]string{MetadataKey: DeltaMark()}, []safetensors.Entry{
		safetensors.NoticeEntry(DeltaNotice),
		{Name: IndexName, DType: tensor.U8, Shape: []int64{n}, End: n},
		{Name: "overwire.table", DType: tensor.U8, Shape: []int64{64}, Begin: n, End: n + 64},
		{Name: "overwire.chunks", DType: tensor.U8, Shape: []int64{0}, Begin: n + 64, End: n + 64},
	}, DataAlign)
	if err != nil {
		t.Fatal(err)
	}
	parsed, err := safetensors.Parse("x", head, int64(len(head))+n+64, safetensors.Options{})
	if err != nil {
		t.Fatal(err)
	}
	blob = appendFrame(nil, features, tensors, chunks, dims, head)
	blob = append(blob, make([]byte, 64*tensors+32*chunks+8*dims)...)
	return head, appendTrailer(blob, 0), &parsed
}

// A delta file is recognized by its feature bit. It is never read as a model, and a model is never read as a delta.
func TestDeltaIsNotAModel(t *testing.T) {
	head, blob, h := deltaFile(t, FeatureDelta, 0, 0, 0)
	if got := AppendDelta([]byte("x"), head); string(got) != "x"+string(blob) || len(blob) != DeltaIndexSize() ||
		len(blob)%tensor.BlobAlign != 0 {
		t.Errorf("the index of a delta is %x, want %x, of %d bytes", got[1:], blob, DeltaIndexSize())
	}
	if ours, err := Is(h); !ours || err != nil {
		t.Errorf("not recognized as an overwire file: %v", err)
	}
	if err := IsDelta(blob, h); err != nil {
		t.Error(err)
	}
	if _, err := Decode(blob, h, "x", h.Data+int64(len(blob))+64, nil); !errors.Is(err, errs.ErrNotSupported) ||
		!strings.Contains(err.Error(), "apply_delta") {
		t.Errorf("read as a model: %v", err)
	}
	model, _ := sealed(t, tensor.U8, tensor.Chunk{}, nil, false)
	if err := IsDelta(model.blob, model.h); !errors.Is(err, errs.ErrFormat) ||
		!strings.Contains(err.Error(), "not a delta") {
		t.Errorf("a model was accepted as a delta: %v", err)
	}
	for name, c := range map[string]struct {
		features              uint64
		tensors, chunks, dims int
		class                 error
	}{
		"a second feature":   {FeatureDelta | 2, 0, 0, 0, errs.ErrNotSupported},
		"an unknown feature": {FeatureDelta | 1<<63, 0, 0, 0, errs.ErrNotSupported},
		"a tensor":           {FeatureDelta, 1, 0, 0, errs.ErrFormat},
		"a chunk":            {FeatureDelta, 0, 1, 0, errs.ErrFormat},
		"a dimension":        {FeatureDelta, 0, 0, 1, errs.ErrFormat},
		"no feature":         {0, 0, 0, 0, errs.ErrFormat},
	} {
		_, blob, h := deltaFile(t, c.features, c.tensors, c.chunks, c.dims)
		if err := IsDelta(blob, h); !errors.Is(err, c.class) {
			t.Errorf("%s: %v", name, err)
		}
		if _, err := Decode(blob, h, "x", h.Data+int64(len(blob))+64, nil); err == nil {
			t.Errorf("%s: accepted as a model", name)
		}
	}
}

// Every flipped bit in the index of a model or a delta is detected by its checksum, and an index of the wrong length
// is refused.
func TestFrame(t *testing.T) {
	f, _ := sealed(t, tensor.U8, tensor.Chunk{}, nil, false)
	_, blob, h := deltaFile(t, FeatureDelta, 0, 0, 0)
	for name, read := range map[string]func(b []byte) error{
		"a model": func(b []byte) error { _, err := Decode(b, f.h, "x", f.size, nil); return err },
		"a delta": func(b []byte) error { return IsDelta(b, h) },
	} {
		good := map[string][]byte{"a model": f.blob, "a delta": blob}[name]
		if err := read(good); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		for bit := range 8 * len(good) {
			b := bytes.Clone(good)
			b[bit/8] ^= 1 << (bit % 8)
			if err := read(b); !errors.Is(err, errs.ErrCorrupt) {
				t.Errorf("%s: bit %d of byte %d: %v", name, bit%8, bit/8, err)
			}
		}
		for n := range good {
			if err := read(good[:n]); !errors.Is(err, errs.ErrCorrupt) {
				t.Errorf("%s, cut to %d bytes: %v", name, n, err)
			}
		}
		if err := read(append(bytes.Clone(good), make([]byte, 64)...)); !errors.Is(err, errs.ErrCorrupt) {
			t.Errorf("%s followed by zeros: %v", name, err)
		}
	}
	for name, change := range map[string]func(h *safetensors.Header){
		"no tensor":        func(h *safetensors.Header) { h.Tensors = nil },
		"another first":    func(h *safetensors.Header) { h.Tensors[0].Name = "w" },
		"another dtype":    func(h *safetensors.Header) { h.Tensors[0].DType = tensor.I8 },
		"no row":           func(h *safetensors.Header) { h.Tensors[0].Shape = []int64{1, h.Tensors[0].Bytes} },
		"a scalar":         func(h *safetensors.Header) { h.Tensors[0].Shape = nil },
		"a byte too few":   func(h *safetensors.Header) { h.Tensors[0].Bytes-- },
		"another header":   func(h *safetensors.Header) { h.Sum ^= 1 },
		"unaligned data":   func(h *safetensors.Header) { h.Data += 64 },
		"a tensor too few": func(h *safetensors.Header) { h.Tensors = h.Tensors[:1] },
	} {
		h := *f.h
		h.Tensors = append([]tensor.Tensor(nil), h.Tensors...)
		change(&h)
		want := errs.ErrCorrupt
		if name == "unaligned data" || name == "a tensor too few" {
			want = errs.ErrFormat // the checksums match
		}
		if _, err := Decode(f.blob, &h, "x", f.size, nil); !errors.Is(err, want) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
