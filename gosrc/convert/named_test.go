//go:build !nostores

package convert

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/format"
	"github.com/overwire/overwire/gosrc/internal/atomicfile"
	"github.com/overwire/overwire/gosrc/save"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/source/open"
	"github.com/overwire/overwire/gosrc/source/sourcetest"
	"github.com/overwire/overwire/gosrc/verify"
)

// pipeline makes a folder with several models, a variant and auxiliary files.
func pipeline(t *testing.T) (dir string, in []save.Input) {
	t.Helper()
	dir, in = t.TempDir(), []save.Input{bf16("a", newRand(t), 64, 100), bf16("b", newRand(t), 64, 100)}
	put(t, dir, map[string]string{"model_index.json": "{}", ".hidden": "x", "unet/config.json": "{1}", "vae/config.json": "{2}", "tokenizer/vocab.txt": "words", "empty.txt": ""})
	write(t, save.Spec{Path: filepath.Join(dir, "unet", "model.safetensors"), Shard: 13_000}, in)
	write(t, save.Spec{Path: filepath.Join(dir, "vae", "model.safetensors")}, in[:1])
	write(t, save.Spec{Path: filepath.Join(dir, "vae", "model.fp16.safetensors")}, in[:1])
	return dir, in
}

// tree returns the contents of the files below a folder by name, without hidden files.
func tree(t *testing.T, dir string) map[string]string {
	t.Helper()
	out := map[string]string{}
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || strings.HasPrefix(d.Name(), ".") {
			return err
		}
		rel, _ := filepath.Rel(dir, path)
		b, err := os.ReadFile(path)
		out[rel] = string(b)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func sameTree(t *testing.T, want, got map[string]string) {
	t.Helper()
	for name, text := range want {
		if got[name] != text {
			t.Errorf("%s: %d bytes, want %d", name, len(got[name]), len(text))
		}
	}
	if len(got) != len(want) {
		t.Errorf("%d files, want %d", len(got), len(want))
	}
}

// A folder that is converted to a store and back has the same bytes, including subfolders and auxiliary files. For
// every command that reads it, its URI may end with a slash.
func TestStoredTree(t *testing.T) {
	s := sourcetest.StartS3(t, false)
	opt := format.Access{Options: source.Options{Storage: s.Options()}}
	dir, in := pipeline(t)
	want := tree(t, dir)
	for _, slash := range []string{"", "/"} {
		there := "s3://models/p" + slash
		if rep := convert(t, []string{dir}, there, save.Spec{Compress: true, Storage: opt}); len(rep.Left) != 1 ||
			len(rep.Copied) != 5 {
			t.Errorf("%+v", rep)
		}
		back := filepath.Join(t.TempDir(), "back")
		if rep := convert(t, []string{there}, back, save.Spec{Storage: opt}); len(rep.Copied) != 5 ||
			len(rep.Anew) != 0 {
			t.Errorf("%+v", rep)
		}
		sameTree(t, want, tree(t, back))
		if rep, err := verify.Verify(bg, nil, []string{there}, opt, false); err != nil || len(rep.Files) != 3 {
			t.Errorf("%+v, %v", rep, err)
		}
		if rep, err := verify.Inspect(bg, []string{there + "/unet"}, opt); slash == "" &&
			(err != nil || len(rep.Sources) != 2) {
			t.Errorf("%+v, %v", rep, err)
		}
		// The folder that is being written is not read.
		convert(t, []string{there}, there+"/copies"[len(slash):], save.Spec{Compress: true, Storage: opt})
		if err := os.RemoveAll(filepath.Join(s.Data, "p")); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := Convert(bg, nil, []string{"s3://models/nothing"}, t.TempDir(),
		save.Spec{Storage: opt}); !errors.Is(err, errs.ErrNotFound) {
		t.Error(err)
	}

	// If the output is named as a file, a folder is converted to that single file.
	write(t, save.Spec{Path: "s3://models/m", Storage: opt}, in)
	file := filepath.Join(t.TempDir(), "m.safetensors")
	convert(t, []string{dir + "/unet"}, "s3://models/m2", save.Spec{Storage: opt})
	if rep := convert(t, []string{"s3://models/m2"}, file,
		save.Spec{Storage: opt}); !slices.Equal(rep.Files, []string{file}) || !slices.Equal(rep.Left, []string{"s3://models/m2/config.json"}) {
		t.Errorf("%+v", rep)
	}
	same(t, in, read(t, file))
}

// If converting a tree to an empty folder of a store fails, none of its files are left there. What another program has
// written in the meantime stays, even if it has the bytes of the conversion.
func TestStoredTreeFails(t *testing.T) {
	s := sourcetest.StartS3(t, false)
	direct := source.Options{Storage: s.Options()}
	dir, _ := pipeline(t)
	put(t, dir, map[string]string{"vae/model.safetensors": "no weights"})
	for _, others := range []map[string]string{nil, {"notes.txt": "mine", "unet/config.json": "theirs",
		"tokenizer/vocab.txt": "words"}} {
		var once sync.Once
		p := s.InOrder()
		h := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			p.ServeHTTP(w, r)
			if r.Method == http.MethodPut && strings.HasSuffix(r.URL.Path, "model.fp16.safetensors") {
				once.Do(func() {
					for name, text := range others {
						if err := open.Put(bg, "s3://models/p/"+name, direct, []byte(text), nil, func(error) {}); err != nil {
							t.Error(err)
						}
					}
				})
			}
		}))
		defer h.Close()
		opt := format.Access{Options: source.Options{Storage: s.Options()}}
		opt.Storage["endpoint_url"] = h.URL
		_, err := Convert(bg, nil, []string{dir}, "s3://models/p", save.Spec{Storage: opt})
		if !errors.Is(err, errs.ErrFormat) || strings.Contains(err.Error(), "written before that") {
			t.Error(err)
		}
		if others != nil {
			sameTree(t, others, tree(t, filepath.Join(s.Data, "p")))
		} else if _, err := os.Stat(filepath.Join(s.Data, "p")); !errors.Is(err, fs.ErrNotExist) {
			t.Error(err)
		}
	}
}

// A failed conversion names the objects that it could not remove from a store, and says why.
func TestStoredTreeStays(t *testing.T) {
	s := sourcetest.StartS3(t, false)
	dir, _ := pipeline(t)
	put(t, dir, map[string]string{"vae/model.safetensors": "no weights"})
	p := s.InOrder()
	h := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodDelete && strings.HasSuffix(r.URL.Path, "vocab.txt") {
			w.WriteHeader(http.StatusForbidden)
			return
		}
		p.ServeHTTP(w, r)
	}))
	defer h.Close()
	opt := format.Access{Options: source.Options{Storage: s.Options()}}
	opt.Storage["endpoint_url"] = h.URL
	_, err := Convert(bg, nil, []string{dir}, "s3://models/p", save.Spec{Storage: opt})
	part, ok := errors.AsType[*Partial](err)
	if !ok || !errors.Is(err, errs.ErrFormat) || !strings.Contains(err.Error(), "cannot remove all files: ") ||
		!slices.Equal(part.Files, []string{"s3://models/p/tokenizer/vocab.txt"}) {
		t.Error(err)
	}
	sameTree(t, map[string]string{"tokenizer/vocab.txt": "words"}, tree(t, filepath.Join(s.Data, "p")))
}

// If converting a tree over an earlier one fails, the error names the files that were already replaced.
func TestPartialTree(t *testing.T) {
	dir, _ := pipeline(t)
	dst := filepath.Join(t.TempDir(), "out")
	convert(t, []string{dir}, dst, save.Spec{})
	put(t, dir, map[string]string{"vae/model.safetensors": "no weights"})
	_, err := Convert(bg, nil, []string{dir}, dst, save.Spec{Compress: true})
	var part *Partial
	if !errors.Is(err, errs.ErrFormat) || !errors.As(err, &part) ||
		!slices.Contains(part.Files, filepath.Join(dst, "unet", "config.json")) {
		t.Error(err)
	}
	if !strings.Contains(err.Error(), "written before that") {
		t.Error(err)
	}
}

// renamedFS calls a function after each rename.
type renamedFS struct {
	atomicfile.Disk
	look func(path string)
}

func (f renamedFS) Rename(from, to string) error {
	err := f.Disk.Rename(from, to)
	f.look(to)
	return err
}

func (f renamedFS) RenameNew(from, to string) error {
	err := f.Disk.RenameNew(from, to)
	f.look(to)
	return err
}

// If converting a tree to a new folder fails, all written files are removed, including those of a folder with several
// models. Files that other programs put into the folder in the meantime remain, even if one has replaced a written
// file.
func TestTreeFails(t *testing.T) {
	for _, others := range []map[string]string{nil, {"notes.txt": "mine", "unet/config.json": "theirs"}} {
		dir, _ := pipeline(t)
		put(t, dir, map[string]string{"vae/model.safetensors": "no weights", "vae/deep/er/x.txt": "words"})
		dst := filepath.Join(t.TempDir(), "out")
		isDone := false
		look := func(path string) {
			if !isDone && filepath.Base(path) == "model.fp16.safetensors" {
				isDone = true
				put(t, dst, others)
			}
		}
		_, err := Convert(bg, nil, []string{dir}, dst, save.Spec{FS: renamedFS{look: look}})
		if !errors.Is(err, errs.ErrFormat) || strings.Contains(err.Error(), "written before that") || !isDone {
			t.Error(err, isDone)
		}
		if others != nil {
			sameTree(t, others, tree(t, dst))
		} else if _, err := os.Stat(dst); !errors.Is(err, fs.ErrNotExist) {
			t.Error(err, tree(t, dst))
		}
	}
}

// fakeHub serves one commit of a repository as the Hub does: its file list, and its files only under the commit's hash.
// asked collects the paths of requests.
func fakeHub(t *testing.T, files map[string]string) (opt format.Access, asked *[]string) {
	t.Helper()
	asked = new([]string)
	commit := strings.Repeat("0123456789", 4)
	type sibling struct {
		Name string `json:"rfilename"`
		Size int    `json:"size"`
	}
	var list []sibling
	for name, text := range files {
		list = append(list, sibling{name, len(text)})
	}
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		*asked = append(*asked, r.URL.Path)
		w.Header().Set("X-Repo-Commit", commit)
		name, ok := strings.CutPrefix(r.URL.Path, "/org/name/resolve/"+commit+"/")
		text, there := files[name]
		switch {
		case strings.HasPrefix(r.URL.Path, "/api/models/org/name/revision/"):
			_ = json.NewEncoder(w).Encode(map[string]any{"sha": commit, "siblings": list})
		case ok && there:
			w.Header().Set("ETag", fmt.Sprintf("%q", name))
			http.ServeContent(w, r, "", time.Time{}, bytes.NewReader([]byte(text)))
		default:
			w.WriteHeader(http.StatusNotFound)
		}
	}))
	t.Cleanup(s.Close)
	return format.Access{Options: source.Options{Env: map[string]string{"HF_ENDPOINT": s.URL},
		Storage: map[string]string{"retries": "0"}}}, asked
}

// A Hub repository, or a folder in it, is converted to a folder with all auxiliary files. All files are read from the
// commit that the branch points to when it is listed.
func TestHubTree(t *testing.T) {
	dir, _ := pipeline(t)
	want := tree(t, dir)
	opt, asked := fakeHub(t, want)
	packed := filepath.Join(t.TempDir(), "packed")
	rep := convert(t, []string{"hf://org/name"}, packed, save.Spec{Compress: true, Storage: opt})
	if len(rep.Copied) != 5 || len(rep.Left) != 0 {
		t.Errorf("%+v", rep)
	}
	back := filepath.Join(t.TempDir(), "back")
	convert(t, []string{packed}, back, save.Spec{})
	sameTree(t, want, tree(t, back))
	for _, path := range *asked {
		if strings.Contains(path, "/resolve/main/") {
			t.Errorf("a file of a branch that may have moved: %s", path)
		}
	}
	convert(t, []string{"hf://org/name/vae/"}, back, save.Spec{Storage: opt})
	if got := tree(t, back); got["config.json"] != "{2}" {
		t.Error("the folder's configuration is missing")
	}
	if rep, err := verify.Inspect(bg, []string{"hf://org/name"}, opt); err != nil || len(rep.Sources) != 3 {
		t.Errorf("%+v, %v", rep, err)
	}
}
