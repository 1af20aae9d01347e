package delta

// This file reads and writes files of deltas, whole.

import (
	"bytes"
	"context"
	"os"
	"sync"

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
	return atomicfile.With(path, func(to *os.File) error { return writeAll(ctx, to, pieces) })
}

// writeAll writes pieces one after the other into an empty file. Several workers each
// gather many of them, and write those at once.
func writeAll(ctx context.Context, to *os.File, pieces [][]byte) error {
	const most, workers = 4 << 20, 8
	type part struct {
		lo, hi    int
		at, bytes int64
	}
	var parts []part
	at := int64(0)
	for i, p := range pieces {
		n := int64(len(p))
		if last := len(parts) - 1; last >= 0 && parts[last].bytes+n <= most {
			parts[last].hi++
			parts[last].bytes += n
		} else {
			parts = append(parts, part{i, i + 1, at, n})
		}
		at += n
	}
	buffers := sync.Pool{New: func() any { return new(bytes.Buffer) }}
	return spawn.Each(ctx, "delta write", workers, len(parts), func(i int) error {
		p := parts[i]
		b := pieces[p.lo]
		if p.hi-p.lo > 1 {
			buffer := buffers.Get().(*bytes.Buffer)
			defer buffers.Put(buffer)
			buffer.Reset()
			buffer.Grow(most)
			for _, piece := range pieces[p.lo:p.hi] {
				buffer.Write(piece)
			}
			b = buffer.Bytes()
		}
		_, err := to.WriteAt(b, p.at)
		return err
	})
}
