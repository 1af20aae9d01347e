package verify

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/overwire/overwire/gosrc/codec"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/format"
	"github.com/overwire/overwire/gosrc/job"
	"github.com/overwire/overwire/gosrc/save"
	"github.com/overwire/overwire/gosrc/save/savetest"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/stored"
)

var goldenSpecs = map[string]save.Spec{
	"plain.safetensors":     {Metadata: map[string]string{"format": "pt"}},
	"container.safetensors": {Metadata: map[string]string{"format": "pt"}, Compress: true},
	"parts.safetensors":     {Compress: true, Parts: 2, ChunkBytes: 4096},
}

// goldenVersion is the folder of the current writer's files. The files were written with:
// go test ./gosrc/verify -run TestGoldens -args write-goldens
// Files of an earlier version never change.
const goldenVersion = "v1.4"

func TestGoldens(t *testing.T) {
	// Files of every writer version load, and the current writer still writes the same bytes as its golden files.
	if slices.Contains(os.Args, "write-goldens") {
		for name, spec := range goldenSpecs {
			spec.Path = filepath.Join(goldens, goldenVersion, name)
			_ = os.MkdirAll(filepath.Dir(spec.Path), 0o755)
			write(t, spec, savetest.GoldenTensors())
		}
	}
	versions, err := filepath.Glob(filepath.Join(goldens, "v*"))
	if err != nil || len(versions) == 0 {
		t.Fatal("no goldens", err)
	}
	for _, dir := range versions {
		for name := range goldenSpecs {
			p := filepath.Join(dir, name)
			same(t, savetest.GoldenTensors(), read(t, p))
			if v, err := Verify(bg, nil, []string{p}, format.Access{}, false); err != nil || !v.OK {
				t.Errorf("%s: %v", p, err)
			}
		}
	}
	for name, spec := range goldenSpecs {
		spec.Path = filepath.Join(t.TempDir(), name)
		write(t, spec, savetest.GoldenTensors())
		p := filepath.Join(goldens, goldenVersion, name)
		if sha256Of(t, spec.Path) != sha256Of(t, p) {
			t.Errorf("the writer has changed: %s differs: add a new version folder for the new format", p)
		}
	}
}

// bytesSource is a file in memory.
type bytesSource []byte

func (bytesSource) URI() string           { return "memory" }
func (s bytesSource) Facts() source.Facts { return source.Facts{} }

func (s bytesSource) Size() int64 { return int64(len(s)) }
func (bytesSource) Close() error  { return nil }

func (s bytesSource) ReadAt(ctx context.Context, p []byte, off int64) error {
	if off < 0 || off+int64(len(p)) > s.Size() {
		return &errs.At{Verb: "read", Source: "memory", Chunk: -1, Offset: off, Err: errs.New(errs.ErrCorrupt, "truncated")}
	}
	copy(p, s[off:])
	return nil
}

// refused verifies a file and returns an error unless it was refused with the right kind of error.
func refused(b []byte) error {
	srcs := []source.Source{bytesSource(b)}
	ix, err := format.Open(bg, srcs, format.Options{Known: codec.Known})
	if err == nil {
		err = verifyModel(bg, job.New("verify"), &stored.Model{Index: ix, Sources: srcs}, &Report{})
	}
	var at *errs.At
	switch {
	case err == nil:
		return errors.New("not refused")
	case !errors.Is(err, errs.ErrCorrupt) && !errors.Is(err, errs.ErrFormat) && !errors.Is(err, errs.ErrNotSupported):
		return fmt.Errorf("wrong class: %w", err)
	case !errors.As(err, &at) || at.Source != "memory":
		return fmt.Errorf("no source: %w", err)
	}
	return nil
}

func TestEveryBitFlip(t *testing.T) {
	// Verify detects every single-bit flip in a container: in the header, spaces, index, padding and chunks. The error
	// names the file. Its class is corrupt, bad format, or, for version and codec numbers, not supported. Inside runs
	// of spaces in the header, the test flips only one bit per byte.
	for _, name := range []string{"container.safetensors", "parts.safetensors"} {
		t.Run(name, func(t *testing.T) { t.Parallel(); everyFlip(t, name) })
	}
}

func everyFlip(t *testing.T, name string) {
	b, err := os.ReadFile(filepath.Join(goldens, goldenVersion, name))
	if err != nil {
		t.Fatal(err)
	}
	flips := 0
	for i := range b {
		inSpaces := i > 64 && i < 4095 && b[i] == ' ' && b[i-1] == ' ' && b[i+1] == ' '
		for bit := range 8 {
			if inSpaces && bit != i%8 || testing.Short() && (i+bit)%7 != 0 {
				continue
			}
			flips++
			b[i] ^= 1 << bit
			if err := refused(b); err != nil {
				t.Fatalf("%s: bit %d of byte %d flipped: %v", name, bit, i, err)
			}
			b[i] ^= 1 << bit
		}
	}
	t.Logf("%s: %d flips refused", name, flips)
}

func TestEveryTruncation(t *testing.T) {
	// Every truncation and any extra bytes at the end are refused, even for plain files.
	for name := range goldenSpecs {
		b, err := os.ReadFile(filepath.Join(goldens, goldenVersion, name))
		if err != nil {
			t.Fatal(err)
		}
		for n := range b {
			if err := refused(b[:n]); err != nil {
				t.Fatalf("%s cut to %d bytes: %v", name, n, err)
			}
		}
		if err := refused(append(b, 0)); err != nil {
			t.Fatalf("%s and a byte after the end: %v", name, err)
		}
	}
}

func TestVerifyPlain(t *testing.T) {
	// A plain file's structure is verified, and the report says that its contents were not.
	v, err := Verify(bg, nil, []string{filepath.Join(goldens, goldenVersion, "plain.safetensors")}, format.Access{}, false)
	if err != nil || v.Note == "" || v.Files[0].Checked != "structure" || v.Bytes != 0 {
		t.Fatalf("%+v %v", v, err)
	}
}

func TestVerifyPlace(t *testing.T) {
	// An error names the tensor, chunk and offset.
	p := filepath.Join(t.TempDir(), "m")
	r := fixedRand()
	write(t, save.Spec{Path: p, Compress: true, ChunkBytes: 4096},
		[]save.Input{bf16("a", r, 64, 64), bf16("b", r, 64, 64)})
	m, err := stored.Open(bg, []string{p}, format.Access{}, false)
	if err != nil {
		t.Fatal(err)
	}
	c := m.Index.Chunks[m.Index.Tensors[1].First+1]
	m.Close()
	b, _ := os.ReadFile(p)
	b[c.Off+200] ^= 4
	_ = os.WriteFile(p, b, 0o600)
	_, err = Verify(bg, nil, []string{p}, format.Access{}, false)
	var at *errs.At
	if !errors.As(err, &at) || at.Tensor != "b" || at.Chunk != 1 || at.Offset != c.Off ||
		!strings.Contains(err.Error(), "checksum") {
		t.Fatal(err)
	}
}

func TestInspect(t *testing.T) {
	// Inspect reports dtype, shape, sizes and coding of every tensor.
	got, err := Inspect(bg, []string{filepath.Join(goldens, goldenVersion, "container.safetensors")}, format.Access{})
	if err != nil {
		t.Fatal(err)
	}
	in := got
	coding := map[string]string{}
	for _, it := range in.Sources[0].Tensors {
		coding[it.Name] = it.Coding
	}
	if coding["layer.tied"] != "X16/bf16" || coding["layer.weight"] != "alias" || coding["scale"] != "plain" ||
		in.Sources[0].Format != "overwire" || in.Sources[0].Metadata["format"] != "pt" || len(in.Sources[0].Metadata) != 1 ||
		in.Totals["all"].Tensors != 6 || in.Totals["BF16"].Bytes != 2*24*128*2 {
		t.Fatalf("%v %+v", coding, in)
	}
}
