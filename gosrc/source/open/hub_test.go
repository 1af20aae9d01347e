package open

import (
	"context"
	"errors"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/source"
)

const commit = "0123456789abcdef0123456789abcdef01234567"

// downloaded creates a cache in the layout of huggingface_hub: one blob, a link to it, and refs.
func downloaded(t *testing.T, data string) (folder string) {
	t.Helper()
	folder = t.TempDir()
	repo := filepath.Join(folder, "models--org--name")
	for path, text := range map[string]string{"blobs/abc": data, "refs/main": commit, "refs/refs/pr/1": commit,
		"refs/bad": "../../x"} {
		path = filepath.Join(repo, path)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	snapshot := filepath.Join(repo, "snapshots", commit)
	if err := os.MkdirAll(snapshot, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("../../blobs/abc", filepath.Join(snapshot, "a.safetensors")); err != nil {
		t.Fatal(err)
	}
	return folder
}

// content opens a URI and reads all of it.
func content(uri string, env map[string]string) (string, error) {
	s, err := With(source.Options{Env: env}).Open(context.Background(), uri)
	if err != nil {
		return "", err
	}
	defer s.Close()
	b := make([]byte, s.Size())
	err = s.ReadAt(context.Background(), b, 0)
	return string(b), err
}

// In offline mode, a file comes from the huggingface_hub cache at the commit that the cache recorded, or is not
// found. No server is asked.
func TestHubOffline(t *testing.T) {
	env := map[string]string{"HF_HUB_CACHE": downloaded(t, "local"), "HF_HUB_OFFLINE": "1",
		"HF_ENDPOINT": "http://127.0.0.1:1"}
	other := map[string]string{"HF_HUB_CACHE": env["HF_HUB_CACHE"], "TRANSFORMERS_OFFLINE": "yes",
		"HF_ENDPOINT": "http://127.0.0.1:1"}
	if got, err := content("hf://org/name/a.safetensors", other); err != nil || got != "local" {
		t.Errorf("TRANSFORMERS_OFFLINE: %q, %v", got, err)
	}
	for uri, found := range map[string]bool{
		"hf://org/name/a.safetensors":                  true,
		"hf://org/name/a.safetensors@main":             true,
		"hf://org/name/a.safetensors@refs/pr/1":        true,
		"hf://org/name/a.safetensors@" + commit:        true,
		"hf://org/name/a.safetensors@bad":              false,
		"hf://org/name/a.safetensors@other":            false,
		"hf://org/name/a.safetensors@../../refs/main":  false,
		"hf://org/name/b.safetensors":                  false,
		"hf://org/name/../../refs/main":                false,
		"hf://datasets/org/name/a.safetensors":         false,
		"hf://org/name2/a.safetensors@" + commit + "0": false,
	} {
		got, err := content(uri, env)
		if found && (err != nil || got != "local") {
			t.Errorf("%s: %q, %v", uri, got, err)
		}
		if !found && !errors.Is(err, errs.ErrNotFound) {
			t.Errorf("%s: %q, %v, want not found", uri, got, err)
		}
	}
}

// In online mode, a file at a named commit is read from the cache without asking. A branch is resolved first,
// and its file is read from the cache if the cache has that commit.
func TestHubCacheFirst(t *testing.T) {
	for _, c := range []struct {
		name, rev, serves, far, want string
		asked                        bool
	}{
		{"commit", "@" + commit, commit, "cloud", "local", false},
		{"branch", "", commit, "cloud", "local", true},
		{"branch that moved on", "", strings.Repeat("f", 40), "cloud", "cloud", true},
		{"cache of another size", "", commit, "longer", "longer", true},
	} {
		t.Run(c.name, func(t *testing.T) {
			var requests atomic.Int64
			s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				requests.Add(1)
				w.Header().Set("X-Repo-Commit", c.serves)
				w.Header().Set("ETag", `"x"`)
				_, _ = io.WriteString(w, c.far)
			}))
			defer s.Close()
			env := map[string]string{"HF_HOME": t.TempDir(), "HF_ENDPOINT": s.URL}
			if err := os.Rename(downloaded(t, "local"), filepath.Join(env["HF_HOME"], "hub")); err != nil {
				t.Fatal(err)
			}
			got, err := content("hf://org/name/a.safetensors"+c.rev, env)
			if err != nil || got != c.want || (requests.Load() > 0) != c.asked {
				t.Errorf("%q, %v after %d requests", got, err, requests.Load())
			}
		})
	}
}

// If the Hub cannot be reached, all files of a load come from the cache at one commit: the commit in the URI
// or, with a notice, the last one that the cache recorded. The Hub is not asked again. A file that is not in
// the cache is not found, and the error names both the cache and the Hub.
func TestHubUnreachable(t *testing.T) {
	source.Notices()
	for _, c := range []struct {
		rev    string
		notice bool
	}{{"", true}, {"@refs/pr/1", true}, {"@" + commit, false}} {
		var asked atomic.Int64
		s := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
			asked.Add(1)
			panic(http.ErrAbortHandler)
		}))
		s.Config.ErrorLog = log.New(io.Discard, "", 0)
		stores := With(source.Options{Env: map[string]string{"HF_HUB_CACHE": downloaded(t, "local"),
			"HF_ENDPOINT": s.URL}, Storage: map[string]string{"retries": "0"}})
		for _, file := range []string{"model.safetensors.index.json", "model.safetensors", "a.safetensors"} {
			src, err := stores.Open(t.Context(), "hf://org/name/"+file+c.rev)
			if file == "a.safetensors" {
				if err != nil || src.Size() != 5 {
					t.Errorf("%s: %v", c.rev, err)
				} else {
					_ = src.Close()
				}
				continue
			}
			if !errors.Is(err, errs.ErrNotFound) || !strings.Contains(err.Error(), "cache") ||
				!strings.Contains(err.Error(), "cannot be reached") {
				t.Errorf("%s%s: %v", file, c.rev, err)
			}
		}
		s.Close()
		if n := asked.Load(); n != 1 {
			t.Errorf("%q: asked %d times", c.rev, n)
		}
		if notices := source.Notices(); (len(notices) == 1 && strings.Contains(notices[0], commit)) != c.notice {
			t.Errorf("%q: %q", c.rev, notices)
		}
	}
}

// If the Hub cannot be reached and the file is not in the cache, the error is that of the Hub. A response that
// the file does not exist or may not be read is also returned unchanged.
func TestHubErrors(t *testing.T) {
	for _, c := range []struct {
		uri    string
		status int
		class  error
	}{
		{"hf://org/other/a.safetensors", 0, errs.ErrIO},
		{"hf://org/name/a.safetensors@unknown", 0, errs.ErrIO},
		{"hf://org/name/a.safetensors@" + strings.Repeat("f", 40), 0, errs.ErrIO},
		{"hf://org/name/a.safetensors", 404, errs.ErrNotFound},
		{"hf://org/name/a.safetensors", 403, errs.ErrPermission},
	} {
		s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if c.status == 0 {
				panic(http.ErrAbortHandler)
			}
			w.WriteHeader(c.status)
		}))
		s.Config.ErrorLog = log.New(io.Discard, "", 0)
		env := map[string]string{"HF_HUB_CACHE": downloaded(t, "local"), "HF_ENDPOINT": s.URL}
		_, err := With(source.Options{Env: env, Storage: map[string]string{"retries": "0"}}).Open(t.Context(), c.uri)
		if !errors.Is(err, c.class) || errs.Class(err) != errs.Class(c.class) {
			t.Errorf("%s: %v", c.uri, err)
		}
		s.Close()
	}
	if texts := source.Notices(); len(texts) != 0 {
		t.Error(texts)
	}
}

// A file that the cache records as missing from a commit is not requested.
func TestHubNoExist(t *testing.T) {
	folder := downloaded(t, "local")
	if err := os.MkdirAll(filepath.Join(folder, "models--org--name", ".no_exist", commit), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(folder, "models--org--name", ".no_exist", commit, "b.json"), nil,
		0o644); err != nil {
		t.Fatal(err)
	}
	env := map[string]string{"HF_HUB_CACHE": folder, "HF_ENDPOINT": "http://127.0.0.1:1"}
	_, err := With(source.Options{Env: env}).Open(t.Context(), "hf://org/name/b.json@"+commit)
	if !errors.Is(err, errs.ErrNotFound) || errors.Is(err, errs.ErrIO) {
		t.Error(err)
	}
}

// Nothing that another user put into a world-writable huggingface_hub cache is trusted: no repository, recorded
// commit, snapshot or blob.
func TestHubPlanted(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root can change the owner of a file")
	}
	for planted, name := range map[string]string{
		"": "", "the repository": "models--org--name", "the snapshots": "models--org--name/snapshots",
		"a file": "models--org--name/snapshots/" + commit + "/a.safetensors", "a blob": "models--org--name/blobs/abc",
		"a ref": "models--org--name/refs/main",
	} {
		folder := downloaded(t, "local")
		if path := filepath.Join(folder, name); name != "" {
			err := errors.Join(os.Lchown(path, 1234, 0), os.Chmod(filepath.Dir(path), 0o777|os.ModeSticky))
			if err != nil {
				t.Fatal(err)
			}
		}
		env := map[string]string{"HF_HUB_CACHE": folder, "HF_HUB_OFFLINE": "1"}
		for _, rev := range []string{"", "@" + commit} {
			isTrusted := planted == "" || planted == "a ref" && rev != ""
			got, err := content("hf://org/name/a.safetensors"+rev, env)
			if isTrusted != (got == "local" && err == nil) || !isTrusted && !errors.Is(err, errs.ErrNotFound) {
				t.Errorf("%s, %q: %q, %v", planted, rev, got, err)
			}
			_, files, err := With(source.Options{Env: env}).Walk(t.Context(), "hf://org/name"+rev)
			if isTrusted != (len(files) == 1 && err == nil) {
				t.Errorf("%s, %q: %v, %v", planted, rev, files, err)
			}
		}
	}
}

// A file list of a commit other than the requested one is refused.
func TestListOfAnotherCommit(t *testing.T) {
	other := strings.Repeat("f", 40)
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.WriteString(w, `{"sha": "`+other+`", "siblings": [{"rfilename": "a.safetensors"}]}`)
	}))
	defer s.Close()
	opt := source.Options{Env: map[string]string{"HF_ENDPOINT": s.URL, "HF_HUB_CACHE": "/none"}}
	for rev, want := range map[string]error{"": nil, "@main": nil, "@" + other: nil, "@" + commit: errs.ErrCorrupt} {
		at, files, err := With(opt).Walk(t.Context(), "hf://org/name"+rev)
		if !errors.Is(err, want) || err == nil && (len(files) != 1 || !strings.HasSuffix(at, other)) {
			t.Errorf("%q: %q, %v, %v", rev, at, files, err)
		}
	}
}
