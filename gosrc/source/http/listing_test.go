package http

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/source"
)

// Walk returns the files of a folder and its subfolders from a server's JSON listings. It refuses invalid file names
// and endless folders. Servers with a different kind of listing, or without one, give errs.ErrNotSupported.
func TestWalk(t *testing.T) {
	for name, c := range map[string]struct {
		answers map[string]string // keyed by path; "" means 404
		want    string
		class   error
	}{
		"files and folders": {map[string]string{"/m/": `[{"name":"b","type":"file","size":5},{"name":"a %","type":"directory"},{"name":".x","type":"file"},{"name":"s","type":"socket"}]`,
			"/m/a %/": `[{"name":"c","type":"file"}]`}, "[{a %/c -1} {b 5}]", nil},
		"empty":             {map[string]string{"/m/": `[]`}, "", errs.ErrNotFound},
		"none":              {nil, "", errs.ErrNotSupported},
		"HTML":              {map[string]string{"/m/": `<html>`}, "", errs.ErrNotSupported},
		"an object":         {map[string]string{"/m/": `{"files":[]}`}, "", errs.ErrNotSupported},
		"a parent folder":   {map[string]string{"/m/": `[{"name":"..","type":"directory"}]`}, "", errs.ErrFormat},
		"a path":            {map[string]string{"/m/": `[{"name":"a/b","type":"file"}]`}, "", errs.ErrFormat},
		"an absolute path":  {map[string]string{"/m/": `[{"name":"/etc/passwd","type":"file"}]`}, "", errs.ErrFormat},
		"an endless folder": {map[string]string{"/m/": `[{"name":"m","type":"directory"}]`, "*": ""}, "", errs.ErrNotSupported},
	} {
		s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			text := c.answers[r.URL.Path]
			if _, all := c.answers["*"]; all {
				text = c.answers["/m/"]
			}
			if text == "" {
				http.NotFound(w, r)
				return
			}
			if r.Header.Get("Accept") != "application/json" {
				t.Errorf("%s: Accept: %q", name, r.Header.Get("Accept"))
			}
			w.Header().Set("Content-Type", "application/json")
			if strings.HasPrefix(text, "<") {
				w.Header().Set("Content-Type", "text/html")
			}
			_, _ = w.Write([]byte(text))
		}))
		files, err := Walk(context.Background(), s.URL+"/m/", source.Options{Storage: map[string]string{"header.Accept": "*/*"}})
		s.Close()
		if !errors.Is(err, c.class) || err == nil && fmt.Sprint(files) != c.want {
			t.Errorf("%s: %v, %v", name, files, err)
		}
	}
}
