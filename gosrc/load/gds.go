package load

// This file reads a load's local files with GPUDirect Storage.

import (
	"context"
	"sync/atomic"
	"unsafe"

	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/device/cuda"
	"github.com/overwire/overwire/gosrc/device/cuda/queue"
	"github.com/overwire/overwire/gosrc/device/gds"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/source"
)

// gdsReads holds one load's use of GPUDirect Storage.
type gdsReads struct {
	by    []device.Reader // indexed by source; nil means through the host
	files []*gds.File
	undo  func() // unregisters the staging memory
	gpu   *cuda.Device
	base  unsafe.Pointer // start of the staging memory
	bytes atomic.Int64   // bytes read by GPUDirect Storage
	why   string         // why some sources are read through the host, "" if none are
}

// openGDS prepares the load's local files for GPUDirect Storage. Files that do not support it are read through the
// host.
func openGDS(l *Loading, q *queue.Queue) (*gdsReads, error) {
	base, n, err := q.StagingMemory()
	if err != nil {
		return nil, err
	}
	d := &gdsReads{by: make([]device.Reader, len(l.model.srcs)), gpu: l.target.GPU, base: base, undo: func() {}}
	err = d.gpu.WithContext(func() error {
		for i, s := range l.model.srcs {
			facts := s.Facts()
			switch {
			case facts.View != nil:
				continue
			case facts.File == nil:
				d.why = errs.RedactURI(s.URI()) + " is not a local file"
				continue
			case l.model.ix.Sources[i].Overwire():
				d.why = errs.RedactURI(s.URI()) + " has checksums, which are compared on the host"
				continue
			}
			var f *gds.File
			err := facts.File.WithFD(func(fd int) (err error) {
				f, err = gds.Open(fd)
				return err
			})
			if err != nil {
				d.why = err.Error()
				continue
			}
			d.files = append(d.files, f)
			d.by[i] = &gdsFile{d, f, s}
		}
		if d.files != nil {
			d.undo = gds.Register(base, n)
		}
		return nil
	})
	return d, err
}

// closeReads closes the files and unregisters the memory after the last read. d may be nil.
func (d *gdsReads) closeReads() {
	if d == nil {
		return
	}
	end := func() error {
		d.undo()
		for _, f := range d.files {
			f.Close()
		}
		return nil
	}
	if d.gpu.WithContext(end) != nil { // fails only if the GPU is lost
		_ = end()
	}
}

// A gdsFile is one source. It implements device.Reader.
type gdsFile struct {
	*gdsReads
	file *gds.File
	src  source.Source
}

func (f *gdsFile) ReadInto(ctx context.Context, dst unsafe.Pointer, n, off int64) error {
	at := int64(uintptr(dst) - uintptr(f.base))
	for n > 0 {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		var got int64
		err := f.gpu.WithContext(func() (err error) {
			got, err = f.file.ReadInto(f.base, at, n, off)
			return err
		})
		if err == nil && got == 0 {
			err = errs.New(errs.ErrCorrupt, "truncated: the file had %d bytes when it was opened", f.src.Size())
		}
		if err != nil {
			return &errs.At{Verb: "read", Source: f.src.URI(), Chunk: -1, Offset: off, Err: err}
		}
		at, off, n = at+got, off+got, n-got
		f.bytes.Add(got)
	}
	return nil
}
