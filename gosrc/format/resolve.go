package format

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/overwire/overwire/gosrc/fault"
	"github.com/overwire/overwire/gosrc/format/safetensors"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/tensor"
)

const (
	suffix      = ".safetensors"
	indexSuffix = ".index.json"
)

// Resolve turns what a user names into the files to open, in order: a file is
// itself; an index.json is its shards; a folder is the shards of its
// *.safetensors.index.json, or else its *.safetensors files by name. shards is
// set where an index decided.
func Resolve(uri string) (files []string, shards *safetensors.Shards, err error) {
	if strings.Contains(uri, "://") {
		return []string{uri}, nil, nil
	}
	if st, err := os.Stat(uri); err == nil && st.IsDir() {
		return folder(uri)
	}
	if strings.HasSuffix(uri, indexSuffix) {
		return fromIndex(uri)
	}
	return []string{uri}, nil, nil
}

func folder(dir string) ([]string, *safetensors.Shards, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, nil, at(dir, fault.FromOS(err))
	}
	var files, indexes []string
	for _, e := range entries { // sorted by name
		switch name := e.Name(); {
		case strings.HasPrefix(name, "."):
		case strings.HasSuffix(name, suffix+indexSuffix):
			indexes = append(indexes, filepath.Join(dir, name))
		case strings.HasSuffix(name, suffix):
			files = append(files, filepath.Join(dir, name))
		}
	}
	switch {
	case len(indexes) == 1:
		return fromIndex(indexes[0])
	case len(indexes) > 1:
		return nil, nil, at(dir, fault.New(fault.ErrArgument, "several models in one folder, name one of them: %s", strings.Join(indexes, ", ")))
	case len(files) == 0:
		return nil, nil, at(dir, fault.New(fault.ErrNotFound, "no %s file in this folder", suffix))
	}
	return files, nil, nil
}

func fromIndex(path string) ([]string, *safetensors.Shards, error) {
	st, err := os.Stat(path)
	if err == nil && st.Size() > tensor.MaxHeader {
		err = fault.New(fault.ErrFormat, "an index of %d bytes", st.Size())
	} else if err != nil {
		err = fault.FromOS(err)
	}
	if err != nil {
		return nil, nil, at(path, err)
	}
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, nil, at(path, fault.FromOS(err))
	}
	shards, err := safetensors.ReadIndexJSON(path, b)
	if err != nil {
		return nil, nil, err
	}
	files := slices.Clone(shards.Files)
	for i, name := range files {
		files[i] = filepath.Join(filepath.Dir(path), name)
	}
	return files, &shards, nil
}

// OpenAll resolves names, opens every file with open, and indexes them. A
// tensor that an index.json promises has to be in the file that it names.
// The caller owns the sources; after an error there are none.
func OpenAll(ctx context.Context, uris []string, open func(ctx context.Context, uri string) (source.Source, error), opt Options) (ix *tensor.Index, srcs []source.Source, err error) {
	defer func() {
		if err != nil {
			for _, s := range srcs {
				_ = s.Close()
			}
			ix, srcs = nil, nil
		}
	}()
	if len(uris) == 0 {
		return nil, nil, fault.New(fault.ErrArgument, "nothing to open")
	}
	var parts []*tensor.Index
	for _, uri := range uris {
		files, shards, err := Resolve(uri)
		if err != nil {
			return nil, srcs, err
		}
		if shards != nil && opt.Keys != nil {
			few := shards.Only(opt.Keys)
			kept := files[:0]
			for i, name := range shards.Files { // files[i] is where name lies
				if len(kept) < len(few.Files) && few.Files[len(kept)] == name {
					kept = append(kept, files[i])
				}
			}
			files, shards = kept, &few
		}
		first := len(srcs)
		for _, name := range files {
			s, err := open(ctx, name)
			if err != nil {
				return nil, srcs, err
			}
			srcs = append(srcs, s)
		}
		part, err := Open(ctx, srcs[first:], opt)
		if err != nil {
			return nil, srcs, err
		}
		if shards != nil {
			if err := shards.Check(part); err != nil {
				return nil, srcs, at(uri, err)
			}
		}
		parts = append(parts, part)
	}
	ix, err = Join(parts)
	return ix, srcs, err
}

// Names returns the tensors that the index.json of every one of the uris
// promises, without opening a shard; ok is false when one of them has no index,
// so that only its files know.
func Names(uris []string) (names []string, ok bool, err error) {
	names = []string{}
	for _, uri := range uris {
		_, shards, err := Resolve(uri)
		if err != nil || shards == nil {
			return nil, false, err
		}
		for _, w := range shards.Weights {
			names = append(names, w.Name)
		}
	}
	return names, true, nil
}

func at(uri string, err error) error {
	return &fault.At{Verb: "open", Source: uri, Chunk: -1, Offset: -1, Err: err}
}
