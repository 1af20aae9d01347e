package format

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/source/file"
)

// The error for a missing file says so once, and suggests what was probably meant.
func TestMissing(t *testing.T) {
	dir := t.TempDir()
	t.Chdir(dir)
	for _, name := range []string{"model.safetensors", "other.bin", "w.safetensors.index.json"} {
		if err := os.WriteFile(name, nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink("nowhere", "link.safetensors"); err != nil {
		t.Fatal(err)
	}
	opener := func(_ context.Context, uri string, _ source.Outline) (source.Source, error) { return file.Open(uri) }
	for path, want := range map[string]string{
		"model.safetensor":              "; did you mean model.safetensors?",
		dir + "/Model.safetensors":      "; did you mean " + dir + "/model.safetensors?",
		"w.safetensors":                 "; it was saved in shards: name w.safetensors.index.json, or the folder",
		"unlike":                        "",
		"none/model.safetensors":        "; no such folder: none",
		dir + "/a/b/c.safetensors":      "; no such folder: " + dir + "/a",
		"org/name":                      "; for a model on the Hugging Face Hub, use hf://org/name",
		dir + "/org/name":               "hf://org/name",
		dir + "/org/deep/name":          "; no such folder: " + dir + "/org",
		"~/model.safetensors":           "; ~ is not expanded here",
		dir + "/~/m.safetensors":        "; ~ is not expanded here",
		"*.safetensors":                 "; patterns are not expanded here",
		"another-name.of.an.index.json": "",
		"":                              "",
	} {
		_, _, _, err := OpenAll(t.Context(), []string{path}, opener, Options{})
		if text := fmt.Sprint(err); !errors.Is(err, errs.ErrNotFound) || !strings.Contains(text, want) ||
			want == "" && !strings.HasSuffix(text, "directory") {
			t.Errorf("%s: %v", path, err)
		}
		if strings.Count(err.Error(), "no such file") != 1 {
			t.Errorf("%s: %v", path, err)
		}
	}
	if err := missingPath(filepath.Join(dir, "link.safetensors")); err != nil {
		t.Error(err) // the link exists; opening it fails later
	}
}
