// Package open opens a URI as a Source. Explicit tables map schemes to packages.
package open

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"unicode/utf8"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/knob"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/source/cache"
	"github.com/overwire/overwire/gosrc/source/fed"
	"github.com/overwire/overwire/gosrc/source/file"
	"github.com/overwire/overwire/gosrc/source/http"
	"github.com/overwire/overwire/gosrc/source/pipe"
)

// schemes maps a scheme to the function that opens it; stores has the other schemes. A name without a scheme is
// a local path.
var schemes = map[string]func(ctx context.Context, hub *http.Hub, uri string, opt source.Options) (source.Source,
	error){
	"": func(_ context.Context, _ *http.Hub, path string, _ source.Options) (source.Source, error) {
		return wrapSource(file.Open(path))
	},
	"file": func(_ context.Context, _ *http.Hub, uri string, _ source.Options) (source.Source, error) {
		path, err := source.FilePath(uri)
		if err != nil {
			return nil, err
		}
		return wrapSource(file.Open(path))
	},
	"http":  overHTTP,
	"https": overHTTP,
	"hf":    ofHub,
}

func overHTTP(ctx context.Context, hub *http.Hub, uri string, opt source.Options) (source.Source, error) {
	return wrapSource(hub.Open(ctx, uri, opt))
}

// ofHub opens a file of the hub. It reads the huggingface_hub cache if the file is there at the same commit, or
// if the hub cannot be reached.
func ofHub(ctx context.Context, hub *http.Hub, uri string, opt source.Options) (source.Source, error) {
	if path := hub.Cached(uri, opt.Env); path != "" {
		return wrapSource(file.Open(path))
	}
	if err := hub.Missing(uri, opt.Env); err != nil {
		return nil, errs.In("open", uri, err)
	}
	remote, err := hub.Open(ctx, uri, opt)
	if err != nil && ctx.Err() == nil && hub.Away(uri, opt.Env, err) {
		return ofHub(ctx, hub, uri, opt) // does not ask the hub again
	}
	if err != nil {
		return nil, err
	}
	if path := hub.Cached(uri, opt.Env); path != "" { // the commit is known now
		near, err := file.Open(path)
		if err == nil && near.Size() == remote.Size() {
			_ = remote.Close()
			return near, nil
		}
		if err == nil {
			_ = near.Close()
		}
	}
	return remote, nil
}

// wrapSource prevents a nil pointer from becoming a non-nil Source.
func wrapSource[S source.Source](s S, err error) (source.Source, error) {
	if err != nil {
		return nil, err
	}
	return s, nil
}

// Stores opens and lists the URIs of one load with the caller's options. Options do not apply to local files.
// All files of one hf:// repository come from one commit. If a setting names an external downloader, it fetches
// http and https URIs. A cache, selected by the option "cache" or by a setting, stores whole objects of any
// store; see package cache. Stores is safe for concurrent use.
type Stores struct {
	opt   source.Options // does not contain the cache option
	local cache.Folder   // Path is "" if there is no cache
	own   bool           // never use an external downloader
	hub   http.Hub
	away  atomic.Bool // set once a store cannot be reached
}

// With returns the stores of one load.
func With(opt source.Options) *Stores { return &Stores{opt: withoutCache(opt), local: cacheOf(opt)} }

// Own is like With, but uses no cache, and no external downloader because that may be overwire itself.
func Own(opt source.Options) *Stores { return &Stores{opt: opt, own: true} }

// Open opens a URI.
func (s *Stores) Open(ctx context.Context, uri string) (source.Source, error) {
	return s.OpenLike(ctx, uri, source.Outline{})
}

// OpenLike opens a URI. outline describes what the reader expects of the object.
func (s *Stores) OpenLike(ctx context.Context, uri string, outline source.Outline) (source.Source, error) {
	opt := s.opt
	opt.Outline = outline
	if s.local.Path == "" || !source.Remote(uri) {
		return s.openFed(ctx, uri, opt)
	}
	if isImmutable(uri) || s.away.Load() {
		last, err := s.local.Last(ctx, uri)
		// The cached response may be outdated, even at a fixed commit: the object may exist now, or the caller
		// may be permitted to read it now.
		if last != nil || err != nil && (s.away.Load() || !errors.Is(err, errs.ErrNotFound)) {
			if last != nil && s.away.Load() {
				cache.CountAway()
			}
			return wrapSource(last, err)
		}
	}
	src, err := s.openFed(ctx, uri, opt)
	switch {
	case err == nil && src.Facts().File == nil:
		if _, isFed := src.(*fed.Source); isFed {
			return s.local.FindCopy(ctx, src) // anyone in the Ray cluster may have chosen its bytes: keep none
		}
		return s.local.Keep(ctx, src)
	case errors.Is(err, errs.ErrIO) || errors.Is(err, errs.ErrTimeout):
		last, lastErr := s.local.Last(ctx, uri)
		if last == nil && lastErr == nil || ctx.Err() != nil {
			return nil, err
		}
		if !s.away.Swap(true) {
			source.Notice(fmt.Sprintf("%s: the store cannot be reached (%s): using the copy in cache %s",
				errs.RedactURI(uri), errs.Message(err), s.local.Path))
		}
		if last != nil {
			cache.CountAway()
		}
		return wrapSource(last, lastErr)
	case errors.Is(err, errs.ErrNotFound):
		s.local.Absent(uri)
	}
	return src, err
}

// List returns the objects of a folder, like the function List. If the store cannot be reached, it returns the
// listing that the cache recorded.
func (s *Stores) List(ctx context.Context, uri string) ([]string, error) {
	uris, err := List(ctx, uri, s.opt)
	switch {
	case s.local.Path == "" || ctx.Err() != nil:
	case err == nil:
		s.local.KeepList(uri, uris)
	case errors.Is(err, errs.ErrIO) || errors.Is(err, errs.ErrTimeout):
		if last := s.local.LastList(uri); last != nil {
			return last, nil
		}
	}
	return uris, err
}

// Walk returns the folder's URI and its sorted files, including those in subfolders. It uses no cache. The returned URI
// of an hf:// repository contains the commit of the list. The errors are those of the function List.
func (s *Stores) Walk(ctx context.Context, uri string) (at string, files []source.Entry, err error) {
	if source.Scheme(uri) == "hf" {
		return s.hub.Walk(ctx, uri, s.opt)
	}
	dir := source.Directory(uri)
	if scheme := source.Scheme(uri); (scheme != "http" && scheme != "https") || Downloaded(uri) {
		files, err = walkStore(ctx, uri, s.opt, true)
	} else if err = checkSound("open", uri); err == nil {
		files, err = http.Walk(ctx, dir, s.opt)
	}
	return dir, files, err
}

// openFed opens a URI at its store. Pieces of the object may come from the process's supplier.
func (s *Stores) openFed(ctx context.Context, uri string, opt source.Options) (source.Source, error) {
	src, err := s.openWhereItLies(ctx, uri, opt)
	if err != nil || !opt.Fed || !source.Remote(uri) {
		return src, err
	}
	return fed.Wrap(src, opt.StoreOf(source.Scheme(uri))), nil
}

// openWhereItLies opens a URI at its store.
func (s *Stores) openWhereItLies(ctx context.Context, uri string, opt source.Options) (source.Source, error) {
	if !s.own && Downloaded(uri) {
		return wrapSource(pipe.Open(ctx, knob.Downloader.Get(), uri, opt))
	}
	if err := checkSound("open", uri); err != nil && source.Remote(uri) {
		return nil, err
	}
	scheme := source.Scheme(uri)
	if fn := schemes[scheme]; fn != nil {
		return fn(ctx, &s.hub, uri, opt)
	}
	if fn := stores[scheme].open; fn != nil {
		return fn(ctx, uri, opt)
	}
	if err := RecipeOf(scheme); err != nil {
		return nil, errs.In("open", uri, err)
	}
	names := slices.AppendSeq(slices.Collect(maps.Keys(schemes)), maps.Keys(stores))
	slices.Sort(names)
	return nil, errs.In("open", uri, errs.New(errs.ErrNotSupported,
		"unknown scheme %q: expected one of %s (for other S3-compatible stores use s3 with an endpoint_url); "+
			"if this is a local path with :// in it, start it with ./",
		scheme, strings.Join(names[1:], ", "))) // the first is "", a local path
}

// RecipeOf returns an error for the scheme of a store that must be accessed through another scheme, and nil for
// all other schemes.
func RecipeOf(scheme string) error {
	if recipe := recipes[scheme]; recipe != "" {
		return errs.New(errs.ErrNotSupported, "%s:// is not supported directly: %s", scheme, recipe)
	}
	return nil
}

// recipes describe how to access these stores through other schemes.
var recipes = map[string]string{
	"gs": gcs, "gcs": gcs, "az": azure, "azure": azure, "abfs": azure, "abfss": azure,
	"adl": azure, "wasb": azure, "wasbs": azure,
}

const (
	gcs = "Google Cloud Storage supports S3: write s3://BUCKET/KEY, with storage_options endpoint_url " +
		"https://storage.googleapis.com, and an HMAC key as key and secret (project Settings, Interoperability)"
	azure = "Azure Blob Storage can be read over https, but not written to: write the URL of the blob, " +
		"https://ACCOUNT.blob.core.windows.net/CONTAINER/BLOB, followed by ? and a shared access signature for reading"
)

// cacheOf returns the cache folder of the option "cache" or of the setting. Its Path is "" if neither is set.
func cacheOf(opt source.Options) cache.Folder {
	dir, isGiven := opt.Storage["cache"]
	if !isGiven {
		dir = knob.Cache.Get()
	}
	if dir == "on" {
		home := cmp.Or(opt.Env["XDG_CACHE_HOME"], filepath.Join(opt.Env["HOME"], ".cache"))
		if dir = ""; filepath.IsAbs(home) {
			dir = filepath.Join(home, "overwire", "objects")
		}
	}
	return cache.Folder{Path: dir, Limit: int64(knob.CacheGB.Get()) * 1e9, StoreOf: opt.StoreOf}
}

// isImmutable reports whether a URI refers to an immutable state of an object: a commit of the hub, or an S3
// version other than "null", which is replaced in place.
func isImmutable(uri string) bool {
	r, ok := source.ParseHF(uri)
	_, version, _ := strings.Cut(uri, "?versionId=")
	return ok && http.IsCommit(r.Rev) || source.Scheme(uri) == "s3" && version != "" && version != "null"
}

// Downloaded reports whether an external downloader fetches a URI. The object then has no identity.
func Downloaded(uri string) bool {
	return knob.Downloader.Get() != "" && (source.Scheme(uri) == "http" || source.Scheme(uri) == "https")
}

// argvs is the number of URLs per run of the program. The size of its arguments is limited, usually to 2 MiB.
const argvs = 1000

// WithSizes is like With, for URIs of known sizes that are opened once each, in this order. If a setting names
// an external downloader and all URIs are http or https, one run of it fetches up to argvs of them. The caller
// calls rest at the end to close the sources that were fetched but not opened.
func WithSizes(uris []string, sizes []int64, opt source.Options) (
	dial func(ctx context.Context, uri string) (source.Source, error), rest func()) {
	program := knob.Downloader.Get()
	if program == "" || cacheOf(opt).Path != "" || slices.ContainsFunc(uris, func(u string) bool {
		return source.Scheme(u) != "http" && source.Scheme(u) != "https"
	}) {
		return With(opt).Open, func() {}
	}
	var srcs []*pipe.Source
	next := 0
	dial = func(ctx context.Context, _ string) (source.Source, error) {
		if next == len(srcs) {
			end := min(next+argvs, len(uris))
			more, err := pipe.Start(ctx, program, uris[next:end], sizes[next:end], opt)
			if err != nil {
				return nil, err
			}
			srcs = append(srcs, more...)
		}
		next++
		return srcs[next-1], nil
	}
	return dial, func() {
		for _, s := range srcs[next:] {
			_ = s.Close()
		}
	}
}

// checkSound refuses a remote URI that is not valid UTF-8, because programs escape such URIs differently.
func checkSound(verb, uri string) error {
	if utf8.ValidString(uri) {
		return nil
	}
	return errs.In(verb, uri, errs.New(errs.ErrArgument, "the URI is not valid UTF-8: write other bytes as %%XX"))
}
