package original

// This file finds the index.json of a model in shards.

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/overwire/overwire/gosrc/format"
	"github.com/overwire/overwire/gosrc/internal/regular"
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
		return remoteIndexJSON(ctx, path, storage)
	}
	if st, err := os.Stat(path); err == nil && st.IsDir() {
		found, _ := filepath.Glob(format.EscapeGlob(path) + "/*" + suffix)
		if len(found) != 1 {
			return "", nil
		}
		path = found[0]
	}
	if !strings.HasSuffix(path, ".index.json") {
		return "", nil
	}
	b, err := regular.Read(path, tensor.MaxHeader)
	if err != nil {
		return "", nil
	}
	return filepath.Base(path), slices.Clone(b)
}

// remoteIndexJSON is IndexJSON for a URI; a folder that cannot be listed has the
// usual name.
func remoteIndexJSON(ctx context.Context, uri string, storage source.Options) (name string, b []byte) {
	if source.Folder(uri) {
		uri = source.Beside(uri, "model"+suffix)
	}
	name = filepath.Base(source.Path(uri))
	if !strings.HasSuffix(name, ".index.json") {
		return "", nil
	}
	s, err := open.With(storage)(ctx, uri)
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
