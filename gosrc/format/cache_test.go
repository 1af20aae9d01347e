package format

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/source/file"
)

// counted is a local file that counts its reads.
type counted struct {
	*file.File
	reads *atomic.Int64
}

func (c counted) ReadAt(ctx context.Context, p []byte, off int64) error {
	c.reads.Add(1)
	return c.File.ReadAt(ctx, p, off)
}

// plainFile writes a safetensors file of n one-byte tensors.
func plainFile(t *testing.T, path string, n int, prefix string) {
	t.Helper()
	var entries []string
	for i := range n {
		entries = append(entries, fmt.Sprintf(`"%s%d":{"dtype":"U8","shape":[1],"data_offsets":[%d,%d]}`, prefix, i, i,
			i+1))
	}
	h := "{" + strings.Join(entries, ",") + "}"
	b := append(binary.LittleEndian.AppendUint64(nil, uint64(len(h))), h...)
	if err := os.WriteFile(path, append(b, make([]byte, n)...), 0o600); err != nil {
		t.Fatal(err)
	}
}

// settled is a counted file that reports Settled, as if it had not changed for some seconds.
type settled struct{ counted }

func (s settled) Facts() source.Facts {
	f := s.File.Facts()
	f.Settled = true
	return f
}

// Opening a file again reads and parses nothing and uses the file's current name. Every change to the file is
// noticed: rewriting in place, replacing, and touching it.
func TestCache(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a.safetensors")
	plainFile(t, path, 100, "t")
	var c Cache
	var reads atomic.Int64
	first := func(name string, opt Options) (string, string, int64) {
		t.Helper()
		f, err := file.Open(name)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		reads.Store(0)
		opt.Cache = &c
		ix, err := Open(context.Background(), []source.Source{settled{counted{f, &reads}}}, opt)
		if err != nil {
			t.Fatal(err)
		}
		return ix.Tensors[0].Name, ix.Sources[0].URI, reads.Load()
	}
	if name, _, n := first(path, Options{}); name != "t0" || n != 1 {
		t.Fatalf("got tensor %s after %d reads", name, n)
	}
	other := path + ".link"
	if err := os.Link(path, other); err != nil { // changes the inode
		t.Fatal(err)
	}
	if _, _, n := first(path, Options{}); n != 1 {
		t.Errorf("%d reads of a file whose inode changed", n)
	}
	if name, uri, n := first(other, Options{}); name != "t0" || uri != other || n != 0 {
		t.Errorf("%s of %s after %d reads, want none", name, uri, n)
	}
	if _, _, n := first(path, Options{Lenient: true}); n != 1 {
		t.Errorf("%d reads: a strict index was used for a lenient open", n)
	}
	st, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	time.Sleep(20 * time.Millisecond) // lets the file system's clock advance
	plainFile(t, path, 100, "u")      // same inode and length; Chtimes below restores the time
	if err := os.Chtimes(path, st.ModTime(), st.ModTime()); err != nil {
		t.Fatal(err)
	}
	if name, _, n := first(path, Options{}); name != "u0" || n != 1 {
		t.Errorf("%s after %d reads of a file that was rewritten", name, n)
	}
	plainFile(t, path+".new", 100, "v")
	if err := os.Rename(path+".new", path); err != nil {
		t.Fatal(err)
	}
	if name, _, n := first(path, Options{}); name != "v0" || n != 1 {
		t.Errorf("%s after %d reads of a file that was replaced", name, n)
	}
	if name, _, _ := first(other, Options{}); name != "u0" {
		t.Errorf("%s is read through the old link, want u0", name)
	}
}

// A file that changed a moment ago is not cached, because it may change again within the same clock tick. Invalid
// files and sources without Settled are not cached either.
func TestFreshFilesAreNotCached(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a.safetensors")
	var c Cache
	var reads atomic.Int64
	var f *file.File
	for f == nil || f.Facts().Settled { // on a slow host, seconds may pass between the two steps
		plainFile(t, path, 3, "t")
		var err error
		if f, err = file.Open(path); err != nil {
			t.Fatal(err)
		}
		defer f.Close()
	}
	for range 2 {
		if _, err := Open(context.Background(), []source.Source{counted{f, &reads}}, Options{Cache: &c}); err != nil {
			t.Fatal(err)
		}
	}
	if reads.Load() != 2 || c.order.Len() != 0 {
		t.Errorf("a fresh file had %d reads, want 2, and %d cached indexes, want 0", reads.Load(), c.order.Len())
	}
	if err := os.WriteFile(path, []byte("no such file at all"), 0o600); err != nil {
		t.Fatal(err)
	}
	g, err := file.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer g.Close()
	for range 2 {
		if _, err := Open(context.Background(), []source.Source{settled{counted{g, &reads}}},
			Options{Cache: &c}); !errors.Is(err, errs.ErrFormat) {
			t.Error(err)
		}
	}
	if c.order.Len() != 0 {
		t.Errorf("%d invalid files were cached", c.order.Len())
	}
}

// The cache stays within its limit and keeps the most recently used indexes.
func TestCacheBound(t *testing.T) {
	dir := t.TempDir()
	var c Cache
	var kept []cacheKey
	path := filepath.Join(dir, "a.safetensors")
	plainFile(t, path, 2000, strings.Repeat("n", 100))
	f, err := file.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	ix, _, err := readIndex(context.Background(), f, Options{})
	if err != nil {
		t.Fatal(err)
	}
	for i := range 600 {
		k := cacheKey{id: source.Identity{Inode: uint64(i)}}
		c.put(k, ix)
		c.put(k, ix) // as two concurrent readers would
		if kept = append(kept, k); c.getIndex(kept[0], "x") == nil {
			t.Fatalf("the most recently used index was evicted at entry %d", i)
		}
	}
	if c.bytes > cacheBytes || c.bytes < cacheBytes/2 || len(c.by) != c.order.Len() ||
		c.bytes != int64(len(c.by))*footprintOf(ix) {
		t.Errorf("%d bytes in %d and %d entries", c.bytes, len(c.by), c.order.Len())
	}
	if c.getIndex(kept[1], "x") != nil || c.getIndex(kept[599], "x") == nil {
		t.Error("the cache did not keep the latest entries")
	}
}

// If several files are invalid, the error names the first one, regardless of the order in which they are read.
func TestOpenNamesTheFirst(t *testing.T) {
	dir := t.TempDir()
	var srcs []source.Source
	for i := range 30 {
		path := filepath.Join(dir, fmt.Sprintf("%02d.safetensors", i))
		plainFile(t, path, 5, "t")
		if i >= 20 {
			if err := os.WriteFile(path, []byte("????????not one of them"), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		f, err := file.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		srcs = append(srcs, f)
	}
	for range 20 {
		var at *errs.At
		if _, err := Open(context.Background(), srcs, Options{}); !errors.As(err, &at) ||
			filepath.Base(at.Source) != "20.safetensors" {
			t.Fatal(err)
		}
	}
	ix, err := Open(context.Background(), srcs[:20], Options{})
	if err != nil || len(ix.Tensors) != 100 || ix.Tensors[57].Source != 11 {
		t.Errorf("Open of the valid files: %v", err)
	}
}
