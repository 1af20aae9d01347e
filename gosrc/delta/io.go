package delta

// This file reads and writes files of deltas, whole.

import (
	"bytes"
	"context"
	"os"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/atomicfile"
	"github.com/overwire/overwire/gosrc/internal/spawn"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/source/open"
)

// Read reads a file or object whole, and parses it.
func Read(ctx context.Context, uri string, opt source.Options) (*File, error) {
	src, err := open.With(opt)(ctx, uri)
	if err != nil {
		return nil, err
	}
	defer src.Close()
	const part = 8 << 20
	size := src.Size()
	b := make([]byte, size)
	err = spawn.Each(ctx, "delta read", 8, int((size+part-1)/part), func(i int) error {
		lo := int64(i) * part
		return src.ReadAt(ctx, b[lo:min(size, lo+part)], lo)
	})
	if err != nil {
		return nil, errs.Locate("read", uri, "", -1, err)
	}
	return Parse(ctx, uri, b)
}

// Write writes a file, which appears complete or not at all; failed is called with an
// error of a store before the store is cleaned up.
func (f *File) Write(ctx context.Context, path string, opt source.Options, failed func(error)) error {
	pieces, err := f.Layout()
	if err != nil {
		return errs.Locate("save", path, "", -1, err)
	}
	if source.Remote(path) {
		return open.Put(ctx, path, opt, bytes.Join(pieces, nil), nil, failed)
	}
	return atomicfile.With(path, func(to *os.File) error {
		for _, p := range pieces {
			if ctx.Err() != nil {
				return errs.FromOS(context.Cause(ctx))
			}
			if _, err := to.Write(p); err != nil {
				return err
			}
		}
		return nil
	})
}
