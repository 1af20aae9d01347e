package save_test

import (
	"bytes"
	"context"
	"errors"
	"github.com/overwire/overwire/gosrc/internal/spawn"
	"path/filepath"
	"testing"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/format"
	"github.com/overwire/overwire/gosrc/save"
	"github.com/overwire/overwire/gosrc/stored"
)

func TestStoredRanges(t *testing.T) {
	// Any range of a stored tensor or column part has the same bytes as in memory, for every number of parts, on
	// several threads, and with a cache that is too small.
	r := newRand(t)
	in := some(r)
	for _, parts := range []int{1, 2, 8} {
		p := filepath.Join(t.TempDir(), "m")
		write(t, save.Spec{Path: p, Compress: true, Parts: parts, ChunkBytes: 4096 << r.IntN(6)}, in)
		m, err := stored.Open(bg, []string{p}, format.Access{}, false)
		if err != nil {
			t.Fatal(err)
		}
		defer m.Close()
		want := read(t, p)
		items := save.ItemsOf(m, stored.CacheOf(1<<15))
		for _, it := range items {
			it.SetParts(1 << r.IntN(4))
		}
		type job struct {
			it          *save.Item
			p, off, len int64
		}
		var jobs []job
		for range 3000 {
			it := items[r.IntN(len(items))]
			if it.Bytes() == 0 {
				continue
			}
			size := it.Bytes() / it.Parts()
			off := r.Int64N(size)
			jobs = append(jobs, job{it, r.Int64N(it.Parts()), off, 1 + r.Int64N(min(size-off, 1<<r.IntN(18)))})
		}
		err = spawn.Each(bg, "test", 4, len(jobs), func(k int) error {
			j := jobs[k]
			a, err := j.it.InMemory(want[j.it.Name()].Data).GatherColumns(bg, make([]byte, j.len), j.p, j.off)
			if err != nil {
				return err
			}
			b, err := j.it.GatherColumns(bg, make([]byte, j.len), j.p, j.off)
			if err == nil && !bytes.Equal(a, b) {
				t.Errorf("%q stored in %d parts: bytes [%d, +%d) of part %d of %d differ", j.it.Name(), parts, j.off, j.len, j.p, j.it.Parts())
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
}

func TestClassed(t *testing.T) {
	// However a context ends, the error has a class of package errs.
	ctx, cancel := context.WithCancel(bg)
	cancel()
	if err := errs.Ended(ctx, context.Canceled); !errors.Is(err, errs.ErrCancelled) {
		t.Fatal(err)
	}
	ctx, cancel = context.WithTimeout(bg, 0)
	defer cancel()
	<-ctx.Done()
	if err := errs.Ended(ctx, ctx.Err()); !errors.Is(err, errs.ErrTimeout) {
		t.Fatal(err)
	}
	if errs.Ended(bg, nil) != nil {
		t.Fatal("an error without a cause")
	}
}
