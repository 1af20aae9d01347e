package original

// This file finds the index.json of a model in shards.

import (
	"context"
	"os"
	"path/filepath"
	"strings"

	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/source/open"
	"github.com/overwire/overwire/gosrc/tensor"
)

const suffix = ".safetensors.index.json"

// IndexJSON returns the name and the bytes of the index.json by which a model was
// opened: path is its own path, or its folder's; "" if there is none. It is valid
// for every new model whose files keep their names and tensors.
func IndexJSON(ctx context.Context, path string, storage source.Options) (name string, b []byte) {
	if source.Remote(path) {
		if source.Folder(path) {
			path = source.Beside(path, "model"+suffix) // it cannot always be listed
		}
	} else if st, err := os.Stat(path); err == nil && st.IsDir() {
		found, _ := filepath.Glob(source.EscapeGlob(path) + "/*" + suffix)
		if len(found) != 1 {
			return "", nil
		}
		path = found[0]
	}
	name = filepath.Base(source.Path(path))
	if !strings.HasSuffix(name, ".index.json") {
		return "", nil
	}
	s, err := open.With(storage)(ctx, path)
	if err != nil {
		return "", nil
	}
	defer s.Close()
	b = make([]byte, min(s.Size(), tensor.MaxHeader))
	if err := s.ReadAt(ctx, b, 0); err != nil {
		return "", nil
	}
	return name, b
}
