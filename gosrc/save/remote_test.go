//go:build !nostores

package save_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/overwire/overwire/gosrc/convert"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/format"
	"github.com/overwire/overwire/gosrc/internal/modelfiles"
	"github.com/overwire/overwire/gosrc/job"
	"github.com/overwire/overwire/gosrc/save"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/source/open"
	"github.com/overwire/overwire/gosrc/source/sourcetest"
	"github.com/overwire/overwire/gosrc/verify"
)

// tiled returns a tensor with many rows of 4096 elements that repeat, because that is fast to make.
func tiled(name string, r *rand.Rand, rows int) save.Input {
	in := bf16(name, r, 20, 4096)
	in.Data = bytes.Repeat(in.Data, rows/20)
	in.Shape[0] = int64(rows)
	return in
}

// object returns the content of an object.
func object(t testing.TB, uri string, opt format.Access) []byte {
	t.Helper()
	s, err := open.With(opt.Options).Open(bg, uri)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	b := make([]byte, s.Size())
	if err := s.ReadAt(bg, b, 0); err != nil {
		t.Fatal(err)
	}
	return b
}

// A save to a store writes the same bytes as to disk: small objects, objects in many parts, plain and compressed.
func TestRemoteSavesEqualLocalOnes(t *testing.T) {
	s3 := sourcetest.StartS3(t, false)
	red := sourcetest.StartRedis(t, false)
	r := newRand(t)
	big := []save.Input{tiled("w", r, 2200), bf16("v", r, 7, 33), {Name: "n", DType: 0, Shape: []int64{0}, Data: nil}}
	big[2].DType = big[0].DType
	for _, store := range []struct {
		base string
		opt  format.Access
	}{
		{"s3://models/dir", format.Access{Options: source.Options{Storage: s3.Options()}}},
		{"redis://" + red.Addr + "/dir",
			format.Access{Options: source.Options{Storage: map[string]string{"password": sourcetest.RedisPassword}}}},
	} {
		for name, in := range map[string][]save.Input{"big": big, "small": big[1:], "none": nil} {
			specs := []save.Spec{{}, {Compress: true}, {Compress: true, Parts: 8, ChunkBytes: 64 << 10}}
			if name == "big" && testing.Short() {
				specs = specs[1:2]
			}
			for _, spec := range specs {
				near := filepath.Join(t.TempDir(), "m.safetensors")
				spec.Metadata = map[string]string{"long": strings.Repeat("x", 70_000)}
				spec.Path = near
				want := write(t, spec, in)
				spec.Path, spec.Storage = store.base+"/m.safetensors", store.opt
				got := write(t, spec, in)
				b, err := os.ReadFile(near)
				if err != nil {
					t.Fatal(err)
				}
				if far := object(t, spec.Path, store.opt); !bytes.Equal(far, b) {
					t.Fatalf("%s %s: %d bytes in the store and %d on disk differ", store.base, name, len(far), len(b))
				}
				if got.BytesOut != want.BytesOut || got.Ratio != want.Ratio || len(got.Files) != 1 ||
					got.Files[0] != spec.Path {
					t.Fatalf("%+v, here %+v", got, want)
				}
				if _, err := verify.Verify(bg, nil, []string{spec.Path}, store.opt, false); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
}

// When shards are saved to a store, the index is written last. A new set replaces an old one and removes its files, but
// no others.
func TestRemoteShards(t *testing.T) {
	s := sourcetest.StartS3(t, false)
	opt := format.Access{Options: source.Options{Storage: s.Options()}}
	r := newRand(t)
	keep := filepath.Join(s.Data, "m", "other-00001-of-00002.safetensors")
	if err := os.MkdirAll(filepath.Dir(keep), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(keep, []byte("of another program"), 0o644); err != nil {
		t.Fatal(err)
	}
	var in []save.Input
	for _, n := range []string{"a", "b", "c"} {
		in = append(in, bf16(n, r, 64, 100))
	}
	names := func() string {
		found, err := open.List(bg, "s3://models/m/", opt.Options)
		if err != nil {
			t.Fatal(err)
		}
		for i := range found {
			found[i] = modelfiles.WithMark(strings.TrimPrefix(found[i], "s3://models/m/"), "")
		}
		return strings.Join(found, " ")
	}
	other := " other-00001-of-00002.safetensors"
	for _, c := range []struct {
		shard int64
		want  string
	}{
		{26_000, "w-00001-of-00002.safetensors w-00002-of-00002.safetensors w.safetensors.index.json"},
		{30_000, "w-00001-of-00002.safetensors w-00002-of-00002.safetensors w.safetensors.index.json"},
		{13_000, "w-00001-of-00003.safetensors w-00002-of-00003.safetensors w-00003-of-00003.safetensors w.safetensors.index.json"},
		{1 << 30, "w.safetensors"},
		{13_000, "w-00001-of-00003.safetensors w-00002-of-00003.safetensors w-00003-of-00003.safetensors w.safetensors.index.json"},
	} {
		rep := write(t, save.Spec{Path: "s3://models/m/w.safetensors", Shard: c.shard, Compress: true, Storage: opt}, in)
		if got := names(); got != strings.TrimSpace(other+" "+c.want) {
			t.Fatalf("shards of %d: %s", c.shard, got)
		}
		if last := rep.Files[len(rep.Files)-1]; len(rep.Files) > 1 && !strings.HasSuffix(last, ".index.json") {
			t.Fatal(rep.Files)
		}
	}
}

// If any request fails, or the caller cancels, the store keeps the old model and nothing of the new one.
func TestRemoteFailures(t *testing.T) {
	s := sourcetest.StartS3(t, false)
	direct := format.Access{Options: source.Options{Storage: s.Options()}}
	in := []save.Input{tiled("w", newRand(t), 2200)}
	path := "s3://models/m.safetensors"
	write(t, save.Spec{Path: path, Storage: direct}, in[:0])
	old := object(t, path, direct)
	var fail, seen atomic.Int64
	p := s.InOrder()
	h := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodDelete && seen.Add(1) == fail.Load() {
			_, _ = io.Copy(io.Discard, r.Body)
			w.WriteHeader(http.StatusInternalServerError)
			return
		}
		p.ServeHTTP(w, r)
	}))
	t.Cleanup(h.Close)
	opt := format.Access{Options: source.Options{Storage: s.Options()}}
	opt.Storage["endpoint_url"] = h.URL
	unchanged := func(what string, err error, class error) {
		t.Helper()
		if !errors.Is(err, class) || !strings.Contains(err.Error(), path) {
			t.Fatalf("%s: %v", what, err)
		}
		if !bytes.Equal(object(t, path, direct), old) {
			t.Fatalf("%s: the old model is gone", what)
		}
		if left, _ := filepath.Glob(filepath.Join(s.Data, ".sgwtmp", "multipart", "*", "*")); len(left) != 0 {
			more, _ := filepath.Glob(left[0] + "/*")
			t.Fatalf("%s %d: parts are left: %v %v", what, fail.Load(), left, more)
		}
	}
	requests := int64(1)
	for ; ; requests++ {
		seen.Store(0)
		fail.Store(requests)
		_, err := save.Write(bg, nil, save.Spec{Path: path, Storage: opt}, in)
		if seen.Load() < requests {
			if err != nil {
				t.Fatal(err)
			}
			break
		}
		unchanged("request failed", err, errs.ErrIO)
	}
	if requests < 6 { // create, 3 or more parts, complete
		t.Fatalf("%d requests were failed in turn", requests-1)
	}
	t.Logf("%d requests failed in turn", requests-1)
	write(t, save.Spec{Path: path, Storage: direct}, in[:0])
	ctx, cancel := context.WithCancelCause(bg)
	j := job.New("save")
	fail.Store(0)
	go func() {
		for j.Bytes.Load() == 0 {
			select {
			case <-ctx.Done():
				return
			default:
			}
		}
		cancel(errs.ErrCancelled)
	}()
	_, err := save.Write(ctx, j, save.Spec{Path: path, Storage: opt}, in)
	cancel(nil)
	unchanged("cancelled", err, errs.ErrCancelled)
}

// If the index cannot be published, the shards that were published before it are removed, except those that another
// program has replaced.
func TestRemoteShardsUndone(t *testing.T) {
	s := sourcetest.StartS3(t, false)
	direct := source.Options{Storage: s.Options()}
	p := s.InOrder()
	replaced := "s3://models/m/w-00002-of-00003.safetensors"
	h := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodPut && strings.HasSuffix(r.URL.Path, ".index.json") {
			if err := open.Put(bg, replaced, direct, []byte("theirs"), nil, func(error) {}); err != nil {
				t.Error(err)
			}
			w.WriteHeader(http.StatusForbidden)
			return
		}
		p.ServeHTTP(w, r)
	}))
	t.Cleanup(h.Close)
	opt := format.Access{Options: source.Options{Storage: s.Options()}}
	opt.Storage["endpoint_url"] = h.URL
	r := newRand(t)
	in := []save.Input{bf16("a", r, 64, 100), bf16("b", r, 64, 100), bf16("c", r, 64, 100)}
	_, err := save.Write(bg, nil, save.Spec{Path: "s3://models/m/w.safetensors", Shard: 13_000, Storage: opt}, in)
	if !errors.Is(err, errs.ErrPermission) {
		t.Fatal(err)
	}
	left, err := open.List(bg, "s3://models/m/", direct)
	if err != nil || len(left) != 1 || left[0] != replaced {
		t.Error(left, err)
	}
}

// Convert reads from one store and writes to another, including folders.
func TestRemoteConvert(t *testing.T) {
	s := sourcetest.StartS3(t, false)
	opt := format.Access{Options: source.Options{Storage: s.Options()}}
	in := []save.Input{bf16("a", newRand(t), 64, 100), bf16("b", newRand(t), 64, 100)}
	dir := t.TempDir()
	write(t, save.Spec{Path: filepath.Join(dir, "w.safetensors"), Shard: 13_000}, in)
	if err := os.WriteFile(filepath.Join(dir, "config.json"), []byte("{}"), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := convert.Convert(bg, nil, []string{dir}, "s3://models/c/", save.Spec{Compress: true, Storage: opt}); err != nil {
		t.Fatal(err)
	}
	if string(object(t, "s3://models/c/config.json", opt)) != "{}" {
		t.Fatal("the auxiliary file differs")
	}
	back := filepath.Join(t.TempDir(), "back.safetensors")
	src := []string{"s3://models/c/w-00001-of-00002.safetensors", "s3://models/c/w-00002-of-00002.safetensors"}
	if _, err := convert.Convert(bg, nil, src, back, save.Spec{Storage: opt}); err != nil {
		t.Fatal(err)
	}
	same(t, in, read(t, back))
	if _, err := convert.Convert(bg, nil, []string{back}, "s3://models/c/",
		save.Spec{Storage: opt}); !errors.Is(err, errs.ErrArgument) {
		t.Error("a folder that contains other weights:", err)
	}
}

// If the store has the index but its answer is lost, the save does not remove the shards that the index lists.
func TestRemoteIndexWithoutAnAnswer(t *testing.T) {
	for _, isCancelled := range []bool{false, true} {
		s := sourcetest.StartS3(t, false)
		order := s.InOrder()
		ctx, cancel := context.WithCancelCause(bg)
		front := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.Method != http.MethodPut || !strings.HasSuffix(r.URL.Path, ".index.json") {
				order.ServeHTTP(w, r)
				return
			}
			order.ServeHTTP(httptest.NewRecorder(), r)
			if isCancelled {
				cancel(errs.ErrCancelled)
			}
			w.WriteHeader(http.StatusInternalServerError)
		}))
		spec := save.Spec{Path: "s3://models/m/w.safetensors", Shard: 13_000}
		spec.Storage = format.Access{Options: source.Options{Storage: s.Options()}}
		r := newRand(t)
		in := []save.Input{bf16("a", r, 64, 100), bf16("b", r, 64, 100), bf16("c", r, 64, 100)}
		if _, err := save.Write(bg, nil, spec, in); err != nil {
			t.Fatal(err)
		}
		spec.Storage.Storage = s.Options()
		spec.Storage.Storage["endpoint_url"] = front.URL
		if _, err := save.Write(ctx, nil, spec, in); err != nil && !isCancelled {
			t.Error(err)
		}
		options := source.Options{Storage: s.Options()}
		objects, err := open.List(bg, "s3://models/m/", options)
		if err != nil {
			t.Fatal(err)
		}
		index := string(object(t, "s3://models/m/w.safetensors.index.json", format.Access{Options: options}))
		var shards int
		for _, name := range strings.Split(index, `"`) {
			if !strings.HasSuffix(name, ".safetensors") {
				continue
			}
			shards++
			if !slices.ContainsFunc(objects, func(uri string) bool { return strings.HasSuffix(uri, name) }) {
				t.Errorf("cancelled: %t: the index lists %s, which is gone", isCancelled, name)
			}
		}
		if shards == 0 {
			t.Error(index)
		}
		front.Close()
		cancel(nil)
	}
}
