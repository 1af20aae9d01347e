package open

import (
	"encoding/pem"
	"errors"
	"io"
	"log"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/knob"
	"github.com/overwire/overwire/gosrc/source"
)

// A cache is set by its option, or by the setting with its default folder. If the store cannot be reached, the
// cache returns the last known state, with one notice. An immutable URI is requested once. A response of the
// store takes precedence.
func TestCacheOfAnUnreachableStore(t *testing.T) {
	t.Cleanup(func() { knob.Load(nil) })
	knob.Load(map[string]string{"OVERWIRE_CACHE": "on"})
	source.Notices()
	var requests atomic.Int64
	status := http.StatusOK
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		requests.Add(1)
		switch {
		case status == 0:
			panic(http.ErrAbortHandler)
		case status != http.StatusOK:
			w.WriteHeader(status)
		case strings.HasSuffix(r.URL.Path, "none"):
			w.WriteHeader(http.StatusNotFound)
		default:
			w.Header().Set("ETag", `"x"`)
			_, _ = io.WriteString(w, "data of "+r.URL.Path)
		}
	}))
	s.Config.ErrorLog = log.New(io.Discard, "", 0)
	defer s.Close()
	home := t.TempDir()
	opt := source.Options{Env: map[string]string{"HOME": home, "HF_ENDPOINT": s.URL, "HF_HUB_CACHE": "/none"}, Storage: map[string]string{"retries": "0"}}
	get := func(stores *Stores, uri string) (string, error) {
		s, err := stores.Open(t.Context(), uri)
		if err != nil {
			return "", err
		}
		defer s.Close()
		b := make([]byte, s.Size())
		err = s.ReadAt(t.Context(), b, 0)
		return string(b), err
	}
	pinned := "hf://org/name/model.safetensors@" + commit
	for _, uri := range []string{s.URL + "/a", s.URL + "/b", pinned} {
		if _, err := get(With(opt), uri); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := get(With(opt), s.URL+"/none"); !errors.Is(err, errs.ErrNotFound) {
		t.Fatal(err)
	}
	if list, _ := os.ReadDir(filepath.Join(home, ".cache", "overwire", "objects")); len(list) == 0 {
		t.Fatal("nothing in the default folder")
	}
	requests.Store(0)
	if _, err := get(With(opt), pinned); err != nil || requests.Load() != 0 {
		t.Errorf("a URI with a commit: %v after %d requests", err, requests.Load())
	}
	status = 0
	stores := With(opt)
	for range 2 {
		for _, uri := range []string{s.URL + "/a", s.URL + "/b"} {
			if _, err := get(stores, uri); err != nil {
				t.Error(err)
			}
		}
		if _, err := get(stores, s.URL+"/none"); !errors.Is(err, errs.ErrNotFound) {
			t.Error(err)
		}
	}
	if n := requests.Load(); n != 1 {
		t.Errorf("asked %d times", n)
	}
	if texts := source.Notices(); len(texts) != 1 || !strings.Contains(texts[0], "cannot be reached") {
		t.Errorf("%q", texts)
	}
	for _, uri := range []string{s.URL + "/other", s.URL + "/a?of=another"} {
		if _, err := get(With(opt), uri); !errors.Is(err, errs.ErrIO) {
			t.Errorf("%s: %v", uri, err)
		}
	}
	elsewhere := opt
	elsewhere.Env = maps.Clone(opt.Env)
	elsewhere.Env["HF_ENDPOINT"] = "http://127.0.0.1:1"
	if _, err := get(With(elsewhere), pinned); !errors.Is(err, errs.ErrIO) {
		t.Errorf("an object of another hub: %v", err)
	}
	without := opt
	without.Storage = map[string]string{"retries": "0", "cache": ""}
	if _, err := get(With(without), s.URL+"/a"); !errors.Is(err, errs.ErrIO) {
		t.Errorf("cache = \"\": %v", err)
	}
	status = http.StatusForbidden
	if _, err := get(With(opt), s.URL+"/a"); !errors.Is(err, errs.ErrPermission) {
		t.Error(err)
	}
}

// Bytes from one store are never returned for another store with the same ETag, size and date: a mirror, a server
// without a certificate check, a different virtual host.
func TestCacheOfAnotherStore(t *testing.T) {
	answer := func(text string) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("ETag", `"x"`)
			_, _ = io.WriteString(w, map[bool]string{true: "other", false: text}[r.Host == "other.test"])
		}
	}
	var current atomic.Value // for the TLS server
	forged, right := httptest.NewServer(answer("false")), httptest.NewServer(answer("right"))
	secure := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		current.Load().(http.HandlerFunc)(w, r)
	}))
	defer forged.Close()
	defer right.Close()
	defer secure.Close()
	authority := filepath.Join(t.TempDir(), "authority")
	if err := os.WriteFile(authority, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE",
		Bytes: secure.Certificate().Raw}), 0o600); err != nil {
		t.Fatal(err)
	}
	hub := func(endpoint string) map[string]string {
		return map[string]string{"HF_ENDPOINT": endpoint, "HF_HUB_CACHE": "/none"}
	}
	folder := t.TempDir()
	for _, one := range []struct {
		uri          string
		env, storage map[string]string
		want         string
	}{
		{"hf://org/name/model.safetensors@" + commit, hub(forged.URL), nil, "false"},
		{"hf://org/name/model.safetensors@" + commit, hub(right.URL), nil, "right"},
		{"hf://org/name/model.safetensors", hub(forged.URL), nil, "false"},
		{"hf://org/name/model.safetensors", hub(right.URL), nil, "right"},
		{secure.URL + "/a", nil, map[string]string{"insecure": "true"}, "false"},
		{secure.URL + "/a", nil, map[string]string{"cacert": authority}, "right"},
		{right.URL + "/a", nil, nil, "right"},
		{right.URL + "/a", nil, map[string]string{"header.host": "other.test"}, "other"},
	} {
		current.Store(answer(one.want))
		storage := map[string]string{"cache": folder}
		maps.Copy(storage, one.storage)
		s, err := With(source.Options{Env: one.env, Storage: storage}).Open(t.Context(), one.uri)
		if err != nil {
			t.Fatalf("%s: %v", one.uri, err)
		}
		text := make([]byte, s.Size())
		if err := s.ReadAt(t.Context(), text, 0); err != nil || string(text) != one.want {
			t.Errorf("%s: %q instead of %q, %v", one.uri, text, one.want, err)
		}
		_ = s.Close()
	}
}

// A response that an object does not exist is never final, even at a commit: the store is asked again. Its last
// response is used if it cannot be reached.
func TestAbsentIsAskedAgain(t *testing.T) {
	source.Notices()
	var status atomic.Int64
	status.Store(http.StatusNotFound)
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch n := int(status.Load()); n {
		case 0:
			panic(http.ErrAbortHandler)
		case http.StatusOK:
			w.Header().Set("ETag", `"x"`)
			_, _ = io.WriteString(w, "data")
		default:
			w.WriteHeader(n)
		}
	}))
	s.Config.ErrorLog = log.New(io.Discard, "", 0)
	defer s.Close()
	opt := source.Options{
		Env:     map[string]string{"HF_ENDPOINT": s.URL, "HF_HUB_CACHE": "/none"},
		Storage: map[string]string{"retries": "0", "cache": t.TempDir()},
	}
	pinned := "hf://org/name/model.safetensors@" + commit
	for _, one := range []struct {
		status int
		want   error
	}{{http.StatusNotFound, errs.ErrNotFound}, {0, errs.ErrNotFound}, {http.StatusOK, nil}, {0, nil}} {
		status.Store(int64(one.status))
		s, err := With(opt).Open(t.Context(), pinned)
		if !errors.Is(err, one.want) {
			t.Fatalf("status %d: %v", one.status, err)
		}
		if err == nil {
			_ = s.Close()
		}
	}
}

// Only URIs that always refer to the same bytes are read from a cache without asking the store.
func TestImmutable(t *testing.T) {
	for uri, want := range map[string]bool{
		"hf://org/name/a@" + commit: true, "hf://org/name/a@main": false, "hf://org/name/a": false,
		"s3://b/a?versionId=3sL4kqtJlcpXroDTDmJ": true, "s3://b/a?versionId=null": false, "s3://b/a?versionId=": false, "s3://b/a": false,
		"https://x/a?versionId=3sL4": false,
	} {
		if isImmutable(uri) != want {
			t.Errorf("%s: %v", uri, !want)
		}
	}
}
