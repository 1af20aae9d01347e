package save

import (
	"bytes"
	"context"
	"strings"
	"sync"

	"github.com/overwire/overwire/gosrc/fault"
	"github.com/overwire/overwire/gosrc/format/safetensors"
	"github.com/overwire/overwire/gosrc/format/tensors"
	"github.com/overwire/overwire/gosrc/internal/atomicfile"
	"github.com/overwire/overwire/gosrc/job"
	"github.com/zeebo/xxh3"
)

// tensorizer says whether a path names a file of tensorizer's.
func tensorizer(path string) bool { return strings.HasSuffix(path, ".tensors") }

// tensors writes a .tensors file: the index as long as it needs, the data of
// each tensor on a page. Tensors that come from such a file keep their types,
// modules and dtypes; others are those of a state dict. Each tensor is summed
// up, encrypted if the file is, and written by one worker. It returns the size
// of the file.
func (w *writer) tensors(ctx context.Context, to output, path string, items []*item) (int64, error) {
	key, err := tensors.KeyOf(ctx, w.spec.Storage.Encrypt)
	if err != nil {
		return 0, wrap("save", path, "", -1, err)
	}
	out := make([]tensors.Item, len(items))
	for i, t := range items {
		it, err := t.tensorizer()
		if err != nil {
			return 0, wrap("save", path, t.name, -1, err)
		}
		if it.Sealed = key != nil; key != nil && it.Bytes > 0 {
			it.Crypt = tensors.NewCrypt(it.Bytes, key.Derive)
		}
		out[i] = it
	}
	length := tensors.IndexBytes(out)
	at := tensors.Start(length)
	for i := range out {
		out[i].Record = at
		if out[i].Bytes > 0 {
			out[i].PadTo(tensors.Align)
		}
		at = out[i].Data() + out[i].Bytes
	}
	front, err := tensors.Front(out, 1, length)
	if err != nil {
		return 0, wrap("save", path, "", -1, err)
	}
	if err := to.Write(front, 0); err != nil {
		return 0, err
	}
	err = w.flow(ctx, to, path, items, out, key)
	if err != nil {
		return 0, err
	}
	return at + tensors.Tail, to.Write(make([]byte, tensors.Tail), at)
}

// tensorizer describes an item in the words of .tensors files.
func (t *item) tensorizer() (tensors.Item, error) {
	if t.record != nil {
		return *t.record, t.record.Check()
	}
	return tensors.NewItem(t.name, t.dtype, t.shape, t.bytes)
}

// flow writes tensors whose places are known: each is summed up, encrypted if it
// is to be, and written by one worker, its record last.
func (w *writer) flow(ctx context.Context, to output, path string, items []*item, out []tensors.Item, key *tensors.Key) error {
	flows := make([]tensors.Flow, len(items))
	for i, t := range items {
		flows[i] = w.oneTensor(to, path, t, &out[i], key)
	}
	_, local := to.(scattered)
	return tensors.Run(ctx, "save.tensors", w.threads, !local, flows)
}

// scattered is an output that takes bytes in any order, in no memory of its own.
type scattered interface{ scattered() }

// onDisk is an output that is a file of its own.
type onDisk struct{ *atomicfile.Target }

func (onDisk) scattered() {}

func (w *writer) oneTensor(to output, path string, t *item, it *tensors.Item, key *tensors.Key) tensors.Flow {
	data, end, whole := it.Data(), it.Data()+it.Bytes, xxh3.New()
	fail := func(err error) error { return wrap("save", path, t.name, -1, err) }
	put := func(p []byte) error {
		err := to.Write(p, data)
		data += int64(len(p))
		return err
	}
	var box []byte // what is encrypted, until it is a whole box
	seal := func(p []byte) error {
		for len(p) > 0 {
			if box == nil {
				box = make([]byte, 0, min(it.Bytes, tensors.ChunkBytes))
			}
			n := copy(box[len(box):cap(box)], p)
			box, p = box[:len(box)+n], p[n:]
			if len(box) == cap(box) || data+int64(len(box)) == end {
				it.Crypt.Seal(box, (data-it.Data())/tensors.ChunkBytes, key.Bytes)
				if err := put(box); err != nil {
					return err
				}
				box = box[:0]
			}
		}
		return nil
	}
	if it.Crypt == nil {
		seal = put
	}
	f := tensors.Flow{Sum: it.Summer(), Bytes: it.Bytes}
	if m, ok := t.body.(memory); ok {
		f.Memory = m
	} else {
		if s, ok := t.body.(*stored); ok {
			f.Step = s.block()
		}
		f.Next = func(ctx context.Context, buf []byte, off int64) ([]byte, error) {
			p, err := t.body.bytes(ctx, buf, off)
			return p, fail(err)
		}
	}
	f.Pass = func(p []byte) error {
		if t.known != nil {
			_, _ = whole.Write(p)
		}
		w.job.Bytes.Add(int64(len(p)))
		return fail(seal(p))
	}
	f.Done = func() error {
		box = nil
		if t.known != nil && t.bytes > 0 && sum128(whole) != t.known.Hash {
			return fail(fault.New(fault.ErrCorrupt, "the bytes read are not those that were saved (XXH3-128 differs)"))
		}
		w.job.Tensors.Add(1)
		return fail(to.Write(it.Finish(f.Sum), it.Record))
	}
	return f
}

// recordsOf gives items that come from .tensors files the words of their
// records.
func (m *model) recordsOf(ctx context.Context, items []*item) error {
	for k := range m.srcs {
		if !m.ix.Sources[k].Tensorizer {
			continue
		}
		head, err := safetensors.Head(ctx, m.srcs[k])
		if err != nil {
			return err
		}
		f, err := tensors.Read(ctx, m.srcs[k], head)
		if err == nil {
			err = f.ReadRecords(ctx, m.srcs[k])
		}
		if err != nil {
			return err
		}
		number := make(map[string]int, len(f.Entries))
		for i := range f.Entries {
			number[f.Entries[i].Name] = i
		}
		for i, t := range items {
			if int(m.ix.Tensors[i].Source) == k {
				e := &f.Entries[number[t.name]]
				t.record = &tensors.Item{Module: f.Records[number[t.name]].Module, Type: e.Type, Name: e.Name, Text: e.Text, Dims: e.Dims, Bytes: e.Bytes}
			}
		}
	}
	return nil
}

// sums proves source k, a .tensors file: every record says what the index says,
// the sums of every tensor are those of its bytes, and nothing else is there.
func (m *model) sums(ctx context.Context, j *job.Job, k int, rep *VerifyReport) error {
	src := m.srcs[k]
	head, err := safetensors.Head(ctx, src)
	if err != nil {
		return err
	}
	f, err := tensors.Read(ctx, src, head)
	if err != nil {
		return err
	}
	if err := f.ReadRecords(ctx, src); err != nil {
		return err
	}
	if err := f.Exact(ctx, src); err != nil {
		return err
	}
	number := make(map[string]int, len(f.Entries))
	for i := range m.ix.Tensors {
		if t := &m.ix.Tensors[i]; int(t.Source) == k {
			number[t.Name] = i
		}
	}
	var mu sync.Mutex
	c := newCache(threads(0))
	flows := make([]tensors.Flow, len(f.Entries))
	for i := range f.Entries {
		e, r := &f.Entries[i], &f.Records[i]
		bad := func(class error, format string, args ...any) error {
			return &fault.At{Verb: "verify", Source: src.URI(), Tensor: e.Name, Chunk: -1, Offset: e.Record, Err: fault.New(class, format, args...)}
		}
		sum := tensors.NewSummer(r.Prefix)
		flows[i] = tensors.Flow{Sum: sum, Bytes: e.Bytes}
		if e.Bytes > 0 {
			body := newStored(src, m.ix, &m.ix.Tensors[number[e.Name]], c)
			flows[i].Step = body.block()
			flows[i].Next = func(ctx context.Context, buf []byte, off int64) ([]byte, error) {
				p, err := body.bytes(ctx, buf, off)
				return p, wrap("verify", src.URI(), e.Name, -1, err)
			}
		}
		flows[i].Pass = func(p []byte) error {
			j.Bytes.Add(int64(len(p)))
			return nil
		}
		flows[i].Done = func() error {
			crc, sha := sum.Sums()
			switch {
			case r.CRC32 == nil && r.SHA256 == nil:
				return bad(fault.ErrNotSupported, "the tensor has no sum that could be compared")
			case r.CRC32 != nil && !bytes.Equal(crc, r.CRC32):
				return bad(fault.ErrCorrupt, "checksum mismatch: CRC32 %x, not %x", crc, r.CRC32)
			case r.SHA256 != nil && !bytes.Equal(sha, r.SHA256):
				return bad(fault.ErrCorrupt, "checksum mismatch: SHA-256 %x, not %x", sha, r.SHA256)
			}
			mu.Lock()
			defer mu.Unlock()
			rep.Tensors++
			rep.Bytes += e.Bytes
			j.Tensors.Add(1)
			return nil
		}
	}
	far, ok := src.(interface{ Far() int })
	return tensors.Run(ctx, "save.verify", threads(0), ok && far.Far() > 0, flows)
}
