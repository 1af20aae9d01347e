package save

// This file has the three steps of a batch of chunks: its bytes are encoded, placed in the file, and written.

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/overwire/overwire/gosrc/codec"
	"github.com/overwire/overwire/gosrc/codec/digest"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/tensor"
)

const (
	// batchBytes is how much smaller chunks are encoded and written at once: workers would wait for one another,
	// and for the system, longer than they work on one.
	batchBytes = 64 << 10
	// batchChunks bounds the gaps between them.
	batchChunks = 256
)

// divideBatches divides the tasks into batches of small chunks. Each larger chunk is one, and so is what a GPU
// encodes, what is hashed beforehand, and what a store is asked for: requests go side by side.
func (f *fileWriter) divideBatches() {
	bytes := 0
	for k := range f.tasks {
		c := &f.tasks[k]
		n := int(c.n)
		if n == 0 || c.t.origin != nil && c.t.origin.src.Facts().Concurrency > 0 {
			n = batchBytes
		}
		if k == 0 || bytes+n > batchBytes || k-f.starts[len(f.starts)-1] == batchChunks {
			f.starts, bytes = append(f.starts, k), 0
		}
		bytes += n
	}
	f.starts = append(f.starts, len(f.tasks))
}

// A slot holds the memory of a batch between reading and writing.
type slot struct {
	chunks []encodedChunk // of its tasks
	bytes  int            // of its tasks, before encoding
	read   scratch        // for logical bytes, if they need any
	stored scratch        // for encoded bytes
	joined []byte         // for what is written at once
}

// An encodedChunk is one chunk on its way through a slot.
type encodedChunk struct {
	data   []byte          // logical bytes
	out    []byte          // stored bytes: data, or encoded
	at     int64           // its place in the file
	sum    digest.State    // of data, if the file keeps digests
	hashed <-chan struct{} // closed when data is in the hash of the plain file; or nil
}

// A scratch is memory that a batch takes bytes of, one chunk after the other.
type scratch struct {
	all  []byte
	used int
}

// takeSpace returns memory without content for n bytes; all is what the whole batch may need.
func (s *scratch) takeSpace(n, all int) []byte {
	if len(s.all)-s.used < n {
		s.all, s.used = make([]byte, max(n, all)), 0
	}
	return s.all[s.used:s.used:len(s.all)]
}

// Slots and encoders keep their memory for the next file.
var (
	slots    = sync.Pool{New: func() any { return new(slot) }}
	encoders = sync.Pool{New: func() any { return new(codec.Encoder) }}
)

// takeSlots takes what some workers need for a window of batches, until returnSlots.
func (f *fileWriter) takeSlots(window, workers int) {
	f.slots, f.enc = make([]*slot, window), make([]*codec.Encoder, workers)
	for i := range min(window, len(f.starts)-1) {
		f.slots[i] = slots.Get().(*slot)
	}
}

func (f *fileWriter) returnSlots() {
	for _, s := range f.slots {
		if s != nil {
			clear(s.chunks)
			slots.Put(s)
		}
	}
	for _, e := range f.enc {
		if e != nil {
			encoders.Put(e)
		}
	}
}

// encodeBatch reads tasks and makes their stored bytes.
func (f *fileWriter) encodeBatch(ctx context.Context, worker int, s *slot, first, end int) error {
	if p := f.tasks[first].pack; p != nil {
		return errs.Locate("save", f.path, f.tasks[first].t.name, -1, f.encodePack(ctx, p))
	}
	f.cores <- struct{}{}
	defer func() { <-f.cores }()
	clear(s.chunks)
	s.chunks = slices.Grow(s.chunks[:0], end-first)[:end-first]
	s.read.used, s.stored.used, s.bytes = 0, 0, 0
	for k := first; k < end; k++ {
		s.bytes += int(f.tasks[k].n)
	}
	for i := range s.chunks {
		c := &f.tasks[first+i]
		if err := f.encodeTask(ctx, worker, c, s, &s.chunks[i]); err != nil {
			return errs.Locate("save", f.path, c.t.name, -1, err)
		}
	}
	return nil
}

// encodeTask reads a task of a batch, and makes its stored bytes.
func (f *fileWriter) encodeTask(ctx context.Context, worker int, c *task, s *slot, x *encodedChunk) error {
	t, start := c.t, time.Now()
	if c.n == 0 {
		defer addLap(&f.clock.hash, start)
		_, err := t.hashAll(ctx)
		if err == nil && f.lay.Digests != "" {
			err = t.digestAll(ctx, &x.sum)
		}
		return err
	}
	if m, ok := t.body.(memory); ok && t.parts <= 1 {
		x.data = m[c.off : c.off+int64(c.n)]
	} else {
		var err error
		buf := s.read.takeSpace(int(c.n), s.bytes)[:c.n]
		if x.data, err = t.gatherColumns(ctx, buf, int64(c.part), c.off); err != nil {
			return err
		}
		s.read.used += int(c.n)
		start = addLap(&f.clock.read, start)
	}
	x.out = x.data
	if f.lay == nil {
		return nil
	}
	if f.lay.Digests != "" && t.parts <= 1 {
		x.sum.Add(c.off, x.data)
		start = addLap(&f.clock.hash, start)
	}
	ch := &f.lay.Chunks[c.chunk]
	if t.form == compressed {
		if !t.takeTrial(c, f.spec.ChunkBytes, x, ch) {
			f.encodeChunk(worker, t.ways, s, x, ch)
		}
		start = addLap(&f.clock.encode, start)
	}
	ch.Sum = codec.Sum(x.out)
	addLap(&f.clock.hash, start)
	return nil
}

// encodeChunk makes the stored bytes of a chunk, in the slot's memory if they fit.
func (f *fileWriter) encodeChunk(worker int, ways codec.Ways, s *slot, x *encodedChunk, ch *tensor.Chunk) {
	if f.enc[worker] == nil {
		f.enc[worker] = encoders.Get().(*codec.Encoder)
	}
	mostStored := func(n int) int { return n + n/64 + 4096 }
	buf := s.stored.takeSpace(mostStored(len(x.data)), mostStored(s.bytes))
	x.out = f.enc[worker].Encode(buf, x.data, ways, ch)
	if ch.Codec != tensor.CodecRaw && &x.out[0] == &buf[:1][0] {
		s.stored.used += len(x.out)
	}
}

// placeBatch gives tasks their offsets, and adds their bytes to the hash.
func (f *fileWriter) placeBatch(ctx context.Context, s *slot, first, end int) error {
	if p := f.tasks[first].pack; p != nil {
		return errs.Locate("save", f.path, f.tasks[first].t.name, -1, f.placePack(ctx, p))
	}
	gap := f.pos
	for i := range s.chunks {
		c := &f.tasks[first+i]
		if err := f.placeTask(c, &s.chunks[i]); err != nil {
			return errs.Locate("save", f.path, c.t.name, -1, err)
		}
	}
	if at := s.chunks[0].at; at > gap { // those between chunks are written with them
		return errs.Locate("save", f.path, f.tasks[first].t.name, -1, f.draft.Skip(gap, at))
	}
	return nil
}

// placeTask gives a task its offset, and adds its bytes to the hash.
func (f *fileWriter) placeTask(c *task, x *encodedChunk) error {
	t := c.t
	t.digest.Merge(x.sum)
	if c.n == 0 {
		return nil
	}
	if c.begins {
		f.hasher.Reset()
	}
	// Compare the source's hash even if the new file stores none. (A tensor in
	// several parts is hashed by a task of its own, or keeps its source's hash: its
	// chunks do not come in the order of its bytes. That hash is compared where its
	// bytes are passed in order anyway, for its digest.)
	if !t.hashed && (f.lay != nil || t.known != nil) && t.parts == 1 {
		start := time.Now()
		_, _ = f.hasher.Write(x.data)
		addLap(&f.clock.hash, start)
		if c.ends {
			t.hash, t.hashed = sumOf(&f.hasher), true
			if t.known != nil && t.hash != t.known.Hash {
				return t.errOtherBytes()
			}
		}
	}
	if c.ends {
		f.job.Tensors.Add(1)
	}
	if t.parts == 1 {
		x.hashed = f.part.original.Hashing().Pass(t.name, x.data)
	}
	if f.again != nil {
		start := time.Now()
		f.again.AddBytes(x.data)
		addLap(&f.clock.hash, start)
	}
	if x.at = f.pos; f.lay != nil {
		var err error
		if x.at, err = f.lay.Place(c.chunk, uint32(len(x.out))); err != nil {
			return err
		}
	}
	f.pos = x.at + int64(len(x.out))
	return nil
}

// flushBatch writes tasks. Their bytes may change after it.
func (f *fileWriter) flushBatch(s *slot, first, end int) error {
	c := &f.tasks[first]
	if c.pack != nil {
		return errs.Locate("save", f.path, c.t.name, -1, f.flushPack(c.pack))
	}
	if err := f.writeBatch(s, c); err != nil {
		return errs.Locate("save", f.path, c.t.name, -1, err)
	}
	for i := range s.chunks {
		if err := f.part.original.Hashing().Await(s.chunks[i].hashed); err != nil {
			return errs.Locate("save", f.path, f.tasks[first+i].t.name, -1, err)
		}
		f.job.Bytes.Add(int64(f.tasks[first+i].n))
	}
	return nil
}

// writeBatch writes the chunks of a slot at once, with the gaps between them; c is the first one's task.
func (f *fileWriter) writeBatch(s *slot, c *task) error {
	if c.n == 0 {
		return nil
	}
	x := &s.chunks[0]
	if len(s.chunks) > 1 {
		s.joined = s.joined[:0]
		for i := range s.chunks {
			gap := s.chunks[i].at - x.at - int64(len(s.joined))
			s.joined = append(append(s.joined, make([]byte, gap)...), s.chunks[i].out...)
		}
		return f.draft.Write(s.joined, x.at)
	}
	if m, ok := c.t.body.(memory); ok && len(x.out) > 0 && &x.out[0] == &m[c.off] {
		return f.draft.WriteView(x.out, x.at) // the caller's own bytes
	}
	return f.draft.Write(x.out, x.at)
}
