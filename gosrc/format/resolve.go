package format

// This file finds the files of a model that a user names, and detects whether they have been replaced.

import (
	"bytes"
	"context"
	"errors"
	"os"
	"slices"
	"strings"
	"syscall"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/format/safetensors"
	"github.com/overwire/overwire/gosrc/internal/modelfiles"
	"github.com/overwire/overwire/gosrc/internal/regular"
	"github.com/overwire/overwire/gosrc/internal/spawn"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/tensor"
)

const (
	suffix      = modelfiles.Extension
	indexSuffix = modelfiles.IndexSuffix
)

// An Opener opens one URI. outline describes what the reader expects of the object.
type Opener = func(ctx context.Context, uri string, outline source.Outline) (source.Source, error)

// Files are the files that a name refers to, in order.
type Files struct {
	URIs []string
	// Index is the index.json that selected the files, Text its bytes, and Shards its contents: URIs[i] is
	// Shards.Files[i]. They are zero if there is no index.
	Index  string
	Text   []byte
	Shards *safetensors.Shards

	index    source.Location // location of Index
	identity source.Identity // state of the index when it was read
	listed   bool            // whether a folder listing selected the files
}

// openFiles opens the files that a name refers to. The name may also be a remote folder without the final slash. The
// caller closes the sources, even after an error.
func openFiles(ctx context.Context, at source.Location, open Opener, opt Options) (set Files, srcs []source.Source,
	err error) {
	set, err = Resolve(ctx, at, open, opt)
	if err != nil {
		return Files{}, nil, err
	}
	if set.Shards != nil && opt.Keys != nil {
		set.keepOnly(opt.Keys)
	}
	srcs, err = openSources(ctx, set.URIs, open, outlineOf(opt))
	if errors.Is(err, errs.ErrNotFound) && set.Index == "" && !at.Folder {
		if dir := RemoteFolder(ctx, at, open, opt); dir != "" {
			return openFiles(ctx, source.LocationOf(dir), open, opt)
		}
	}
	return set, srcs, set.explainMissing(err)
}

// keepOnly drops files that contain none of the named tensors; see safetensors.Shards.Only.
func (f *Files) keepOnly(names []string) {
	few := f.Shards.Only(names)
	kept := make([]string, 0, len(few.Files))
	for i, name := range f.Shards.Files { // f.URIs[i] is the file called name
		if len(kept) < len(few.Files) && few.Files[len(kept)] == name {
			kept = append(kept, f.URIs[i])
		}
	}
	f.URIs, f.Shards = kept, &few
}

// together limits how many files are opened or indexed concurrently. A remote file costs round trips, a local file
// CPU time.
const together = 16

// openSources opens files. The caller closes them, even after an error. It returns the error of the first file in
// order that cannot be opened, and cancels the later ones.
func openSources(ctx context.Context, files []string, open Opener, outline source.Outline) ([]source.Source, error) {
	srcs := make([]source.Source, len(files))
	each, stop := make([]context.Context, len(files)), make([]context.CancelFunc, len(files))
	for i := range files {
		each[i], stop[i] = context.WithCancel(ctx)
		defer stop[i]()
	}
	err := spawn.Each(ctx, "open", together, len(files), func(i int) error {
		s, err := open(each[i], files[i], outline)
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

// Resolve returns the files to open for a name: a file itself, the shards of an index.json, or the model of a folder
// (docs/folders.md).
//
// A remote folder is an hf:// repository, a bucket, or a URI that ends in a slash; RemoteFolder detects others. If
// the store cannot list it, Resolve tries the usual names of models.
func Resolve(ctx context.Context, at source.Location, open Opener, opt Options) (Files, error) {
	switch {
	case at.Remote && at.Folder:
		return openRemoteFolder(ctx, at, open, opt)
	case !at.Remote && at.Path == at.URI && at.Scheme != "": // opening it reports the error
		return Files{URIs: []string{at.URI}}, nil
	case !at.Remote:
		at = source.LocationOf(at.Path)
		st, err := os.Stat(at.Path)
		if err != nil {
			err = missingPath(at.Path)
		} else if st.IsDir() {
			var names []string
			if names, err = namesOf(at.Path); err == nil {
				return chooseFiles(ctx, at.Path, names, open)
			}
		}
		if err != nil {
			return Files{}, err
		}
	}
	if isIndex(at.Path) {
		return readShards(ctx, at, open)
	}
	return Files{URIs: []string{at.URI}}, nil
}

func isIndex(path string) bool {
	n, ok := modelfiles.ParseName(path[strings.LastIndexByte(path, '/')+1:])
	return ok && n.Index || strings.HasSuffix(path, indexSuffix)
}

// namesOf returns the paths of a folder's entries, sorted.
func namesOf(dir string) (paths []string, err error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, placeError(dir, errs.FromOS(err))
	}
	for _, e := range entries {
		paths = append(paths, strings.TrimSuffix(dir, "/")+"/"+e.Name()) // keeps ".." in dir for the system to resolve
	}
	return paths, nil
}

// chooseFiles selects the files of the model in a folder, by its index.json if it has one.
func chooseFiles(ctx context.Context, dir string, names []string, open Opener) (Files, error) {
	set, err := chooseModel(dir, names)
	if err != nil || set.Index == "" {
		return set, err
	}
	return readShards(ctx, source.LocationOf(set.Index), open)
}

// usual lists the model names to try in folders that cannot be listed.
var usual = []string{
	"model" + suffix + indexSuffix, "model" + suffix,
	"diffusion_pytorch_model" + suffix + indexSuffix, "diffusion_pytorch_model" + suffix,
	"delta" + suffix + indexSuffix, "delta" + suffix, "consolidated" + suffix + indexSuffix, "consolidated" + suffix,
}

func openRemoteFolder(ctx context.Context, at source.Location, open Opener, opt Options) (Files, error) {
	uri := at.Directory
	var unsure error // why it is unknown whether some name exists
	if opt.List != nil {
		names, err := opt.List(ctx, uri)
		if err == nil {
			return chooseFiles(ctx, uri, names, open)
		}
		// Some users may read a store's objects but not list them.
		if unsure = err; errors.Is(err, errs.ErrNotSupported) {
			unsure = nil
		} else if !errors.Is(err, errs.ErrPermission) || at.Scheme == "hf" {
			return Files{}, err
		}
	}
	why := ""
	var where *errs.At
	for _, name := range usual {
		file := source.Beside(uri, name)
		set, err := Files{URIs: []string{file}}, error(nil)
		if strings.HasSuffix(name, indexSuffix) {
			set, err = readShards(ctx, source.LocationOf(file), open)
		} else if s, openErr := open(ctx, file, outlineOf(opt)); openErr == nil {
			_ = s.Close()
		} else {
			err = openErr
		}
		isAbsent := errors.Is(err, errs.ErrNotFound)
		switch {
		case err == nil:
			return set, nil
		case !isAbsent && (at.Scheme == "hf" || !isRefusal(err)):
			return Files{}, err
		case isAbsent && errors.As(err, &where) && errs.RuleOf(err) == source.RuleNotCached:
			why = ": " + strings.TrimPrefix(where.Err.Error(), errs.ErrNotFound.Error()+": ")
		case unsure == nil && (!isAbsent || errors.Is(err, errs.ErrIO) || errors.Is(err, errs.ErrTimeout)):
			unsure = err
		}
	}
	if unsure != nil {
		return Files{}, unsure
	}
	return Files{}, placeError(uri, errs.New(errs.ErrNotFound, "the folder has none of these files: %s%s",
		strings.Join(usual, ", "), why))
}

// isRefusal reports whether a store refused to say whether a file exists. Many stores answer 403, 401 or 400 for
// missing files.
func isRefusal(err error) bool {
	return errors.Is(err, errs.ErrPermission) || errs.RuleOf(err) == source.RuleRefused
}

// RemoteFolder returns the URI of a remote folder with a final slash, or "" if at is not one. A remote folder is an
// hf:// repository, a bucket, a URI that ends in a slash, or a name that the store can list as a folder if no object
// has exactly that name.
func RemoteFolder(ctx context.Context, at source.Location, open Opener, opt Options) string {
	switch {
	case at.Folder:
		return at.Directory
	case !at.Remote || opt.List == nil || slices.ContainsFunc([]string{suffix, ".json", ".tensors"},
		func(end string) bool { return strings.HasSuffix(at.Name, end) }):
		return ""
	}
	if _, err := opt.List(ctx, at.Directory); err != nil {
		return "" // opening it reports the error
	}
	if s, err := open(ctx, at.URI, outlineOf(opt)); err == nil {
		_ = s.Close()
		return ""
	}
	return at.Directory
}

func placeError(uri string, err error) error {
	return &errs.At{Verb: "open", Source: uri, Chunk: -1, Offset: -1, Err: err}
}

// readShards returns the shards that an index.json lists.
func readShards(ctx context.Context, at source.Location, open Opener) (Files, error) {
	text, id, err := readContent(ctx, at, open)
	if err != nil {
		return Files{}, err
	}
	shards, err := safetensors.ReadIndexJSON(at.URI, text)
	if err != nil {
		return Files{}, err
	}
	if len(shards.Weights) == 0 { // or else the model would silently be empty
		return Files{}, placeError(at.URI, errs.New(errs.ErrFormat,
			"the index lists no tensors: fetch it again, or remove it if the files next to it are the model"))
	}
	set := Files{Index: at.URI, Text: text, Shards: &shards, index: at, identity: id}
	for _, name := range shards.Files {
		set.URIs = append(set.URIs, source.Beside(at.URI, name))
	}
	return set, nil
}

// readContent returns the bytes of an index.json and the file's state when it was read.
func readContent(ctx context.Context, at source.Location, open Opener) ([]byte, source.Identity, error) {
	if !at.Remote {
		id, _ := stampOf(at.Path) // taken before the read; the read reports errors
		b, err := regular.Read(at.Path, tensor.MaxHeader)
		return b, id, errs.In("open", at.URI, err)
	}
	s, err := open(ctx, at.URI, source.Outline{Most: tensor.MaxHeader})
	if err != nil {
		return nil, source.Identity{}, err
	}
	defer s.Close()
	if s.Size() > tensor.MaxHeader {
		return nil, source.Identity{}, placeError(at.URI, errs.New(errs.ErrFormat,
			"the index.json has %d bytes, but at most %d are allowed", s.Size(), tensor.MaxHeader))
	}
	b := make([]byte, s.Size())
	return b, s.Facts().Identity, s.ReadAt(ctx, b, 0)
}

// wasReplaced reports whether the index.json or listing that selected the files has changed since then. err is the
// error of opening them, if any. If the store cannot tell, they count as unchanged.
func (f *Files) wasReplaced(ctx context.Context, open Opener, err error) bool {
	switch {
	case f.Index == "":
		return f.listed && errors.Is(err, errs.ErrNotFound)
	case f.index.Scheme == "hf": // all files are from one commit
		return false
	case !f.index.Remote:
		now, serr := stampOf(f.index.Path)
		return errors.Is(serr, os.ErrNotExist) || serr == nil && now != f.identity
	}
	text, id, err := readContent(ctx, f.index, open)
	return errors.Is(err, errs.ErrNotFound) || err == nil && (id != f.identity || !bytes.Equal(text, f.Text))
}

// explainMissing adds to the error for a missing shard which index lists it, and which file may be the model instead.
func (f *Files) explainMissing(err error) error {
	var where *errs.At
	if f.Index == "" || !errors.Is(err, errs.ErrNotFound) || !errors.As(err, &where) {
		return err
	}
	missing := *where
	missing.Err = errs.New(errs.ErrNotFound, "the file is missing, but %s lists it%s",
		errs.RedactURI(f.Index), f.loneFile())
	return &missing
}

// loneFile returns advice: use the single-file model next to the index, if there is one, or fetch the model again.
func (f *Files) loneFile() string {
	i := strings.LastIndex(f.Index, suffix+".")
	if i < 0 || f.index.Remote {
		return ": fetch the model again"
	}
	single := f.Index[:i+len(suffix)]
	if _, err := os.Stat(single); err != nil || slices.Contains(f.URIs, single) {
		return ": fetch the model again"
	}
	return "; next to it is " + single + ", a complete model: remove the older of the two"
}

// stampOf returns the current state of a local file.
func stampOf(path string) (id source.Identity, err error) {
	st, err := os.Stat(path)
	if err != nil {
		return id, err
	}
	own, ok := st.Sys().(*syscall.Stat_t)
	if !ok {
		return id, errs.New(errs.ErrNotSupported, "cannot read the inode of %s", path)
	}
	return source.Identity{Device: uint64(own.Dev), Inode: own.Ino, Size: own.Size, Modified: own.Mtim.Nano(),
		Changed: own.Ctim.Nano()}, nil
}
