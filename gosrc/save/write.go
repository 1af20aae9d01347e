package save

import (
	"context"
	"os"

	"github.com/overwire/overwire/gosrc/codec"
	"github.com/overwire/overwire/gosrc/codec/x16"
	"github.com/overwire/overwire/gosrc/fault"
	"github.com/overwire/overwire/gosrc/format/overwire"
	"github.com/overwire/overwire/gosrc/internal/atomicfile"
	"github.com/overwire/overwire/gosrc/internal/ordered"
	"github.com/overwire/overwire/gosrc/internal/spawn"
	"github.com/overwire/overwire/gosrc/job"
	"github.com/overwire/overwire/gosrc/tensor"
	"github.com/zeebo/xxh3"
)

// A writer is one save: some files that appear together.
type writer struct {
	spec    Spec
	job     *job.Job
	threads int
}

func newWriter(spec Spec, j *job.Job) *writer {
	if j == nil {
		j = job.New("save")
	}
	return &writer{spec: spec, job: j, threads: threads(spec.Threads)}
}

// A part is one file of a save.
type part struct {
	path     string
	metadata map[string]string
	items    []*item
	blob     []byte // not tensors but these bytes: an index.json, a copied file
}

// save writes the files and publishes them together; the last one is what
// readers look for. Nothing remains of a save that fails.
func (w *writer) save(ctx context.Context, parts []part) (rep Report, err error) {
	if len(parts) == 0 {
		return rep, nil
	}
	for _, p := range parts {
		if tensorizer(p.path) {
			for _, t := range p.items {
				t.form, t.of = plain, nil
			}
		}
	}
	w.count(parts, &rep)
	if err := listable(parts); err != nil {
		return Report{}, err
	}
	if err := w.beside(ctx, parts); err != nil {
		return Report{}, err
	}
	if remote(w.spec.Path) {
		return w.saveFar(ctx, parts, rep)
	}
	if err := w.room(parts); err != nil {
		return Report{}, err
	}
	like := w.like(parts)
	var targets []*atomicfile.Target
	defer func() {
		for _, t := range targets {
			t.Drop()
		}
		if err != nil {
			rep = Report{}
		}
	}()
	for _, p := range parts {
		t, err := atomicfile.New(w.spec.fs, p.path, like)
		if err != nil {
			return rep, err
		}
		targets = append(targets, t)
		size := int64(len(p.blob))
		if p.blob != nil {
			err = t.Write(p.blob, 0)
		} else if tensorizer(p.path) {
			size, err = w.tensors(ctx, onDisk{t}, t.Path, p.items)
		} else {
			f := &fileWriter{writer: w, output: t, path: t.Path, part: p}
			size, err = f.write(ctx)
		}
		if err != nil {
			return rep, err
		}
		if err := w.finish(ctx, t, size); err != nil {
			return rep, err
		}
		rep.BytesOut += size
		rep.Files = append(rep.Files, p.path)
	}
	if err := cancelled(ctx); err != nil {
		return rep, err
	}
	old := w.replaced(targets)
	if err := atomicfile.Publish(w.spec.fs, targets); err != nil {
		return rep, err
	}
	if err := w.retire(old); err != nil {
		return rep, err
	}
	rep.Ratio = 1
	if rep.BytesIn > 0 {
		rep.Ratio = float64(rep.BytesOut) / float64(rep.BytesIn)
	}
	return rep, nil
}

// like is the file whose mode new files get: one of the model that is replaced. A
// private model stays private, in however many files.
func (w *writer) like(parts []part) string {
	for _, path := range []string{parts[len(parts)-1].path, w.spec.Path, indexPath(w.spec.Path), w.spec.Like} {
		if real, err := atomicfile.Follow(path); err == nil {
			if st, err := os.Lstat(real); err == nil && st.Mode().IsRegular() {
				return real
			}
		}
	}
	return ""
}

// finish waits for the disk, which may take seconds, but not longer than for
// a cancel: the sync then ends alone, on a file that has no name any more.
func (w *writer) finish(ctx context.Context, t *atomicfile.Target, size int64) error {
	done := make(chan error, 1)
	path := t.Path
	f := t.Hand() // closes the file; t has only the name now
	spawn.Go("save.sync", func() {
		err := fault.New(fault.ErrEngine, "sync did not end")
		defer func() { done <- err }()
		err = f.Finish(size)
		f.Drop()
	})
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return wrap("save", path, "", -1, cancelled(ctx))
	}
}

func (w *writer) count(parts []part, rep *Report) {
	for _, p := range parts {
		for _, t := range p.items {
			rep.Tensors++
			rep.BytesIn += t.bytes
			switch t.form {
			case compressed:
				rep.Compressed++
			case alias:
				rep.Aliases++
			}
		}
	}
	w.job.TotalBytes.Store(rep.BytesIn)
	w.job.TotalTensors.Store(int64(rep.Tensors))
}

// room refuses a save that cannot fit, where the file system can tell: old and
// new file are there together until the rename. For compressed tensors it goes
// by their samples, a little in the writer's favour: a disk that fills up
// later is an error all the same.
func (w *writer) room(parts []part) error {
	var need float64
	for _, p := range parts {
		need += float64(len(p.blob))
		for _, t := range p.items {
			switch t.form {
			case plain:
				need += float64(t.bytes)
			case compressed:
				need += float64(t.bytes) * t.expect * 0.97
			}
		}
	}
	dir := atomicfile.Folder(parts[0].path)
	if real, err := atomicfile.Follow(parts[0].path); err == nil {
		dir = atomicfile.Folder(real)
	}
	if free, ok := w.spec.fs.Free(dir); ok && float64(free) < need {
		return &fault.At{Verb: "save", Source: w.spec.Path, Chunk: -1, Offset: -1,
			Err: fault.New(fault.ErrIO, "no space left: about %d bytes are needed and %d are free in %s", int64(need), free, dir)}
	}
	return nil
}

// An output takes the bytes of one file.
type output interface {
	// Write puts bytes at an offset; it is safe in parallel.
	Write(p []byte, off int64) error
	// Skip says that nobody will write [lo, hi): it holds zeros.
	Skip(lo, hi int64) error
}

// fileWriter writes one file of tensors.
type fileWriter struct {
	*writer
	output
	path   string
	part   part
	order  []*item          // in the order of their data
	lay    *overwire.Layout // of a container; nil: a plain file
	front  []byte           // the header of a plain file
	start  int64            // where the data begin
	pos    int64            // end of what has a place
	tasks  []task
	slots  []slot
	hasher xxh3.Hasher
	enc    []x16.Encoder // one a worker
}

// A task is one chunk to be written; or, with n 0, a whole tensor to be hashed
// first, since the order of its chunks is not that of its bytes.
type task struct {
	t            *item
	part         int32
	n            int32
	off          int64 // in the part
	chunk        int   // its record
	begins, ends bool  // the tensor's first chunk, its last
}

// A slot holds what belongs to a task between its reading and its writing.
type slot struct {
	data []byte // logical bytes
	out  []byte // stored bytes: data, or enc
	buf  []byte // memory for data, if it needs any
	enc  []byte // memory for out
	at   int64  // its place in the file
}

// write returns the size of the file.
func (f *fileWriter) write(ctx context.Context) (int64, error) {
	if err := f.plan(); err != nil {
		return 0, wrap("save", f.path, "", -1, err)
	}
	f.pos = f.start
	window := 2*f.threads + 4
	f.slots = make([]slot, window)
	f.enc = make([]x16.Encoder, f.threads)
	o := ordered.Tasks{
		N: len(f.tasks), Window: window, Workers: f.threads,
		Work: func(worker, k int) error {
			c := f.tasks[k]
			if err := f.encode(ctx, worker, k); err != nil {
				return wrap("save", f.path, c.t.name, -1, err)
			}
			return nil
		},
		Turn:  f.place,
		Flush: f.flush,
	}
	if err := o.Run(ctx, "save.encode"); err != nil {
		return 0, wrap("save", f.path, "", -1, err)
	}
	f.slots, f.enc = nil, nil
	front, size, err := f.seal()
	if err != nil {
		return 0, wrap("save", f.path, "", -1, err)
	}
	return size, f.output.Write(front, 0)
}

// encode reads task k and makes its stored bytes.
func (f *fileWriter) encode(ctx context.Context, worker, k int) error {
	c, s := &f.tasks[k], &f.slots[k%len(f.slots)]
	t := c.t
	if c.n == 0 {
		_, err := t.hashAll(ctx)
		return err
	}
	var err error
	if m, ok := t.body.(memory); ok && t.parts <= 1 {
		s.data = m[c.off : c.off+int64(c.n)]
	} else {
		if cap(s.buf) < int(c.n) {
			s.buf = make([]byte, max(int(c.n), int(min(f.spec.ChunkBytes, t.bytes))))
		}
		if s.data, err = t.gather(ctx, s.buf[:c.n], int64(c.part), c.off); err != nil {
			return err
		}
	}
	s.out = s.data
	if f.lay == nil {
		return nil
	}
	ch := &f.lay.Chunks[c.chunk]
	if t.form == compressed {
		if cap(s.enc) == 0 {
			s.enc = make([]byte, 0, int(c.n)+int(c.n)/64+4096)
		}
		out, seg, ok := f.enc[worker].Encode(s.enc[:0], s.data, t.transform)
		if ok && len(out) < len(s.data) {
			s.out, s.enc = out, out
			ch.Codec, ch.Transform, ch.SegTiles = tensor.CodecX16, t.transform, seg
		}
	}
	ch.Sum = codec.Sum(s.out)
	return nil
}

// place gives task k its offset, and the hash its bytes.
func (f *fileWriter) place(k int) error {
	c, s := &f.tasks[k], &f.slots[k%len(f.slots)]
	t := c.t
	if c.n == 0 {
		return nil
	}
	if c.begins {
		f.hasher.Reset()
	}
	// A source that has a hash is held to it, even when the new file has none.
	// (A tensor in several parts is hashed by a task of its own, or keeps its
	// source's hash: its chunks do not come in the order of its bytes.)
	if !t.hashed && (f.lay != nil || t.known != nil) && t.parts == 1 {
		_, _ = f.hasher.Write(s.data)
		if c.ends {
			t.hash, t.hashed = sum128(&f.hasher), true
			if t.known != nil && t.hash != t.known.Hash {
				return wrap("save", "", t.name, -1,
					fault.New(fault.ErrCorrupt, "the bytes read are not those that were saved (XXH3-128 differs)"))
			}
		}
	}
	if c.ends {
		f.job.Tensors.Add(1)
	}
	if f.lay == nil {
		s.at = f.pos
		f.pos += int64(len(s.out))
		return nil
	}
	var err error
	if s.at, err = f.lay.Place(c.chunk, uint32(len(s.out))); err != nil {
		return err
	}
	gap := f.pos
	f.pos = s.at + int64(len(s.out))
	return f.output.Skip(gap, s.at)
}

// flush writes task k.
func (f *fileWriter) flush(k int) error {
	c, s := &f.tasks[k], &f.slots[k%len(f.slots)]
	if c.n == 0 {
		return nil
	}
	if err := f.output.Write(s.out, s.at); err != nil {
		return wrap("save", f.path, c.t.name, -1, err)
	}
	f.job.Bytes.Add(int64(c.n))
	s.data, s.out = nil, nil
	return nil
}
