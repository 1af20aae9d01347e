package http

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/source"
)

// Opening hf:// requests the file at its revision from the endpoint, with the user's token.
func TestHub(t *testing.T) {
	data := random(1000)
	var seen sync.Map
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		seen.Store(r.URL.EscapedPath(), r.Header.Get("Authorization"))
		_, _ = w.Write(data)
	}))
	defer s.Close()
	home := t.TempDir()
	if err := os.WriteFile(filepath.Join(home, "token"), []byte("from-file\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	other := filepath.Join(t.TempDir(), "other")
	if err := os.WriteFile(other, []byte(" from-path\r\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for uri, c := range map[string]struct {
		path, auth string
		env        map[string]string
		token      string
	}{
		"hf://org/name/a b.safetensors":      {"/org/name/resolve/main/a%20b.safetensors", "", nil, ""},
		"hf://org/name/d/x.json@refs/pr/1":   {"/org/name/resolve/refs%2Fpr%2F1/d/x.json", "Bearer from-env", map[string]string{"HF_TOKEN": "from-env"}, ""},
		"hf://gpt2/model.safetensors@abc":    {"/gpt2/resolve/abc/model.safetensors", "Bearer from-file", map[string]string{"HF_HOME": home}, ""},
		"hf://org/name/1@feature%2Fx":        {"/org/name/resolve/feature%2Fx/1", "Bearer old", map[string]string{"HUGGING_FACE_HUB_TOKEN": "old"}, ""},
		"hf://org/name/2":                    {"/org/name/resolve/main/2", "Bearer from-path", map[string]string{"HF_TOKEN_PATH": other, "HF_HOME": home}, ""},
		"hf://org/name/3":                    {"/org/name/resolve/main/3", "", map[string]string{"HF_HUB_DISABLE_IMPLICIT_TOKEN": "on", "HF_TOKEN": "x", "HF_HOME": home}, ""},
		"hf://org/name/4":                    {"/org/name/resolve/main/4", "Bearer given", map[string]string{"HF_HUB_DISABLE_IMPLICIT_TOKEN": "1"}, "given"},
		"hf://org/name/5":                    {"/org/name/resolve/main/5", "Bearer new", map[string]string{"HF_TOKEN": "new", "HUGGING_FACE_HUB_TOKEN": "old", "HF_TOKEN_PATH": other}, ""},
		"hf://datasets/org/name/x.json@main": {"/datasets/org/name/resolve/main/x.json", "Bearer given", map[string]string{"HF_TOKEN": "from-env"}, "given"},
	} {
		env := map[string]string{"HF_ENDPOINT": s.URL + "/"}
		maps.Copy(env, c.env)
		storage := map[string]string{}
		if c.token != "" {
			storage["token"] = c.token
		}
		src, err := new(Hub).Open(context.Background(), uri, source.Options{Env: env, Storage: storage})
		if err != nil {
			t.Errorf("%s: %v", uri, err)
			continue
		}
		src.Close()
		if auth, ok := seen.Load(c.path); !ok || auth != c.auth {
			t.Errorf("%s: %v with %v", uri, ok, auth)
		}
	}
}

// A moving hub serves a branch that moves to another commit after some responses. Each commit has its own
// bytes. Large files are in a separate store.
func moving(t *testing.T, after int64, names bool) (endpoint string, at func(commit int) []byte) {
	t.Helper()
	at = func(commit int) []byte { return bytes.Repeat([]byte{byte('a' + commit)}, 600_000) }
	sha := func(commit int64) string { return fmt.Sprintf("%040x", commit) }
	body := func(w http.ResponseWriter, r *http.Request, commit int64, file string) {
		w.Header().Set("ETag", fmt.Sprintf(`"%d-%s"`, commit, file))
		http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(at(int(commit))))
	}
	store := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var commit int64
		fmt.Sscan(r.URL.Query().Get("commit"), &commit)
		body(w, r, commit, r.URL.Path)
	}))
	t.Cleanup(store.Close)
	var answers atomic.Int64
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		rev, file, _ := strings.Cut(strings.TrimPrefix(r.URL.Path, "/org/name/resolve/"), "/")
		commit := int64(-1)
		switch n := answers.Add(1); {
		case rev == "main" && n <= after:
			commit = 1
		case rev == "main":
			commit = 2
		default:
			for c := range int64(3) {
				if rev == sha(c) {
					commit = c
				}
			}
		}
		if commit < 0 {
			w.WriteHeader(404)
			return
		}
		if names {
			w.Header().Set("X-Repo-Commit", sha(commit))
		}
		switch {
		case strings.HasPrefix(file, "none"):
			w.WriteHeader(404)
		case strings.HasPrefix(file, "lfs"):
			http.Redirect(w, r, fmt.Sprintf("%s/%s?commit=%d", store.URL, file, commit), http.StatusFound)
		case strings.HasPrefix(file, "same"): // within the hub, as for small files
			http.Redirect(w, r, "/org/name/resolve/"+sha(commit)+"/"+strings.TrimPrefix(file, "same"), http.StatusTemporaryRedirect)
		default:
			body(w, r, commit, file)
		}
	}))
	t.Cleanup(s.Close)
	return s.URL, at
}

// A branch that moves between two files of a load, or between two ranges of a file, has no effect: all files
// come from the commit with which the load began.
func TestMovingBranch(t *testing.T) {
	for after := range int64(6) {
		for _, files := range [][]string{
			{"index", "a", "b"}, {"index", "lfs-a", "lfs-b"}, {"lfs-a", "lfs-b", "c"}, {"none", "a", "lfs-b"}, {"same-a", "lfs-b", "c"},
		} {
			endpoint, at := moving(t, after+1, true)
			opt := source.Options{Env: map[string]string{"HF_ENDPOINT": endpoint}}
			var hub Hub
			for _, f := range files {
				s, err := hub.Open(context.Background(), "hf://org/name/"+f, opt)
				if f == "none" && errors.Is(err, errs.ErrNotFound) {
					continue
				}
				if err != nil {
					t.Fatal(err)
				}
				p := make([]byte, s.Size())
				if err := s.ReadAt(context.Background(), p, 0); err != nil || !bytes.Equal(p, at(1)) {
					t.Errorf("%v, moved after %d: %s is from commit %c: %v", files, after+1, f, p[0], err)
				}
				s.Close()
			}
		}
	}
	isSettled(t)
}

// Files that are opened in parallel also come from one commit, even if the branch moves. Each load resolves the
// branch again.
func TestMovingBranchAtOnce(t *testing.T) {
	for after := range int64(4) {
		endpoint, at := moving(t, after, true)
		opt := source.Options{Env: map[string]string{"HF_ENDPOINT": endpoint}}
		var hub Hub
		first := make(chan byte, 8)
		for i := range 8 {
			go func() {
				s, err := hub.Open(context.Background(), fmt.Sprintf("hf://org/name/lfs-%d@main", i), opt)
				p := []byte{0}
				if err == nil {
					err = s.ReadAt(context.Background(), p, 500_000)
					s.Close()
				}
				if err != nil {
					t.Error(err)
				}
				first <- p[0]
			}()
		}
		one := <-first
		for range 7 {
			if b := <-first; b != one {
				t.Errorf("moved after %d: %c and %c", after, one, b)
			}
		}
		s, err := new(Hub).Open(context.Background(), "hf://org/name/a", opt)
		if err != nil {
			t.Fatal(err)
		}
		p := make([]byte, 10)
		if err := s.ReadAt(context.Background(), p, 0); err != nil || p[0] != at(2)[0] {
			t.Errorf("the next load: %q %v", p, err)
		}
		s.Close()
	}
}

// A response from a commit other than the requested one gives an error. A response that names no commit can be read.
func TestCommits(t *testing.T) {
	endpoint, at := moving(t, 100, false)
	opt := source.Options{Env: map[string]string{"HF_ENDPOINT": endpoint}}
	var hub Hub
	for _, f := range []string{"a", "lfs-b"} {
		s, err := hub.Open(context.Background(), "hf://org/name/"+f, opt)
		if err != nil {
			t.Fatal(err)
		}
		p := make([]byte, 10)
		if err := s.ReadAt(context.Background(), p, 400_000); err != nil || p[0] != at(1)[0] {
			t.Errorf("%q %v", p, err)
		}
		s.Close()
	}
	var n atomic.Int64
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("X-Repo-Commit", fmt.Sprintf("%040x", n.Add(1)))
		w.Header().Set("ETag", `"e"`)
		http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(make([]byte, 1000)))
	}))
	defer s.Close()
	opt.Env["HF_ENDPOINT"] = s.URL
	src, err := hub.Open(context.Background(), "hf://org/other/a", opt)
	if err != nil {
		t.Fatal(err)
	}
	src.Close()
	if _, err := hub.Open(context.Background(), "hf://org/other/b", opt); !errors.Is(err, errs.ErrCorrupt) {
		t.Errorf("%v", err)
	}
	if _, err := hub.Open(context.Background(), "hf://org/other/b@"+fmt.Sprintf("%040x", 77), opt); !errors.Is(err, errs.ErrCorrupt) {
		t.Errorf("%v", err)
	}
}
