package save_test

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/overwire/overwire/gosrc/convert"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/format"
	"github.com/overwire/overwire/gosrc/format/overwire"
	"github.com/overwire/overwire/gosrc/save"
	"github.com/overwire/overwire/gosrc/save/original"
	"github.com/overwire/overwire/gosrc/save/publish"
	"github.com/overwire/overwire/gosrc/save/savetest"
	"github.com/overwire/overwire/gosrc/verify"
)

func TestHostileOrigin(t *testing.T) {
	// For any stored description of the original, decompressing gives the file with that SHA-256, or a typed error with
	// the container's name. After an error no file is left. Memory use is bounded, and the tensors still load.
	dir := t.TempDir()
	in := []save.Input{bf16("w", fixedRand(), 100, 100)}
	header := `{"w":{"dtype":"BF16","shape":[100,100],"data_offsets":[0,20000]}}`
	good := savetest.Odd(header, 8, in[0].Data)
	head := good[:len(good)-20000]
	size := int64(len(good))
	origin := func(change func(o *overwire.Origin)) *overwire.Origin {
		o := overwire.NewOrigin(head, size)
		change(o)
		return o
	}
	of := func(header string, bytes int64) *overwire.Origin {
		h := savetest.Odd(header, 8, nil)
		return overwire.NewOrigin(h, int64(len(h))+bytes)
	}
	for name, c := range map[string]struct {
		o     *overwire.Origin
		class error // nil if it is the original
	}{
		"not hashed":      {origin(func(*overwire.Origin) {}), nil},
		"other digest":    {origin(func(o *overwire.Origin) { o.SHA256 = overwire.Pending }), errs.ErrCorrupt},
		"no digest":       {origin(func(o *overwire.Origin) { o.SHA256 = "zz" }), errs.ErrFormat},
		"half a digest":   {origin(func(o *overwire.Origin) { o.SHA256 = "00" }), errs.ErrFormat},
		"longer":          {origin(func(o *overwire.Origin) { o.Size++ }), errs.ErrFormat},
		"shorter":         {origin(func(o *overwire.Origin) { o.Size-- }), errs.ErrFormat},
		"negative":        {origin(func(o *overwire.Origin) { o.Size = -1 }), errs.ErrFormat},
		"endless":         {origin(func(o *overwire.Origin) { o.Size = 1<<63 - 1 }), errs.ErrFormat},
		"no base64":       {origin(func(o *overwire.Origin) { o.Header = "?" }), errs.ErrFormat},
		"cut":             {origin(func(o *overwire.Origin) { o.Header = o.Header[:8] }), errs.ErrFormat},
		"nothing":         {origin(func(o *overwire.Origin) { o.Header = "" }), errs.ErrFormat},
		"a bomb":          {overwire.NewOrigin(make([]byte, 101<<20), 1<<40), errs.ErrFormat},
		"another name":    {of(strings.ReplaceAll(header, `"w"`, `"v"`), 20000), errs.ErrFormat},
		"another dtype":   {of(strings.ReplaceAll(header, "BF16", "F16"), 20000), errs.ErrFormat},
		"another shape":   {of(strings.ReplaceAll(header, "[100,100]", "[10000]"), 20000), errs.ErrFormat},
		"another tensor":  {of(header[:len(header)-1]+`,"e":{"dtype":"U8","shape":[0],"data_offsets":[20000,20000]}}`, 20000), errs.ErrFormat},
		"no tensor":       {of(`{}`, 0), errs.ErrFormat},
		"other metadata":  {of(`{"__metadata__":{"a":"b"},`+header[1:], 20000), errs.ErrFormat},
		"overlap":         {of(strings.ReplaceAll(header, "[0,", "[1,"), 20000), errs.ErrFormat},
		"no safetensors":  {overwire.NewOrigin([]byte("12345678garbage"), 20015), errs.ErrFormat},
		"a short header":  {overwire.NewOrigin(head[:7], 20007), errs.ErrFormat},
		"another version": {origin(func(o *overwire.Origin) { o.SHA256 = strings.Repeat("A", 64) }), errs.ErrCorrupt},
	} {
		packed, out := filepath.Join(dir, "packed.safetensors"), filepath.Join(dir, "out.safetensors")
		spec := save.Spec{Path: packed, Compress: true}
		to, err := save.Resolve(packed, &spec)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := save.NewWriter(to, &spec, nil).Write(bg, []save.File{{File: publish.File{Path: packed},
			Items: save.ItemsIn(in), Original: &original.File{Origin: c.o}}}); err != nil {
			t.Fatal(name, err)
		}
		same(t, in, read(t, packed))
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		rep, err := convert.Convert(bg, nil, []string{packed}, out, save.Spec{})
		runtime.ReadMemStats(&after)
		if heap := after.TotalAlloc - before.TotalAlloc; heap > 800<<20 {
			t.Errorf("%s: %d bytes of heap", name, heap)
		}
		v, verr := verify.Verify(bg, nil, []string{packed}, format.Access{}, true)
		if c.class == nil {
			if verr != nil || v.Files[0].Original.Compared || v.Files[0].Original.SHA256 != sha256Of(t, out) {
				t.Errorf("%s: verified: %v, %+v", name, verr, v)
			}
			if got, _ := os.ReadFile(out); err != nil || !bytes.Equal(got, good) || len(rep.Originals) != 1 ||
				rep.Originals[0].SHA256 != "" || rep.Originals[0].Compared {
				t.Errorf("%s: %v, %+v", name, err, rep)
			}
			_ = os.Remove(out)
			continue
		}
		var at *errs.At
		if !errors.Is(err, c.class) || !errors.As(err, &at) || at.Source != packed {
			t.Errorf("%s: %v", name, err)
		}
		if !errors.Is(verr, c.class) || v.OK || verr.Error() != err.Error() {
			t.Errorf("%s: verified: %v, not %v", name, verr, err)
		}
		if _, err := os.Stat(out); err == nil {
			t.Errorf("%s: a file was written", name)
		}
		noTemps(t, dir)
	}
}
