package format

// This file opens the models that users name.

import (
	"context"
	"errors"
	"slices"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/spawn"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/tensor"
)

// OpenAll resolves names, opens every file with open, and indexes them. Where an
// index.json decides, the model's tensors are those that it lists, each of the file that it
// names. The files of a name are those of one moment: if its index.json was replaced
// meanwhile, they are opened again, once. sets are the files of each name. The caller
// closes the sources; if OpenAll fails, it has closed them.
func OpenAll(ctx context.Context, uris []string, open Opener, opt Options) (ix *tensor.Index, srcs []source.Source,
	sets []Files, err error) {
	if len(uris) == 0 {
		return nil, nil, nil, errs.New(errs.ErrArgument, "nothing to open")
	}
	var parts []*tensor.Index
	for _, uri := range uris {
		at := source.LocationOf(uri)
		part, opened, set, changed, err := openSet(ctx, at, open, opt)
		if changed {
			closeAll(opened)
			part, opened, set, changed, err = openSet(ctx, at, open, opt)
			if changed && err == nil {
				err = placeError(set.Index, source.Changed())
			}
		}
		srcs = append(srcs, opened...)
		if err != nil {
			closeAll(srcs)
			return nil, nil, nil, err
		}
		parts, sets = append(parts, part), append(sets, set)
	}
	if len(parts) > 1 {
		parts = withoutStale(ctx, sets, parts, open, opt)
	}
	ix, err = Join(parts)
	if err != nil {
		closeAll(srcs)
		return nil, nil, nil, err
	}
	return ix, srcs, sets, nil
}

func closeAll(srcs []source.Source) {
	for _, s := range srcs {
		_ = s.Close()
	}
}

// openSet opens the files of one name. changed says that what decided about the files was
// replaced meanwhile. The caller closes the sources, after an error, too.
func openSet(ctx context.Context, at source.Location, open Opener, opt Options) (ix *tensor.Index, srcs []source.Source,
	set Files, changed bool, err error) {
	set, err = Resolve(ctx, at, open, opt)
	if err != nil {
		return nil, nil, set, false, err
	}
	if set.Shards != nil && opt.Keys != nil {
		set.keepOnly(opt.Keys)
	}
	srcs, err = openSources(outlineOf(opt).In(ctx), set.URIs, open)
	if errors.Is(err, errs.ErrNotFound) && set.Index == "" {
		if dir := RemoteFolder(ctx, at, open, opt); dir != "" && !at.Folder {
			return openSet(ctx, source.LocationOf(dir), open, opt)
		}
	}
	if err != nil {
		return nil, srcs, set, set.wasReplaced(ctx, open, err), set.explainMissing(err)
	}
	// A store is asked about the index while the headers are read.
	seen := make(chan bool, 1)
	if set.Index == "" {
		seen <- false
	} else {
		spawn.Go("open.index", func() {
			is := false
			defer func() { seen <- is }()
			is = set.wasReplaced(ctx, open, nil)
		})
	}
	ix, err = Open(ctx, srcs, opt)
	changed = <-seen
	if err == nil && set.Shards != nil && !opt.Unlisted {
		if ix, err = set.Shards.Select(ix); err != nil {
			err = placeError(at.URI, err)
		}
	}
	return ix, srcs, set, changed, err
}

// keepOnly leaves those files that have one of the named tensors; see safetensors.Shards.Only.
func (f *Files) keepOnly(names []string) {
	few := f.Shards.Only(names)
	kept := make([]string, 0, len(few.Files))
	for i, name := range f.Shards.Files { // f.URIs[i] is where name lies
		if len(kept) < len(few.Files) && few.Files[len(kept)] == name {
			kept = append(kept, f.URIs[i])
		}
	}
	f.URIs, f.Shards = kept, &few
}

// Names returns the tensors that the index.json of each URI lists, without opening a
// shard. ok is false if one has no index.json.
func Names(ctx context.Context, uris []string, open Opener, opt Options) (names []string, ok bool, err error) {
	names = []string{}
	for _, uri := range uris {
		set, err := Resolve(ctx, source.LocationOf(uri), open, opt)
		if err != nil || set.Shards == nil {
			return nil, false, err
		}
		for _, w := range set.Shards.Weights {
			names = append(names, w.Name)
		}
	}
	return names, true, nil
}

// together is how many files are opened, or indexed, at once. A remote file
// costs round trips, a local one a core.
const together = 16

// openSources opens files. The caller closes them, even after an error, which is that of the
// first file that cannot be opened; those behind it are not waited for.
func openSources(ctx context.Context, files []string, open Opener) ([]source.Source, error) {
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
