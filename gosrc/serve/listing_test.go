package serve

import (
	"context"
	"errors"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Folders are listed as JSON for programs and as a page for browsers, with every name escaped. Hidden files,
// links that lead out of the folder and links to folders are not listed.
func TestListing(t *testing.T) {
	dir := t.TempDir()
	odd := `<img src=x onerror="a">&javascript:b`
	for path, text := range map[string]string{"m/a b%.txt": "12345", "m/.secret": "x", "m/" + odd: "", "m/below/c": "", "m/\xff": ""} {
		path = filepath.Join(dir, path)
		err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, []byte(text), 0o600))
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(os.Symlink("/etc/passwd", dir+"/m/out"), os.Symlink("a b%.txt", dir+"/m/in"),
		os.Symlink("..", dir+"/m/circle")); err != nil {
		t.Fatal(err)
	}
	s, err := New(dir, Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	ask := func(path, accept string) (*http.Response, string) {
		req, err := http.NewRequestWithContext(context.Background(), http.MethodGet, s.URL()+path, nil)
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Accept", accept)
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		b, _ := io.ReadAll(resp.Body)
		return resp, string(b)
	}
	if _, top := ask("", "*/*"); !strings.Contains(top, `{"name":"m","type":"directory"`) {
		t.Error(top)
	}
	_, text := ask("m/", "application/json")
	for _, want := range []string{`"name":"a b%.txt","type":"file"`, `"size":5`, `"name":"below","type":"directory"`, `"name":"in"`} {
		if !strings.Contains(text, want) {
			t.Errorf("no %s in %s", want, text)
		}
	}
	resp, page := ask("m", "text/html,*/*;q=0.8")
	if resp.Request.URL.Path != "/m/" || !strings.Contains(page, `href="./a%20b%25.txt"`) || strings.Contains(page, "<img") ||
		resp.Header.Get("Content-Security-Policy") == "" {
		t.Errorf("%s: %s", resp.Request.URL, page)
	}
	for _, hidden := range []string{"secret", `"out"`, ">out<", "circle", "passwd"} {
		if strings.Contains(text+page, hidden) {
			t.Errorf("%s is listed", hidden)
		}
	}
}
