package stored

// This file finds models in local folders and in stores, and opens them: it reads the index of their files and opens
// the sources of their tensors.

import (
	"context"
	"errors"
	"maps"
	"path/filepath"
	"slices"

	"github.com/overwire/overwire/gosrc/codec"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/format"
	"github.com/overwire/overwire/gosrc/format/overwire"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/source/open"
	"github.com/overwire/overwire/gosrc/tensor"
)

// A Model is an opened model. Its tensors can be read in any order. The caller must close it.
type Model struct {
	Index   *tensor.Index
	Sources []source.Source // in the order of Index.Sources
	Sets    []format.Files  // one for each opened URI
}

// Open opens a model. If unlisted is set, the model includes tensors that are in the files of an
// index.json but not listed by it.
func Open(ctx context.Context, uris []string, access format.Access, unlisted bool) (*Model, error) {
	return OpenIn(ctx, open.With(access.Options), uris, access.Decrypt, unlisted)
}

// OpenIn is like Open, with stores that are also used for other reads. decrypt is Access.Decrypt.
func OpenIn(ctx context.Context, stores *open.Stores, uris []string, decrypt map[string]string, unlisted bool) (
	*Model, error) {
	ix, srcs, sets, err := format.OpenAll(ctx, uris, stores.OpenLike, format.Options{
		Known: codec.Known, List: stores.List, Settings: decrypt, Unlisted: unlisted,
	})
	if err != nil {
		return nil, err
	}
	return &Model{ix, srcs, sets}, nil
}

// OpenNamed is like Open, but calls ExpandFolders first.
func OpenNamed(ctx context.Context, uris []string, access format.Access, unlisted bool) (*Model, error) {
	return ExpandFolders(ctx, uris, access.Options, func(uris []string) (*Model, error) {
		return Open(ctx, uris, access, unlisted)
	})
}

// Close closes the sources.
func (m *Model) Close() {
	for _, s := range m.Sources {
		_ = s.Close()
	}
}

// RefuseWritten returns an error if one of the model's files was changed after it was opened.
func (m *Model) RefuseWritten() error {
	for _, s := range m.Sources {
		if err := source.Unwritten(s); err != nil {
			return err
		}
	}
	return nil
}

// Metadata returns the metadata of source k without the key that containers use. It returns nil if
// the source has no metadata.
func (m *Model) Metadata(k int) map[string]string {
	out := maps.Clone(m.Index.Sources[k].Metadata)
	delete(out, overwire.MetadataKey)
	return out
}

// Holder returns the number of the tensor that stores the bytes of tensor i. It is i, unless tensor i is an alias.
func (m *Model) Holder(i int) int {
	if a := m.Index.Tensors[i].Alias; a >= 0 {
		return int(a)
	}
	return i
}

// Readers returns a reader for every tensor. An alias has the reader of its holder.
func (m *Model) Readers(c *Cache) []*Tensor {
	readers := make([]*Tensor, len(m.Index.Tensors))
	for i := range readers {
		k := m.Holder(i)
		if readers[k] == nil {
			t := &m.Index.Tensors[k]
			readers[k] = New(m.Sources[t.Source], m.Index, t, c)
		}
		readers[i] = readers[k]
	}
	return readers
}

// A Total sums up tensors. Aliases count in Tensors and Bytes. The zero value is an empty sum.
type Total struct {
	Tensors int     `json:"tensors"`
	Bytes   int64   `json:"bytes"`
	Stored  int64   `json:"stored"`
	Ratio   float64 `json:"ratio"`
}

// Add adds one tensor.
func (t *Total) Add(bytes, stored int64) {
	t.Tensors++
	t.Bytes += bytes
	t.Stored += stored
	t.Ratio = Ratio(t.Stored, t.Bytes)
}

// Ratio returns stored / bytes, or 1 if there are no bytes.
func Ratio(stored, bytes int64) float64 {
	if bytes == 0 {
		return 1
	}
	return float64(stored) / float64(bytes)
}

// A Folder is a folder with models, and a list of its contents if it is remote.
type Folder struct {
	Path   string // a local path or a URI
	Remote bool
	Files  []source.Entry // remote: the files in it and its subfolders; nil if the store cannot list files
}

// FolderAt returns the folder for a name. It lists a remote folder, and pins an hf:// folder to a commit. ok is false
// if the name is a remote file. Local names are not looked up.
func FolderAt(ctx context.Context, at source.Location, stores *open.Stores) (f Folder, ok bool, err error) {
	if !at.Remote {
		return Folder{Path: at.Path}, true, nil
	}
	dir := format.RemoteFolder(ctx, at, stores.OpenLike, format.Options{List: stores.List})
	if dir == "" {
		return Folder{Path: at.URI, Remote: true}, false, nil
	}
	pinned, files, err := stores.Walk(ctx, dir)
	if errors.Is(err, errs.ErrNotSupported) {
		source.Notice(errs.RedactURI(dir) +
			": this store cannot list files, so auxiliary files (configuration, tokenizer) are not copied")
		return Folder{Path: dir, Remote: true}, true, nil
	}
	return Folder{Path: pinned, Remote: true, Files: files}, true, err
}

// Branches lists f and its subfolders that contain files, except the folder avoid, which is being written. The list is
// empty if f is not a folder, or if its store cannot list it.
func (f Folder) Branches(avoid string) ([]format.Branch, error) {
	switch {
	case !f.Remote:
		return format.Tree(f.Path, avoid)
	case f.Files == nil:
		return nil, nil
	case source.Remote(avoid):
		return format.RemoteTree(f.Path, source.Directory(avoid), f.Files)
	}
	return format.RemoteTree(f.Path, "", f.Files)
}

// PathBelow returns the path or URI of the folder name below dir. If name is "", it returns dir.
func PathBelow(dir, name string) string {
	switch {
	case name == "":
		return dir
	case source.Remote(dir):
		return source.Below(source.Directory(dir), name)
	}
	return filepath.Join(dir, name)
}

// ExpandFolders resolves names from users and opens them with openAll. A folder that directly contains no weights
// stands for its subfolders with weights. For a remote folder, subfolders are listed only if the folder itself has no
// model.
func ExpandFolders[T any](ctx context.Context, uris []string, opt source.Options,
	openAll func(uris []string) (T, error)) (T, error) {
	stores := open.With(opt)
	uris = expandAll(ctx, uris, stores, false)
	m, err := openAll(uris)
	if !errors.Is(err, errs.ErrNotFound) {
		return m, err
	}
	below := expandAll(ctx, uris, stores, true)
	if slices.Equal(below, uris) {
		return m, err
	}
	return openAll(below)
}

func expandAll(ctx context.Context, uris []string, stores *open.Stores, remote bool) (out []string) {
	for _, uri := range uris {
		below := []string{uri} // if it does not exist, opening it reports that
		if at := source.LocationOf(uri); !at.Remote || remote {
			below = weightsBelow(ctx, at, stores, below)
		}
		out = append(out, below...)
	}
	return out
}

// weightsBelow lists the subfolders with weights of a folder that directly contains none. Otherwise it returns usual.
func weightsBelow(ctx context.Context, at source.Location, stores *open.Stores, usual []string) (below []string) {
	f, ok, err := FolderAt(ctx, at, stores)
	if err != nil || !ok {
		return usual
	}
	branches, err := f.Branches("")
	if err != nil || len(branches) == 0 || branches[len(branches)-1].Weights {
		return usual
	}
	for _, b := range branches {
		if b.Weights {
			below = append(below, PathBelow(f.Path, b.Path))
		}
	}
	if below == nil {
		return usual
	}
	return below
}
