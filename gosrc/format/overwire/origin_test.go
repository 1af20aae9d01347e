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

// A container whose header has no space for the origin is written without one, in
// the version without it.
func TestOriginWithoutSpace(t *testing.T) {
	items := []Item{{Name: "w", DType: tensor.U8, Shape: []int64{64}, Plain: true, ChunkBytes: 4096}}
	for _, c := range []struct {
		bytes int
		kept  bool
	}{{100, true}, {tensor.MaxHeader, false}} {
		l, err := NewLayout(nil, items, &Origin{Size: 72, Header: strings.Repeat("A", c.bytes)}, false)
		if err != nil || (l.Origin != nil) != c.kept {
			t.Fatalf("%d bytes: %v, %v", c.bytes, l, err)
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
			t.Errorf("%d bytes: read %v, %v", c.bytes, o, err)
		}
		if minor := le.Uint16(front[l.header+6:]); (minor == 1) != c.kept {
			t.Errorf("%d bytes: minor %d", c.bytes, minor)
		}
	}
}

// FuzzOrigin reads anything as an entry of metadata: it is refused with a class, or
// gives a header that is described and read again as it is; and memory is bounded.
func FuzzOrigin(f *testing.F) {
	head, err := safetensors.AppendHeader(nil, map[string]string{"a": "b"}, []safetensors.Entry{{Name: "w", DType: tensor.U8, Shape: []int64{3}, End: 3}}, 64)
	if err != nil {
		f.Fatal(err)
	}
	good := mark(NewOrigin(head, int64(len(head))+3), 0, "")
	f.Add(good, []byte{}, uint32(0))
	f.Add(mark(nil, 0, ""), []byte{1}, uint32(1))
	f.Add(strings.Replace(good, `"size":`, `"size":-`, 1), []byte(nil), uint32(2))
	f.Add(mark(&Origin{Size: 1 << 50, SHA256: Pending, Header: "7cEBAQ=="}, 0, ""), head, uint32(3))
	f.Fuzz(func(t *testing.T, text string, change []byte, at uint32) {
		o, err := ReadOrigin(text)
		if err == nil && o != nil && len(change) > 0 { // behind the base64
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
			// Deflate makes at most 1032 bytes of one; a header's heap is a few times its size.
			if heap := after.TotalAlloc - before.TotalAlloc; heap > 16*1032*uint64(len(o.Header))+1<<20 {
				t.Errorf("%d bytes of heap for %d", heap, len(o.Header))
			}
			if err == nil {
				again, _, err := NewOrigin(head, o.Size).Front("x")
				if err != nil || string(again) != string(head) {
					t.Errorf("described again: %v", err)
				}
			}
		}
		if err != nil && !errors.Is(err, errs.ErrFormat) && !errors.Is(err, errs.ErrCorrupt) {
			t.Errorf("no class: %v", err)
		}
	})
}

// Everything that an origin is written from is read again.
func TestOriginAgain(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for _, o := range []*Origin{nil, {Size: 8}, {Size: 1<<63 - 1, SHA256: Pending, Header: base64.StdEncoding.EncodeToString([]byte{byte(r.Uint32()), 255, 254})}} {
		text := mark(o, 0, "")
		got, err := ReadOrigin(text)
		if err != nil || (got == nil) != (o == nil) || o != nil && *got != *o {
			t.Errorf("%s: %v, %v", text, got, err)
		}
		if !json.Valid([]byte(text)) {
			t.Errorf("no JSON: %s", text)
		}
	}
	if got := mark(nil, 0, ""); got != `{"format":"1.0","index":"overwire.index","note":"`+note+`"}` {
		t.Errorf("a container without an origin says %s", got)
	}
}
