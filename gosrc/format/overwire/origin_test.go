package overwire

import (
	"encoding/base64"
	"encoding/json"
	"errors"
	"math/rand/v2"
	"runtime"
	"strings"
	"testing"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/format/safetensors"
	"github.com/overwire/overwire/gosrc/tensor"
)

// If the header has no space for the origin, the container is written without it.
func TestOriginWithoutSpace(t *testing.T) {
	items := []Item{{Name: "w", DType: tensor.U8, Shape: []int64{64}, Plain: true, ChunkBytes: 4096}}
	for _, c := range []struct {
		bytes int
		kept  bool
	}{{100, true}, {tensor.MaxHeader, false}} {
		l, err := NewLayout(nil, items, &Origin{Size: 72, Header: strings.Repeat("A", c.bytes)}, false)
		if err != nil || (l.Origin != nil) != c.kept {
			t.Fatalf("an origin of %d bytes: %v, %v", c.bytes, l, err)
		}
		if _, err := l.Place(0, 64); err != nil {
			t.Fatal(err)
		}
		front, _, err := l.Seal(func(tensor.Codec, uint8, tensor.DType) bool { return true })
		if err != nil {
			t.Fatal(err)
		}
		h, err := safetensors.Parse("x", front[:l.header], l.pos, safetensors.Options{})
		if err != nil {
			t.Fatal(err)
		}
		o, err := ReadOrigin(h.Metadata[MetadataKey])
		if err != nil || (o != nil) != c.kept || c.kept && *o != *l.Origin {
			t.Errorf("an origin of %d bytes: read back %v, %v", c.bytes, o, err)
		}
	}
}

// FuzzOrigin reads arbitrary bytes as a metadata entry. They are rejected with an error class, or give a header that
// round-trips. Memory use is bounded.
func FuzzOrigin(f *testing.F) {
	head, err := safetensors.AppendHeader(nil, map[string]string{"a": "b"},
		[]safetensors.Entry{{Name: "w", DType: tensor.U8, Shape: []int64{3}, End: 3}}, 64)
	if err != nil {
		f.Fatal(err)
	}
	good := markOf(NewOrigin(head, int64(len(head))+3), "", false)
	f.Add(good, []byte{}, uint32(0))
	f.Add(markOf(nil, "", false), []byte{1}, uint32(1))
	f.Add(strings.Replace(good, `"size":`, `"size":-`, 1), []byte(nil), uint32(2))
	f.Add(markOf(&Origin{Size: 1 << 50, SHA256: Pending, Header: "7cEBAQ=="}, "", false), head, uint32(3))
	f.Fuzz(func(t *testing.T, text string, change []byte, at uint32) {
		o, err := ReadOrigin(text)
		if err == nil && o != nil && len(change) > 0 { // change the decoded header
			raw, err := base64.StdEncoding.DecodeString(o.Header)
			if err == nil && len(raw) > 0 {
				copy(raw[int(at%uint32(len(raw))):], change)
				o.Header = base64.StdEncoding.EncodeToString(raw)
			}
		}
		if err == nil && o != nil {
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			head, _, err = o.Front("x")
			runtime.ReadMemStats(&after)
			// Deflate expands a byte to at most 1032; a header's heap is a few times its size.
			if heap := after.TotalAlloc - before.TotalAlloc; heap > 16*1032*uint64(len(o.Header))+1<<20 {
				t.Errorf("%d bytes of heap for %d", heap, len(o.Header))
			}
			if err == nil {
				again, _, err := NewOrigin(head, o.Size).Front("x")
				if err != nil || string(again) != string(head) {
					t.Errorf("a second round trip: %v", err)
				}
			}
		}
		if err != nil && !errors.Is(err, errs.ErrFormat) && !errors.Is(err, errs.ErrCorrupt) {
			t.Errorf("an error without a class: %v", err)
		}
	})
}

// Every origin that is written can be read.
func TestOriginRoundTrip(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for _, o := range []*Origin{nil, {Size: 8}, {Size: 1<<63 - 1, SHA256: Pending,
		Header: base64.StdEncoding.EncodeToString([]byte{byte(r.Uint32()), 255, 254})}} {
		text := markOf(o, "", false)
		got, err := ReadOrigin(text)
		if err != nil || (got == nil) != (o == nil) || o != nil && *got != *o {
			t.Errorf("%s: read back %v, %v", text, got, err)
		}
		if !json.Valid([]byte(text)) {
			t.Errorf("invalid JSON: %s", text)
		}
	}
	if got := markOf(nil, "", false); got != `{"format":"1.4","index":"overwire.index"}` {
		t.Errorf("a container without an origin says %s", got)
	}
}

// An origin without a valid file size or with an invalid SHA-256 is refused.
func TestReadOrigin(t *testing.T) {
	for size, ok := range map[string]bool{
		"8": true, "9223372036854775807": true, "7": false, "0": false, "-1": false, "-9223372036854775808": false,
		"9223372036854775808": false, "18446744073709551615": false, "8.5": false, `"8"`: false, "null": false,
	} {
		if o, err := ReadOrigin(`{"origin":{"size":` + size + `}}`); (err == nil) != ok ||
			err != nil && !errors.Is(err, errs.ErrFormat) {
			t.Errorf("size %s: %v, %v", size, o, err)
		}
	}
	for sum, ok := range map[string]bool{
		"": true, Pending: true, Pending[1:]: false, Pending[2:]: false, Pending + "0": false, Pending + "00": false,
		"00":              false,
		Pending[1:] + "g": false, "0x" + Pending[2:]: false, strings.Repeat("F", 64): true,
	} {
		if o, err := ReadOrigin(`{"origin":{"size":8,"sha256":"` + sum + `"}}`); (err == nil) != ok ||
			err != nil && !errors.Is(err, errs.ErrFormat) {
			t.Errorf("SHA-256 %q: %v, %v", sum, o, err)
		}
	}
	for text, ok := range map[string]bool{"": false, "{": false, "[]": false, `{"origin":[]}`: false,
		`{"origin":"x"}`: false, "{}": true, `{"origin":null}`: true, "null": true} {
		if o, err := ReadOrigin(text); o != nil || (err == nil) != ok || err != nil && !errors.Is(err, errs.ErrFormat) {
			t.Errorf("%q: %v, %v", text, o, err)
		}
	}
}

// The header of an origin must be one base64-encoded Deflate stream with a header that fits the size of its file.
// Truncated, extended and oversized headers are refused, and a decompression bomb is not inflated.
func TestHeaderOfAnOrigin(t *testing.T) {
	head, err := safetensors.AppendHeader(nil, map[string]string{"a": "b"},
		[]safetensors.Entry{{Name: "w", DType: tensor.U8, Shape: []int64{30}, End: 30}}, 8)
	if err != nil {
		t.Fatal(err)
	}
	size := int64(len(head)) + 30
	good := NewOrigin(head, size)
	if got, h, err := good.Front("x"); err != nil || string(got) != string(head) || len(h.Tensors) != 1 {
		t.Fatalf("got the header %q, %v", got, err)
	}
	deflated, err := base64.StdEncoding.DecodeString(good.Header)
	if err != nil {
		t.Fatal(err)
	}
	of := base64.StdEncoding.EncodeToString
	for n := range deflated {
		if _, _, err := (&Origin{Size: size, Header: of(deflated[:n])}).Front("x"); !errors.Is(err, errs.ErrFormat) {
			t.Errorf("cut to %d bytes: %v", n, err)
		}
	}
	bomb := NewOrigin(make([]byte, 1<<24), 1<<20)
	for name, o := range map[string]*Origin{
		"no header":            {Size: size},
		"no base64":            {Size: size, Header: "!" + good.Header},
		"a letter too few":     {Size: size, Header: good.Header[:len(good.Header)-1]},
		"a byte after it":      {Size: size, Header: of(append(deflated[:len(deflated):len(deflated)], 0))},
		"a stream after it":    {Size: size, Header: of(append(deflated[:len(deflated):len(deflated)], deflated...))},
		"not a header":         NewOrigin([]byte("a text of some length"), size),
		"a longer header":      NewOrigin(append(head[:len(head):len(head)], ' '), size),
		"a byte too few":       NewOrigin(head[:len(head)-1], size),
		"of a shorter file":    {Size: size - 1, Header: good.Header},
		"of a longer file":     {Size: size + 1, Header: good.Header},
		"longer than its file": {Size: int64(len(head)) - 1, Header: good.Header},
		"a bomb":               bomb,
	} {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		_, _, err := o.Front("model.safetensors")
		runtime.ReadMemStats(&after)
		if !errors.Is(err, errs.ErrFormat) && !errors.Is(err, errs.ErrCorrupt) ||
			!strings.Contains(err.Error(), "model.safetensors") {
			t.Errorf("%s: %v", name, err)
		}
		if heap := after.TotalAlloc - before.TotalAlloc; heap > 8<<20 {
			t.Errorf("%s: %d bytes of heap", name, heap)
		}
	}
}
