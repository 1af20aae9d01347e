package format

// This file finds the files of a model that a user names.

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/format/safetensors"
	"github.com/overwire/overwire/gosrc/internal/regular"
	"github.com/overwire/overwire/gosrc/internal/spawn"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/tensor"
)

const (
	suffix      = ".safetensors"
	indexSuffix = ".index.json"
)

// An Opener opens one URI.
type Opener = func(ctx context.Context, uri string) (source.Source, error)

// Resolve returns the files to open for a name, in order: a file stands for itself,
// an index.json for its shards, a folder for the shards of its
// *.safetensors.index.json, or else for its *.safetensors files by name. shards is
// set if an index decided.
//
// A remote folder is a URI that ends in a slash, or a repository of hf://. If
// the store does not list it, the usual names of models are tried.
func Resolve(ctx context.Context, uri string, open Opener, opt Options) (files []string, shards *safetensors.Shards, err error) {
	if source.Remote(uri) {
		return remote(ctx, uri, open, opt)
	}
	if strings.Contains(uri, "://") {
		return []string{uri}, nil, nil
	}
	if st, err := os.Stat(uri); err == nil && st.IsDir() {
		return folder(ctx, uri, open)
	}
	if err := missing(uri); err != nil {
		return nil, nil, err
	}
	if strings.HasSuffix(uri, indexSuffix) {
		return fromIndex(ctx, uri, open)
	}
	return []string{uri}, nil, nil
}

// usual are the names of models in folders that cannot be listed.
var usual = []string{
	"model" + suffix + indexSuffix, "model" + suffix,
	"diffusion_pytorch_model" + suffix + indexSuffix, "diffusion_pytorch_model" + suffix,
	"delta" + suffix + indexSuffix, "delta" + suffix,
}

func remote(ctx context.Context, uri string, open Opener, opt Options) ([]string, *safetensors.Shards, error) {
	if !source.Folder(uri) {
		if strings.HasSuffix(source.Path(uri), indexSuffix) {
			return fromIndex(ctx, uri, open)
		}
		return []string{uri}, nil, nil
	}
	if opt.List != nil {
		names, err := opt.List(ctx, uri)
		if err == nil {
			return listed(ctx, uri, names, open)
		}
		if !errors.Is(err, errs.ErrNotSupported) {
			return nil, nil, err
		}
	}
	var unsure error // a name may be there, but only a cache was asked
	for _, name := range usual {
		file := source.Beside(uri, name)
		if strings.HasSuffix(name, indexSuffix) {
			files, shards, err := fromIndex(ctx, file, open)
			if err == nil || !errors.Is(err, errs.ErrNotFound) {
				return files, shards, err
			}
			continue
		}
		s, err := open(outline(opt).In(ctx), file)
		if err == nil {
			_ = s.Close()
			return []string{file}, nil, nil
		}
		if !errors.Is(err, errs.ErrNotFound) {
			return nil, nil, err
		}
		if unsure == nil && (errors.Is(err, errs.ErrIO) || errors.Is(err, errs.ErrTimeout)) {
			unsure = err
		}
	}
	if unsure != nil {
		return nil, nil, unsure
	}
	return nil, nil, at(uri, errs.New(errs.ErrNotFound, "none of %s in this folder", strings.Join(usual, ", ")))
}

// fromIndex returns the shards that an index.json names.
func fromIndex(ctx context.Context, uri string, open Opener) ([]string, *safetensors.Shards, error) {
	b, err := content(ctx, uri, open)
	if err != nil {
		return nil, nil, err
	}
	shards, err := safetensors.ReadIndexJSON(uri, b)
	if err != nil {
		return nil, nil, err
	}
	files := slices.Clone(shards.Files)
	for i, name := range files {
		files[i] = source.Beside(uri, name)
	}
	return files, &shards, nil
}

// content is all of an index.json.
func content(ctx context.Context, uri string, open Opener) ([]byte, error) {
	if !source.Remote(uri) {
		b, err := regular.Read(uri, tensor.MaxHeader)
		return b, errs.In("open", uri, err)
	}
	s, err := open(source.Outline{Most: tensor.MaxHeader}.In(ctx), uri)
	if err != nil {
		return nil, err
	}
	defer s.Close()
	if s.Size() > tensor.MaxHeader {
		return nil, at(uri, errs.New(errs.ErrFormat, "an index of %d bytes", s.Size()))
	}
	b := make([]byte, s.Size())
	return b, s.ReadAt(ctx, b, 0)
}

func folder(ctx context.Context, dir string, open Opener) ([]string, *safetensors.Shards, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, nil, at(dir, errs.FromOS(err))
	}
	var names []string
	for _, e := range entries { // sorted by name
		names = append(names, strings.TrimSuffix(dir, "/")+"/"+e.Name()) // ".." in dir stays, as the system takes it
	}
	return listed(ctx, dir, names, open)
}

// listed chooses the model among the files of a folder.
func listed(ctx context.Context, dir string, names []string, open Opener) ([]string, *safetensors.Shards, error) {
	var files, indexes []string
	for _, path := range names {
		switch name := filepath.Base(path); {
		case strings.HasPrefix(name, "."):
		case strings.HasSuffix(name, suffix+indexSuffix):
			indexes = append(indexes, path)
		case strings.HasSuffix(name, suffix):
			files = append(files, path)
		}
	}
	switch {
	case len(indexes) == 1:
		return fromIndex(ctx, indexes[0], open)
	case len(indexes) > 1:
		return nil, nil, at(dir, errs.New(errs.ErrArgument, "several models in one folder, name one of them: %s", strings.Join(indexes, ", ")))
	case len(files) == 0:
		return nil, nil, at(dir, errs.New(errs.ErrNotFound, "no %s file in this folder%s", suffix, below(dir)))
	}
	return files, nil, nil
}

// below names the folders one level down that hold weights, as those of a
// diffusers pipeline do.
func below(dir string) string {
	if source.Remote(dir) {
		return ""
	}
	if hint := snapshots(dir); hint != "" {
		return ": it is " + hint
	}
	found, _ := filepath.Glob(source.EscapeGlob(strings.TrimSuffix(dir, "/")) + "/*/*" + suffix)
	var names []string
	for _, path := range found { // sorted by name
		if name := filepath.Base(filepath.Dir(path)); len(names) == 0 || names[len(names)-1] != name {
			names = append(names, name)
		}
	}
	if len(names) == 0 {
		return ""
	}
	return ": open a folder below it (" + strings.Join(names[:min(len(names), 8)], ", ") + ")"
}

// OpenAll resolves names, opens every file with open, and indexes them. A tensor
// of an index.json must be in the file that the index names. The caller closes the
// sources; if OpenAll fails, it has closed them.
func OpenAll(ctx context.Context, uris []string, open Opener, opt Options) (ix *tensor.Index, srcs []source.Source, err error) {
	defer func() {
		if err != nil {
			for _, s := range srcs {
				_ = s.Close()
			}
			ix, srcs = nil, nil
		}
	}()
	if len(uris) == 0 {
		return nil, nil, errs.New(errs.ErrArgument, "nothing to open")
	}
	var parts []*tensor.Index
	for _, uri := range uris {
		files, shards, err := Resolve(ctx, uri, open, opt)
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
		opened, err := sources(outline(opt).In(ctx), files, open)
		srcs = append(srcs, opened...)
		if err != nil {
			return nil, srcs, err
		}
		part, err := Open(ctx, opened, opt)
		copy(srcs[len(srcs)-len(opened):], opened) // the sources to read from
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

// Names returns the tensors that the index.json of each URI lists, without opening a
// shard. ok is false if one has no index.json.
func Names(ctx context.Context, uris []string, open Opener, opt Options) (names []string, ok bool, err error) {
	names = []string{}
	for _, uri := range uris {
		_, shards, err := Resolve(ctx, uri, open, opt)
		if err != nil || shards == nil {
			return nil, false, err
		}
		for _, w := range shards.Weights {
			names = append(names, w.Name)
		}
	}
	return names, true, nil
}

// together is how many files are opened, or indexed, at once. A remote file
// costs round trips, a local one a core.
const together = 16

// sources opens files. The caller closes them, even after an error, which is that of the
// first file that cannot be opened; those behind it are not waited for.
func sources(ctx context.Context, files []string, open Opener) ([]source.Source, error) {
	srcs := make([]source.Source, len(files))
	each, stop := make([]context.Context, len(files)), make([]context.CancelFunc, len(files))
	for i := range files {
		each[i], stop[i] = context.WithCancel(ctx)
		defer stop[i]()
	}
	err := spawn.Each(ctx, "open", together, len(files), func(i int) error {
		s, err := open(each[i], files[i])
		if err != nil {
			for _, stop := range stop[i+1:] {
				stop()
			}
			return err
		}
		srcs[i] = s
		return nil
	})
	if err != nil {
		return slices.DeleteFunc(srcs, func(s source.Source) bool { return s == nil }), err
	}
	return srcs, nil
}

func at(uri string, err error) error {
	return &errs.At{Verb: "open", Source: uri, Chunk: -1, Offset: -1, Err: err}
}
