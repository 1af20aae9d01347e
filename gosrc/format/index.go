package format

// This file reads the index.json of a model, and says when it is no longer that model's.

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
	"github.com/overwire/overwire/gosrc/internal/regular"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/tensor"
)

// fromIndex returns the shards that an index.json names.
func fromIndex(ctx context.Context, at source.Location, open Opener) (Files, error) {
	text, id, err := readContent(ctx, at, open)
	if err != nil {
		return Files{}, err
	}
	shards, err := safetensors.ReadIndexJSON(at.URI, text)
	if err != nil {
		return Files{}, err
	}
	set := Files{Index: at.URI, Text: text, Shards: &shards, index: at, identity: id}
	for _, name := range shards.Files {
		set.URIs = append(set.URIs, source.Beside(at.URI, name))
	}
	return set, nil
}

// readContent is all of an index.json, and the state in which it was read.
func readContent(ctx context.Context, at source.Location, open Opener) ([]byte, source.Identity, error) {
	if !at.Remote {
		id, _ := stampOf(at.Path) // before it is read, which reports errors
		b, err := regular.Read(at.Path, tensor.MaxHeader)
		return b, id, errs.In("open", at.URI, err)
	}
	s, err := open(source.Outline{Most: tensor.MaxHeader}.In(ctx), at.URI)
	if err != nil {
		return nil, source.Identity{}, err
	}
	defer s.Close()
	if s.Size() > tensor.MaxHeader {
		return nil, source.Identity{}, placeError(at.URI, errs.New(errs.ErrFormat, "an index of %d bytes", s.Size()))
	}
	b := make([]byte, s.Size())
	return b, s.Facts().Identity, s.ReadAt(ctx, b, 0)
}

// wasReplaced reports whether what decided about the files is no longer what it was, after
// they were opened or after err: a saver may have published others. What the store cannot
// tell has not changed.
func (f *Files) wasReplaced(ctx context.Context, open Opener, err error) bool {
	switch {
	case f.Index == "":
		return f.listed && errors.Is(err, errs.ErrNotFound)
	case f.index.Scheme == "hf": // all files are of one commit
		return false
	case !f.index.Remote:
		now, serr := stampOf(f.index.Path)
		return errors.Is(serr, os.ErrNotExist) || serr == nil && now != f.identity
	}
	text, id, err := readContent(ctx, f.index, open)
	return errors.Is(err, errs.ErrNotFound) || err == nil && (id != f.identity || !bytes.Equal(text, f.Text))
}

// explainMissing adds to the error of a missing shard which index lists it, and the file that may
// be the model instead.
func (f *Files) explainMissing(err error) error {
	var where *errs.At
	if f.Index == "" || !errors.Is(err, errs.ErrNotFound) || !errors.As(err, &where) {
		return err
	}
	missing := *where
	missing.Err = errs.New(errs.ErrNotFound, "it is missing, and %s lists it%s", errs.RedactURI(f.Index), f.loneFile())
	return &missing
}

// loneFile names the single file that lies beside an index, if there is one.
func (f *Files) loneFile() string {
	single := fileOfIndex(f.Index)
	if _, err := os.Stat(single); f.index.Remote || err != nil || slices.Contains(f.URIs, single) {
		return ": fetch the model again"
	}
	return "; beside it is " + single + ", a model by itself: remove the one that is old"
}

// stampOf is the present state of a local file.
func stampOf(path string) (id source.Identity, err error) {
	st, err := os.Stat(path)
	if err != nil {
		return id, err
	}
	own, ok := st.Sys().(*syscall.Stat_t)
	if !ok {
		return id, errs.New(errs.ErrNotSupported, "no inode")
	}
	return source.Identity{Device: uint64(own.Dev), Inode: own.Ino, Size: own.Size, Modified: own.Mtim.Nano(),
		Changed: own.Ctim.Nano()}, nil
}

// fileOfIndex is the file that an index divides into shards.
func fileOfIndex(index string) string {
	i := strings.LastIndex(index, suffix+".")
	if i < 0 {
		return index
	}
	return index[:i+len(suffix)]
}
