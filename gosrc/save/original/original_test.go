package original

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/format/safetensors"
	"github.com/overwire/overwire/gosrc/internal/spawn"
	"github.com/overwire/overwire/gosrc/source/file"
	"github.com/overwire/overwire/gosrc/tensor"
)

// opened is an open safetensors file of one tensor, and what is known of it.
func opened(t *testing.T) (*file.File, *tensor.Source, []byte) {
	t.Helper()
	const size = 1 << 20
	b, err := safetensors.AppendHeader(nil, nil, []safetensors.Entry{{Name: "w", DType: tensor.U8, Shape: []int64{size}, End: size}}, 8)
	if err != nil {
		t.Fatal(err)
	}
	data := int64(len(b))
	b = append(b, make([]byte, size)...)
	path := filepath.Join(t.TempDir(), "x")
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := file.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	return f, &tensor.Source{URI: path, Size: int64(len(b)), Data: data, Format: tensor.FormatSafetensors}, b
}

// The digest is that of the file; a file that was written to meanwhile, and a hashing
// that is cancelled, are errors, and no goroutine stays.
func TestHash(t *testing.T) {
	f, s, b := opened(t)
	ctx, cancel := context.WithCancelCause(context.Background())
	o, err := Of(ctx, f, s)
	if err != nil {
		t.Fatal(err)
	}
	if err := o.Hash(ctx)(); err != nil || o.SHA256 != fmt.Sprintf("%x", sha256.Sum256(b)) {
		t.Errorf("%s, %v", o.SHA256, err)
	}
	if err := os.Truncate(s.URI, s.Size+1); err != nil {
		t.Fatal(err)
	}
	var at *errs.At
	if err := o.Hash(ctx)(); !errors.Is(err, errs.ErrCorrupt) || !errors.As(err, &at) || at.Source != s.URI {
		t.Errorf("a file that was written to: %v", err)
	}
	cancel(errs.New(errs.ErrCancelled, "enough"))
	if err := o.Hash(ctx)(); !errors.Is(err, errs.ErrCancelled) {
		t.Errorf("cancelled: %v", err)
	}
	if err := (*File)(nil).Hash(ctx)(); err != nil {
		t.Errorf("nothing to hash: %v", err)
	}
	if left := spawn.Left(); len(left) > 0 {
		t.Errorf("%v still run", left)
	}
}
