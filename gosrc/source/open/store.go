package open

// This file writes, lists and removes objects of stores.

import (
	"context"
	"errors"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/modelfiles"
	"github.com/overwire/overwire/gosrc/internal/regular"
	"github.com/overwire/overwire/gosrc/source"
)

// A store has the operations of a scheme that supports writing. Local files are handled by package save.
type store struct {
	open    func(ctx context.Context, uri string, opt source.Options) (source.Source, error)
	create  func(ctx context.Context, uri string, opt source.Options, limit int64) (source.Draft, error)
	remove  func(ctx context.Context, uri string, opt source.Options) error
	walk    func(ctx context.Context, uri string, opt source.Options, below bool) ([]source.Entry, error)
	presign func(ctx context.Context, uri string, opt source.Options, expires time.Duration) (string, error)
}

// Writable reports whether objects can be written at a URI that is not a local file.
func Writable(uri string) bool {
	_, ok := stores[source.Scheme(uri)]
	return ok
}

// Create begins an object of at most limit bytes; see source.Draft.
func Create(ctx context.Context, uri string, opt source.Options, limit int64) (source.Draft, error) {
	s, err := storeOf("save", uri)
	if err != nil {
		return nil, err
	}
	return s.create(ctx, uri, withoutCache(opt), limit)
}

// Remove deletes an object. It succeeds if the object does not exist.
func Remove(ctx context.Context, uri string, opt source.Options) error {
	s, err := storeOf("save", uri)
	if err != nil {
		return err
	}
	return s.remove(ctx, uri, withoutCache(opt))
}

// An Occupant is the kind of file or folder that already exists at a path.
type Occupant string

// The kinds of occupants. Objects and folders of a store are Taken, like local files.
const (
	Free  Occupant = "" // nothing, or an empty folder
	Taken Occupant = "file"
	Full  Occupant = "folder" // a local folder with files in it
)

// Occupied returns the kind of file or folder that already exists at a path.
func Occupied(ctx context.Context, path string, opt source.Options) (Occupant, error) {
	if Writable(path) {
		return occupiedRemote(ctx, path, opt)
	}
	info, err := regular.FindTarget(path)
	if info == nil {
		return Free, errs.In("save", path, err)
	}
	if !info.IsDir() {
		return Taken, nil
	}
	if list, err := os.ReadDir(path); err != nil || len(list) == 0 {
		return Free, errs.In("save", path, errs.FromOS(err))
	}
	return Full, nil
}

func occupiedRemote(ctx context.Context, uri string, opt source.Options) (Occupant, error) {
	if !source.Folder(uri) {
		s, err := With(opt).Open(ctx, uri)
		if err == nil {
			_ = s.Close()
			return Taken, nil
		}
		if !errors.Is(err, errs.ErrNotFound) {
			return Free, err
		}
		if strings.HasSuffix(uri, modelfiles.Extension) {
			return Free, nil
		}
	}
	_, err := List(ctx, source.Directory(uri), opt)
	switch {
	case err == nil:
		return Taken, nil
	case errors.Is(err, errs.ErrNotFound), errors.Is(err, errs.ErrNotSupported):
		return Free, nil
	}
	return Free, err
}

// List returns the URIs of the objects in a folder, sorted, without those in subfolders. It returns
// errs.ErrNotFound for an empty folder and errs.ErrNotSupported for a store without folders.
func List(ctx context.Context, uri string, opt source.Options) ([]string, error) {
	files, err := walkStore(ctx, uri, opt, false)
	var uris []string
	for _, f := range files {
		uris = append(uris, source.Beside(source.Directory(uri), f.Name))
	}
	return uris, err
}

func walkStore(ctx context.Context, uri string, opt source.Options, below bool) ([]source.Entry, error) {
	s, ok := stores[source.Scheme(uri)]
	if !ok || s.walk == nil {
		return nil, errs.In("open", uri, errs.New(errs.ErrNotSupported, "this store does not list folders"))
	}
	if err := checkSound("open", uri); err != nil {
		return nil, err
	}
	return s.walk(ctx, uri, withoutCache(opt), below)
}

// Presign returns a URL with which anyone can read an object until it expires. The URL is a secret.
func Presign(ctx context.Context, uri string, opt source.Options, expires time.Duration) (string, error) {
	if err := checkSound("presign", uri); err != nil {
		return "", err
	}
	s := stores[source.Scheme(uri)]
	if s.presign == nil {
		return "", errs.In("presign", uri, errs.New(errs.ErrNotSupported, "only s3:// has presigned URLs"))
	}
	return s.presign(ctx, uri, withoutCache(opt), expires)
}

// Put writes a small object, then removes the objects named by stale. Once data is no longer in use, it calls
// failed with the error, if any, and then cleans up the store.
func Put(ctx context.Context, uri string, opt source.Options, data []byte, stale []string,
	failed func(error)) (err error) {
	d, err := Create(ctx, uri, opt, int64(len(data)))
	if err != nil {
		return err
	}
	defer func() {
		failed(err)
		d.Drop()
	}()
	if err := d.Write(data, 0); err != nil {
		return err
	}
	if err := d.Finish(int64(len(data))); err != nil {
		return err
	}
	if err := d.Publish(); err != nil {
		return err
	}
	for _, old := range stale {
		if err := Remove(ctx, old, opt); err != nil {
			return err
		}
	}
	return nil
}

// PutOnce is Put for an object that must not exist yet. If several writers run concurrently, one succeeds and
// the others get errs.ErrArgument. In a store without conditional writes (If-None-Match), the last writer wins.
// Only s3:// is supported; other schemes return errs.ErrNotSupported.
func PutOnce(ctx context.Context, uri string, opt source.Options, data []byte, failed func(error)) error {
	if source.Scheme(uri) != "s3" {
		return errs.In("save", uri, errs.New(errs.ErrNotSupported, "only s3:// can refuse to replace an object"))
	}
	opt.Once = true
	return Put(ctx, uri, opt, data, nil, failed)
}

// withoutCache returns opt without the cache option, for calls that must reach the store.
func withoutCache(opt source.Options) source.Options {
	if _, ok := opt.Storage["cache"]; ok {
		opt.Storage = maps.Clone(opt.Storage)
		delete(opt.Storage, "cache")
	}
	return opt
}

func storeOf(verb, uri string) (store, error) {
	s, ok := stores[source.Scheme(uri)]
	if err := RecipeOf(source.Scheme(uri)); err != nil {
		return s, errs.In(verb, uri, err)
	}
	if !ok {
		return s, errs.In(verb, uri, errs.New(errs.ErrNotSupported,
			"%s:// is read-only: write to a local file or to %s://", source.Scheme(uri),
			strings.Join(slices.Sorted(maps.Keys(stores)), ":// and ")))
	}
	return s, checkSound(verb, uri)
}
