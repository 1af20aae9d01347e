package source

import (
	"errors"
	"path/filepath"
	"strings"
	"testing"

	"github.com/overwire/overwire/gosrc/errs"
)

func TestURIs(t *testing.T) {
	for _, c := range []struct {
		uri    string
		folder bool
		beside string // for "b c"
	}{
		{"https://h/x/a.json", false, "https://h/x/b%20c"},
		{"https://h/x/?sig=1/2", true, "https://h/x/b%20c?sig=1/2"},
		{"https://h/x/a.json?sig=1/2#f", false, "https://h/x/b%20c?sig=1/2#f"},
		{"https://u:p?q@h/x/a.json", false, "https://u:p?q@h/x/b%20c"},
		{"https://h/x/a?at=@/y", false, "https://h/x/b%20c?at=@/y"},
		{"s3://bucket/p?q/", true, "s3://bucket/p?q/b c"},
		{"s3://bucket/p/a#1", false, "s3://bucket/p/b c"},
		{"hf://org/name", true, "hf://org/name/b c"},
		{"hf://org/name@v1", true, "hf://org/name/b c@v1"},
		{"hf://org/name/dir/a.json@refs/pr/3", false, "hf://org/name/dir/b c@refs/pr/3"},
		{"hf://org/name@refs/pr/3/dir/a.json", false, "hf://org/name/dir/b c@refs/pr/3"},
		{"hf://gpt2/model.safetensors", false, "hf://gpt2/b c"},
		{"hf://gpt2@main", true, "hf://gpt2/b c@main"},
		{"hf://datasets/org/name/x/", true, "hf://datasets/org/name/x/b c"},
	} {
		if got := Folder(c.uri); got != c.folder {
			t.Errorf("%s: folder %v", c.uri, got)
		}
		if got := Beside(c.uri, "b c"); got != c.beside {
			t.Errorf("beside %s: %s, want %s", c.uri, got, c.beside)
		}
	}
	for uri, want := range map[string]string{
		"https://h/x/my%20a.json?s=1": "my a.json", "https://h/x/a%2fb": "a%2fb", "https://h/x/100%": "100%", "s3://b/my%20a": "my%20a",
		"hf://org/name/d/a.pkl@v1": "a.pkl", "hf://org/name@v1/d/a.pkl": "a.pkl", "https://h/x/": "",
	} {
		if got := Name(uri); got != want {
			t.Errorf("name of %s: %q", uri, got)
		}
		if got := Beside(uri, "nya/é #1"); !strings.HasSuffix(Path(got), map[bool]string{true: "/nya/%C3%A9%20%231", false: "/nya/é #1"}[isWeb(uri)]) {
			t.Errorf("Beside %s with a folder: %s", uri, got)
		}
	}
	for uri, want := range map[string]bool{"/x": false, "x.y": false, "file:///x": false, "FILE://x": false, "http://x": true, "./a://b": false} {
		if Remote(uri) != want {
			t.Errorf("%s: %v", uri, !want)
		}
	}
}

// LocationOf returns the same results as the separate functions.
func TestLocationOf(t *testing.T) {
	for _, want := range []Location{
		{URI: "/x/a b", Path: "/x/a b"},
		{URI: "file:///x/a%20b", Scheme: "file", Path: "/x/a b"},
		{URI: "file:///x?y", Scheme: "file", Path: "file:///x?y"}, // opening it reports the error
		{URI: "S3://bucket", Scheme: "s3", Path: "S3://bucket", Remote: true, Name: "bucket", Folder: true, Directory: "S3://bucket/"},
		{URI: "https://h/x/a%20b.json?s=1", Scheme: "https", Path: "https://h/x/a%20b.json", Remote: true, Name: "a b.json",
			Directory: "https://h/x/a%20b.json/?s=1"},
		{URI: "hf://org/name@v1", Scheme: "hf", Path: "hf://org/name", Remote: true, Name: "name", Folder: true,
			Directory: "hf://org/name@v1"},
	} {
		if got := LocationOf(want.URI); got != want {
			t.Errorf("%s:\n got %+v\nwant %+v", want.URI, got, want)
		}
	}
}

func TestFilePath(t *testing.T) {
	// FilePath decodes every escape of a file:// URI. It refuses URIs that other readers would resolve to
	// different files.
	for uri, want := range map[string]string{
		"file:///a/b": "/a/b", "FILE:///a%20b": "/a b", "file://localhost/x": "/x", "file:///caf%E9": "/caf\xe9", "file:///%E2%82": "/\xe2\x82",
		"file:///caf\xe9": "/caf\xe9", "file:///caf%EF%BF%BD": "/caf\ufffd", "file:///a%3Fb%23c%25": "/a?b#c%", "file:///a%0Ab": "/a\nb", "file:///a+b;c": "/a+b;c",
	} {
		if got, err := FilePath(uri); err != nil || got != want {
			t.Errorf("%q: %q, %v", uri, got, err)
		}
	}
	for _, uri := range []string{"file:///a?b", "file:///a#b", "file:///a?", "file:///a#", "file://host/x", "file://", "file:///a%00b", "file:///%zz", "file:///a%2"} {
		if got, err := FilePath(uri); !errors.Is(err, errs.ErrArgument) {
			t.Errorf("%q: %q, %v", uri, got, err)
		}
	}
}

// Escapes in a revision are decoded once, and formatting a parsed URI preserves its meaning.
func TestRevisions(t *testing.T) {
	for uri, want := range map[string]HF{
		"hf://o/n@feature%2Fx/file":       {"o/n", "feature/x", "file"},
		"hf://o/n@feature%2Fx":            {"o/n", "feature/x", ""},
		"hf://o/n/d/file@feature/x":       {"o/n", "feature/x", "d/file"},
		"hf://o/n/file@refs%2Fpr%2F1":     {"o/n", "refs/pr/1", "file"},
		"hf://o/n@refs%2Fpr%2F1/file":     {"o/n", "refs/pr/1", "file"},
		"hf://o/n@a%252Fb/file":           {"o/n", "a%2Fb", "file"},
		"hf://o/n@100%/file":              {"o/n", "100%", "file"},
		"hf://o/n@refs/convert/parquet/f": {"o/n", "refs/convert/parquet", "f"},
	} {
		got, _ := ParseHF(uri)
		if again, _ := ParseHF(got.String()); got != want || again != want {
			t.Errorf("%s: %+v, %s, %+v", uri, got, got, again)
		}
		if beside, _ := ParseHF(Beside(uri, "g")); beside.Rev != want.Rev {
			t.Errorf("beside %s: %+v", uri, beside)
		}
	}
}

// An escaped path matches only itself.
func TestEscapeGlob(t *testing.T) {
	for _, name := range []string{"a", "*", "?", "[a]", `\`, `\*`, "a[b", "[^a]"} {
		for _, other := range []string{"a", "b", "xx", `\`, "*", "?"} {
			if ok, err := filepath.Match(EscapeGlob(name), other); err != nil || ok != (name == other) {
				t.Errorf("pattern of %s matches %s: %v, %v", name, other, ok, err)
			}
		}
		if ok, err := filepath.Match(EscapeGlob(name), name); !ok || err != nil {
			t.Errorf("pattern of %s does not match itself: %v", name, err)
		}
	}
}
