package delta

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/job"
	"github.com/overwire/overwire/gosrc/save"
	"github.com/overwire/overwire/gosrc/source"
)

func write(t *testing.T, f *File, path string, most int64) Report {
	t.Helper()
	r, err := Write(context.Background(), job.New("test"), f, "", save.Spec{Path: path, Shard: most})
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func names(t *testing.T, dir string) (out []string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		out = append(out, e.Name())
	}
	return out
}

// Shards of any size contain the same delta as one file, even with tied tensors. They can be read by folder, by
// index, or by folder without an index.
func TestShards(t *testing.T) {
	r := seeded(t)
	now, base := trained(r)
	whole := encode(t, now, base)
	want := layOutFile(t, whole)
	for _, most := range []int64{1, 1000, 1 << 40} {
		dir := filepath.Join(t.TempDir(), "a folder")
		rep := write(t, whole, dir+"/", most)
		index := filepath.Join(dir, "delta.safetensors.index.json")
		many := most < 1<<40
		if got := names(t, dir); many != slices.Contains(got, filepath.Base(index)) || many != (len(got) > 1) ||
			len(rep.Files) != len(got) {
			t.Fatalf("at most %d: got the files %v, but the report lists %v", most, got, rep.Files)
		}
		ways := []string{dir, dir + "/"}
		if many {
			ways = append(ways, index, dir)
		}
		for i, way := range ways {
			if i == len(ways)-1 && many {
				if err := os.Remove(index); err != nil {
					t.Fatal(err)
				}
			}
			f, err := Read(context.Background(), way, source.Options{})
			if err != nil {
				t.Fatalf("at most %d, %s: %v", most, way, err)
			}
			if size := f.Size; size != rep.Stored || f.Metadata["step"] != "1" || len(f.Metadata) != 1 {
				t.Errorf("got %d bytes, want %d; metadata %v", size, rep.Stored, f.Metadata)
			}
			if !bytes.Equal(layOutFile(t, &File{Metadata: f.Metadata, Tensors: f.Tensors, ChunkLen: f.ChunkLen}),
				want) {
				t.Errorf("at most %d, %s: a different delta", most, way)
			}
			live := base.clone()
			live.data[len(live.data)-1] = live.data[0]
			if err := applySteps(live, f); err != nil || !live.same(now) {
				t.Errorf("at most %d: %v", most, err)
			}
		}
	}
	runtime.KeepAlive(base)
}

// Files that do not form one complete delta are refused with a typed error: a single shard, a missing shard, a shard
// of another delta (even with the same tensors), a duplicate, two deltas in one folder, and an index that lists a
// missing file.
func TestInconsistentShards(t *testing.T) {
	r := seeded(t)
	now, base := trained(r)
	one := encode(t, now, base)
	two := encode(t, base, now) // the same names and sizes
	shard := func(dir string, k int) string {
		all, _ := filepath.Glob(filepath.Join(dir, "delta-*.safetensors"))
		if len(all) < 3 {
			t.Fatalf("got %d shards, want at least 3", len(all))
		}
		return all[k]
	}
	move := func(from, to string) {
		t.Helper()
		b, err := os.ReadFile(from)
		if err == nil {
			err = os.WriteFile(to, b, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []struct {
		name  string
		spoil func(dir, other string)
		err   error
		says  string
	}{
		{"missing", func(dir, _ string) { _ = os.Remove(shard(dir, 1)) }, errs.ErrNotFound, "-00002-of-"},
		{"missing without an index", func(dir, _ string) {
			_ = os.Remove(shard(dir, 1))
			_ = os.Remove(filepath.Join(dir, "delta.safetensors.index.json"))
		}, errs.ErrFormat, "shards: shard 2 is missing"},
		{"foreign", func(dir, other string) { move(shard(other, 1), shard(dir, 1)) }, errs.ErrFormat, "a different delta"},
		{"twice", func(dir, _ string) { move(shard(dir, 0), shard(dir, 1)) }, errs.ErrFormat, "not in this file"},
		{"twice without an index", func(dir, _ string) {
			move(shard(dir, 0), shard(dir, 1))
			_ = os.Remove(filepath.Join(dir, "delta.safetensors.index.json"))
		}, errs.ErrFormat, "this is shard 1, but so is"},
		{"two deltas", func(dir, _ string) {
			for _, name := range names(t, dir) {
				_ = os.Remove(filepath.Join(dir, name))
			}
			write(t, one, filepath.Join(dir, "a.safetensors"), 0)
			write(t, two, filepath.Join(dir, "b.safetensors"), 0)
		}, errs.ErrArgument, "only one file"},
		{"damaged", func(dir, _ string) {
			b, _ := os.ReadFile(shard(dir, 2))
			b[len(b)-1] ^= 1
			_ = os.WriteFile(shard(dir, 2), b, 0o600)
		}, errs.ErrCorrupt, "-00003-of-"},
	} {
		dir, other := filepath.Join(t.TempDir(), "d"), filepath.Join(t.TempDir(), "o")
		write(t, one, dir+"/", 1)
		write(t, two, other+"/", 1)
		c.spoil(dir, other)
		_, err := Read(context.Background(), dir, source.Options{})
		if !errors.Is(err, c.err) || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v", c.name, err)
		}
	}
	dir := filepath.Join(t.TempDir(), "d")
	write(t, one, dir+"/", 1)
	if _, err := Read(context.Background(), shard(dir, 0), source.Options{}); !errors.Is(err, errs.ErrNotFound) ||
		!strings.Contains(err.Error(), "folder") {
		t.Errorf("only one shard: %v", err)
	}
	for _, text := range []string{"1 of 1 of x", "0 of 3 of 00112233445566778899aabbccddeeff", "4 of 3 of 00112233445566778899aabbccddeeff", "1 of 3", "-1 of 3 of 00112233445566778899aabbccddeeff", "1 of 3 of 00112233445566778899aabbccddeeff "} {
		if err := readMark(&File{Metadata: map[string]string{shardKey: text}}); !errors.Is(err, errs.ErrFormat) {
			t.Errorf("%q: %v", text, err)
		}
	}
	one.Metadata = map[string]string{shardKey: "mine"}
	if _, err := Write(context.Background(), job.New("test"), one, "",
		save.Spec{Path: filepath.Join(dir, "x.safetensors")}); !errors.Is(err, errs.ErrArgument) {
		t.Errorf("a reserved entry: %v", err)
	}
	runtime.KeepAlive([]*model{now, base})
}

// A write that fails or is cancelled keeps the old delta, or leaves no file. A write that succeeds leaves no shard of
// the old delta.
func TestShardsReplaceOthers(t *testing.T) {
	r := seeded(t)
	now, base := trained(r)
	one, two := encode(t, now, base), encode(t, base, now)
	path := filepath.Join(t.TempDir(), "x.safetensors")
	write(t, one, path, 1)
	before := names(t, filepath.Dir(path))
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := Write(ctx, job.New("test"), two, "", save.Spec{Path: path, Shard: 2000}); err == nil {
		t.Error("a cancelled write succeeded")
	}
	if got := names(t, filepath.Dir(path)); !slices.Equal(got, before) {
		t.Errorf("got the files %v, want %v", got, before)
	}
	if f, err := Read(context.Background(), path+".index.json", source.Options{}); err != nil ||
		f.Tensors[0].New != one.Tensors[0].New {
		t.Errorf("the old delta: %v", err)
	}
	write(t, two, path, 1000)
	f, err := Read(context.Background(), filepath.Dir(path), source.Options{})
	if err != nil || f.Tensors[0].New != two.Tensors[0].New {
		t.Errorf("the new delta: %v", err)
	}
	write(t, one, path, 1<<40) // the limit allows a single file
	if got := names(t, filepath.Dir(path)); !slices.Equal(got, []string{"x.safetensors"}) {
		t.Error(got)
	}
	write(t, one, path, 1)
	if _, err := Write(context.Background(), job.New("test"), two, "",
		save.Spec{Path: path}); !errors.Is(err, errs.ErrArgument) {
		t.Errorf("a single file next to an index: %v", err)
	}
	if _, err := Write(context.Background(), job.New("test"), two, "",
		save.Spec{Path: filepath.Dir(path) + "/"}); !errors.Is(err, errs.ErrArgument) {
		t.Errorf("a folder with other weights: %v", err)
	}
	runtime.KeepAlive([]*model{now, base})
}
