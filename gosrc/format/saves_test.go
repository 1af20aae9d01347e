package format

import (
	"context"
	"errors"
	"os"
	"strings"
	"testing"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/format/safetensors"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/tensor"
)

// savedAs returns a file with one tensor that belongs to the given save, or to none if save is "".
func savedAs(t *testing.T, name, save string) []byte {
	t.Helper()
	metadata := map[string]string{"format": "pt"}
	if save != "" {
		metadata[SaveKey] = save
	}
	entries := []safetensors.Entry{{Name: name, DType: tensor.U8, Shape: []int64{1}, End: 1}}
	head, err := safetensors.AppendHeader(nil, metadata, entries, 8)
	if err != nil {
		t.Fatal(err)
	}
	return append(head, 0)
}

func TestFilesOfTwoSaves(t *testing.T) {
	// Checkpoint files that are opened together must belong to one save. If they do not, they are opened again;
	// if that does not help, the error names the file. Files in other folders or with other names may belong to any
	// save.
	const one, two = "save one", "save two"
	for name, c := range map[string]struct {
		files []string // path, save
		mixed string   // expected in the error; "" if none is expected
	}{
		"one save":           {[]string{"c/model-00001-of-00002", one, "c/model-00002-of-00002", one}, ""},
		"no ids":             {[]string{"c/model-00001-of-00002", "", "c/model-00002-of-00002", ""}, ""},
		"two saves":          {[]string{"c/model-00001-of-00002", one, "c/model-00002-of-00002", two}, "model-00002"},
		"one without an id":  {[]string{"c/model-00001-of-00002", one, "c/model-00002-of-00002", ""}, "model-00002"},
		"model and training": {[]string{"c/model", one, "c/training/model", two}, "training/model"},
		"two checkpoints":    {[]string{"c/model", one, "d/model", two}, ""},
		"other names":        {[]string{"c/model", one, "c/other", two}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir() + "/"
			var uris []string
			for i := 0; i < len(c.files); i += 2 {
				path := dir + c.files[i] + ".safetensors"
				uris = append(uris, path)
				content := savedAs(t, string(rune('a'+i)), c.files[i+1])
				folder := path[:strings.LastIndexByte(path, '/')]
				if err := errors.Join(os.MkdirAll(folder, 0o700), os.WriteFile(path, content, 0o600)); err != nil {
					t.Fatal(err)
				}
			}
			open := func(_ context.Context, uri string, outline source.Outline) (source.Source, error) {
				b, err := os.ReadFile(uri)
				return &memory{name: uri, b: b}, err
			}
			_, _, _, err := OpenAll(t.Context(), uris, open, Options{})
			if (err != nil) != (c.mixed != "") ||
				err != nil && (!errors.Is(err, errs.ErrCorrupt) || !strings.Contains(err.Error(), c.mixed)) {
				t.Fatal(err)
			}
			if c.mixed == "" || c.files[3] == "" {
				return
			}
			// A save replaces the files between the two attempts.
			opened := 0
			again := func(ctx context.Context, uri string, outline source.Outline) (source.Source, error) {
				if opened++; opened <= 1 {
					return open(ctx, uri, outline)
				}
				return &memory{name: uri, b: savedAs(t, uri, two)}, nil
			}
			if _, _, _, err = OpenAll(t.Context(), uris, again, Options{}); err != nil {
				t.Fatal(err)
			}
		})
	}
}
