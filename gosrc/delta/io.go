package delta

// This file reads and writes whole delta files.

import (
	"bytes"
	"cmp"
	"context"
	"sync"

	"github.com/overwire/overwire/gosrc/convert"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/format"
	"github.com/overwire/overwire/gosrc/internal/hostmem"
	"github.com/overwire/overwire/gosrc/internal/spawn"
	"github.com/overwire/overwire/gosrc/job"
	"github.com/overwire/overwire/gosrc/save"
	"github.com/overwire/overwire/gosrc/save/publish"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/source/open"
)

// stem is the base name of a delta's files in a folder.
const stem = "delta"

// Read reads a delta and checks every byte. uri is a file or object, a folder of shards, or an index.json. The File
// holds the stored bytes, not the decoded ones. Read refuses a delta that does not fit into the host's available
// memory.
func Read(ctx context.Context, uri string, opt source.Options) (*File, error) {
	stores := open.With(opt)
	lists := format.Options{List: stores.List}
	folder := format.RemoteFolder(ctx, source.LocationOf(uri), stores.OpenLike, lists)
	set, err := format.Resolve(ctx, source.LocationOf(cmp.Or(folder, uri)), stores.OpenLike, lists)
	if err != nil {
		return nil, err
	}
	names := set.URIs
	srcs := make([]source.Source, len(names))
	defer func() {
		for _, s := range srcs {
			if s != nil {
				_ = s.Close()
			}
		}
	}()
	err = spawn.Each(ctx, "delta open", 8, len(names), func(i int) (err error) {
		srcs[i], err = stores.Open(ctx, names[i])
		return err
	})
	if err != nil {
		return nil, err
	}
	available := hostmem.Available()
	for need, i := int64(0), 0; i < len(srcs); i++ {
		size := srcs[i].Size()
		if need += min(size, available+1); size > available || need > available {
			return nil, errs.Locate("delta", uri, "", -1,
				&errs.Memory{Where: "host", Asked: max(need, size), Free: available, Total: available, For: "a delta",
					Err: "available"})
		}
	}
	files := make([]*File, len(srcs))
	for i, s := range srcs {
		if files[i], err = readOne(ctx, names[i], s); err != nil {
			return nil, err
		}
	}
	return joinFiles(uri, files, set.Shards)
}

func readOne(ctx context.Context, uri string, src source.Source) (*File, error) {
	const part = 8 << 20
	size := src.Size()
	b := make([]byte, size)
	err := spawn.Each(ctx, "delta read", 8, int((size+part-1)/part), func(i int) error {
		lo := int64(i) * part
		return src.ReadAt(ctx, b[lo:min(size, lo+part)], lo)
	})
	if err != nil {
		return nil, errs.Locate("read", uri, "", -1, err)
	}
	f, err := parseFile(ctx, uri, b)
	return f, errs.Locate("delta", uri, "", -1, err)
}

// Write writes the delta to spec.Path, in shards with at most spec.Shard bytes of chunks. All files appear together.
// If the path is a folder, the auxiliary files of the folder model are copied to it (convert.WritePrewritten), unless
// model is "".
func Write(ctx context.Context, j *job.Job, f *File, model string, spec save.Spec) (Report, error) {
	shards, tables, err := splitFile(f, spec.Shard)
	if err != nil {
		return Report{}, errs.Locate("save", spec.Path, "", -1, err)
	}
	files := make([]publish.Prewritten, len(shards))
	f.Size = 0
	for k, s := range shards {
		pieces, err := layOut(s, tables[k])
		if err != nil {
			return Report{}, errs.Locate("save", spec.Path, "", -1, err)
		}
		f.Size += s.Size
		files[k] = publish.Prewritten{Bytes: s.Size, Tensors: s.Report().Bytes}
		for i := range s.Tensors {
			files[k].Names = append(files[k].Names, s.Tensors[i].Name)
		}
		files[k].Fill = func(ctx context.Context, write func(p []byte, off int64) error) error {
			return writeAll(ctx, write, pieces)
		}
	}
	layout, err := convert.WritePrewritten(ctx, j, model, stem, files, spec)
	r := f.Report()
	r.Files = layout.Files
	return r, err
}

// writeAll writes the pieces contiguously. Each of several workers gathers many pieces and writes them with one call.
func writeAll(ctx context.Context, write func(p []byte, off int64) error, pieces [][]byte) error {
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
		return write(b, p.at)
	})
}
