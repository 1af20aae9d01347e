package format

// This file finds the files of a model that a user names.

import (
	"context"
	"errors"
	"os"
	"slices"
	"strings"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/format/safetensors"
	"github.com/overwire/overwire/gosrc/internal/modelfiles"
	"github.com/overwire/overwire/gosrc/source"
)

const (
	suffix      = modelfiles.Extension
	indexSuffix = modelfiles.IndexSuffix
)

// An Opener opens one URI.
type Opener = func(ctx context.Context, uri string) (source.Source, error)

// Files are those that a name stands for, in order.
type Files struct {
	URIs []string
	// Index is the index.json that decided, Text its bytes, and Shards what it says:
	// URIs[i] is Shards.Files[i]. "", nil, nil: none did.
	Index  string
	Text   []byte
	Shards *safetensors.Shards

	index    source.Location // of Index
	identity source.Identity // of the index, when it was read
	listed   bool            // a folder's listing decided
}

// Resolve returns the files to open for a name: a file stands for itself, an index.json
// for its shards, a folder for the model in it (docs/folders.md).
//
// A remote folder is a repository of hf://, a bucket, or a URI that ends in a slash: see
// RemoteFolder for others. If the store does not list it, the usual names of models are
// tried.
func Resolve(ctx context.Context, at source.Location, open Opener, opt Options) (Files, error) {
	switch {
	case at.Remote && at.Folder:
		return openRemoteFolder(ctx, at, open, opt)
	case !at.Remote && !strings.Contains(at.URI, "://"):
		if st, err := os.Stat(at.Path); err == nil && st.IsDir() {
			return openFolder(ctx, at.Path, open)
		}
		if err := missingPath(at.Path); err != nil {
			return Files{}, err
		}
	case !at.Remote:
		return Files{URIs: []string{at.URI}}, nil
	}
	if isIndex(at.Path) {
		return fromIndex(ctx, at, open)
	}
	return Files{URIs: []string{at.URI}}, nil
}

// isIndex reports whether a path names an index.json.
func isIndex(path string) bool {
	n, ok := modelfiles.Parse(path[strings.LastIndexByte(path, '/')+1:])
	return ok && n.Index || strings.HasSuffix(path, indexSuffix)
}

// usual are the names of models in folders that cannot be listed.
var usual = []string{
	"model" + suffix + indexSuffix, "model" + suffix,
	"diffusion_pytorch_model" + suffix + indexSuffix, "diffusion_pytorch_model" + suffix,
	"delta" + suffix + indexSuffix, "delta" + suffix,
	"consolidated" + suffix + indexSuffix, "consolidated" + suffix,
}

func openRemoteFolder(ctx context.Context, at source.Location, open Opener, opt Options) (Files, error) {
	uri := at.Directory
	if opt.List != nil {
		names, err := opt.List(ctx, uri)
		if err == nil {
			return chooseModel(ctx, uri, names, open)
		}
		if !errors.Is(err, errs.ErrNotSupported) {
			return Files{}, err
		}
	}
	var unsure error // a name may be there, but only a cache was asked
	why := ""
	var where *errs.At
	for _, name := range usual {
		file := source.Beside(uri, name)
		if strings.HasSuffix(name, indexSuffix) {
			set, err := fromIndex(ctx, source.LocationOf(file), open)
			if err == nil || !errors.Is(err, errs.ErrNotFound) {
				return set, err
			}
			continue
		}
		s, err := open(outlineOf(opt).In(ctx), file)
		if err == nil {
			_ = s.Close()
			return Files{URIs: []string{file}}, nil
		}
		if !errors.Is(err, errs.ErrNotFound) {
			return Files{}, err
		}
		if errors.As(err, &where) && errs.RuleOf(err) == source.RuleNotCached {
			why = ": " + strings.TrimPrefix(where.Err.Error(), errs.ErrNotFound.Error()+": ")
		}
		if unsure == nil && (errors.Is(err, errs.ErrIO) || errors.Is(err, errs.ErrTimeout)) {
			unsure = err
		}
	}
	if unsure != nil {
		return Files{}, unsure
	}
	return Files{}, placeError(uri, errs.New(errs.ErrNotFound, "none of %s in this folder%s", strings.Join(usual, ", "),
		why))
}

// RemoteFolder is the URI of a remote folder, with its last slash; "" for all else. A folder
// is a repository of hf://, a bucket, what ends in a slash, and what the store lists as one
// unless an object has that very name.
func RemoteFolder(ctx context.Context, at source.Location, open Opener, opt Options) string {
	switch {
	case at.Folder:
		return at.Directory
	case !at.Remote || opt.List == nil || slices.ContainsFunc([]string{suffix, ".json", ".tensors"},
		func(end string) bool { return strings.HasSuffix(at.Name, end) }):
		return ""
	}
	if _, err := opt.List(ctx, at.Directory); err != nil {
		return "" // opening it reports what is wrong
	}
	if s, err := open(outlineOf(opt).In(ctx), at.URI); err == nil {
		_ = s.Close()
		return ""
	}
	return at.Directory
}

func placeError(uri string, err error) error {
	return &errs.At{Verb: "open", Source: uri, Chunk: -1, Offset: -1, Err: err}
}
