package save

// This file writes one file of tensors. Each batch of chunks goes through three steps: it is encoded, placed in the
// file, and written.

import (
	"context"
	"slices"
	"sync"
	"time"
	"unsafe"

	"github.com/overwire/overwire/gosrc/codec"
	"github.com/overwire/overwire/gosrc/codec/digest"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/crc32c"
	"github.com/overwire/overwire/gosrc/internal/ordered"
	"github.com/overwire/overwire/gosrc/internal/sizes"
	"github.com/overwire/overwire/gosrc/save/original"
	"github.com/overwire/overwire/gosrc/save/publish"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/tensor"
	"github.com/zeebo/xxh3"
)

const (
	// batchBytes is the size of a batch of small chunks. With single small chunks, workers would spend more time
	// waiting for each other and for system calls than encoding.
	batchBytes = 64 << 10
	// batchChunks limits the number of chunks in a batch, and so the bytes of gaps between them.
	batchChunks = 256
)

// An encoder writes one plain file, or one container of docs/format.md, according to its plan.
type encoder struct {
	s      *session
	plan   *filePlan
	draft  source.Output
	path   string // path of the draft
	pos    int64  // end of the data placed so far
	starts []int  // start of each batch in tasks, and the end of the last batch
	slots  []*slot
	hasher xxh3.Hasher
	enc    []*codec.Encoder // one per worker; nil until it is used
}

// encodeFile writes a file and returns its size and a summary of its original.
func encodeFile(ctx context.Context, s *session, to source.Output, share writerShare, file *File) (written, error) {
	plan, err := planFile(s, file, share)
	if err != nil {
		return written{}, errs.In("save", to.URI(), err)
	}
	e := &encoder{s: s, plan: plan, draft: to, path: to.URI(), pos: plan.start}
	if err := e.runBatches(ctx); err != nil {
		return written{}, errs.In("save", e.path, err)
	}
	front, size, err := plan.sealFront(e.pos)
	if err != nil {
		return written{}, errs.In("save", e.path, err)
	}
	out := written{size: size}
	if plan.original != nil {
		out.original = &original.Summary{File: file.Path, SHA256: plan.original.SHA256,
			Compared: plan.again != nil && plan.again.Compared}
	}
	return out, to.Write(front, 0)
}

// runBatches encodes, places and writes all tasks.
func (f *encoder) runBatches(ctx context.Context) error {
	window, workers := f.plan.windowSize()
	f.divideBatches()
	f.slots, f.enc = make([]*slot, window), make([]*codec.Encoder, workers)
	for i := range min(window, len(f.starts)-1) {
		f.slots[i] = slots.Get().(*slot)
	}
	defer f.returnSlots()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	if err := f.plan.original.Hash(ctx, f.plan.orderedNames(), window); err != nil {
		return err
	}
	// If a step fails or panics, its error ends the steps that wait for the hashing or for a GPU slot.
	step := func(k int, do func(s *slot, first, end int) error) error {
		err := errs.New(errs.ErrEngine, "a step of the save has not ended")
		defer func() {
			if err != nil {
				cancel(err)
			}
		}()
		err = do(f.slots[k%window], f.starts[k], f.starts[k+1])
		return err
	}
	o := ordered.Tasks{
		N: len(f.starts) - 1, Window: window, Workers: workers,
		Work: func(worker, k int) error {
			return step(k, func(s *slot, first, end int) error { return f.encodeBatch(ctx, worker, s, first, end) })
		},
		Turn: func(k int) error {
			return step(k, func(s *slot, first, _ int) error { return f.placeBatch(ctx, s, first) })
		},
		Flush: func(k int) error { return step(k, f.flushBatch) },
	}
	err := firstError(ctx, o.Run(ctx, "save.encode"))
	if err != nil {
		cancel(err)
	}
	if herr := f.plan.original.Hashing().Done(); err == nil {
		err = herr
	}
	f.s.clock.hash.Add(int64(f.plan.original.Hashing().BusyTime()))
	if err == nil && f.plan.again != nil {
		err = f.plan.again.Done()
	}
	return err
}

// firstError returns the error that ended the work of several goroutines. Each of them cancels ctx with its error, so
// the cause of ctx is the first error, and err may only report the cancel.
func firstError(ctx context.Context, err error) error {
	if err == nil || ctx.Err() == nil {
		return err
	}
	return context.Cause(ctx)
}

// divideBatches divides the tasks into batches of small chunks. Each large chunk is a batch. So is each pack that a
// GPU encodes, each tensor that is hashed before its chunks are written, and each chunk that is read from a store, so
// requests run in parallel.
func (f *encoder) divideBatches() {
	bytes := 0
	for k := range f.plan.tasks {
		c := &f.plan.tasks[k]
		n := int(c.n)
		if n == 0 || c.t.from != nil && c.t.from.src.Facts().Concurrency > 0 {
			n = batchBytes
		}
		if k == 0 || bytes+n > batchBytes || k-f.starts[len(f.starts)-1] == batchChunks {
			f.starts, bytes = append(f.starts, k), 0
		}
		bytes += n
	}
	f.starts = append(f.starts, len(f.plan.tasks))
}

// A slot holds the memory of a batch between reading and writing.
type slot struct {
	chunks []encodedChunk // one per task
	bytes  int            // total of the tasks, before encoding
	read   scratch        // memory for logical bytes, if they are not in memory already
	stored scratch        // memory for encoded bytes
	joined []byte         // memory to join chunks for one write
}

// An encodedChunk is one chunk in a slot.
type encodedChunk struct {
	data   []byte          // logical bytes
	out    []byte          // stored bytes: data or its encoded form
	at     int64           // offset in the file
	sum    digest.State    // digest of data, if the file stores digests
	hashed <-chan struct{} // closed when data has been added to the original's SHA-256; may be nil
}

// A scratch is a buffer from which memory for the chunks of a batch is allocated, one chunk after another.
type scratch struct {
	all  []byte
	used int
}

// takeSpace returns an empty slice with capacity for n bytes. all is how many bytes the whole batch may need.
func (s *scratch) takeSpace(n, all int) []byte {
	if len(s.all)-s.used < n {
		s.all, s.used = make([]byte, max(n, all)), 0
	}
	return s.all[s.used:s.used:len(s.all)]
}

// slots holds unused slots and their memory for the next file.
var slots = sync.Pool{New: func() any { return new(slot) }}

// returnSlots keeps the slots and the encoders for the next file.
func (f *encoder) returnSlots() {
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

// encodeBatch reads the bytes of tasks and encodes them.
func (f *encoder) encodeBatch(ctx context.Context, worker int, s *slot, first, end int) error {
	if p := f.plan.tasks[first].pack; p != nil {
		return errs.Locate("save", f.path, f.plan.tasks[first].t.name, -1, p.encode(ctx, f.plan.lay, &f.s.clock))
	}
	f.s.cores <- struct{}{}
	defer func() { <-f.s.cores }()
	clear(s.chunks)
	s.chunks = slices.Grow(s.chunks[:0], end-first)[:end-first]
	s.read.used, s.stored.used, s.bytes = 0, 0, 0
	for k := first; k < end; k++ {
		s.bytes += int(f.plan.tasks[k].n)
	}
	for i := range s.chunks {
		c := &f.plan.tasks[first+i]
		if err := f.encodeTask(ctx, worker, c, s, &s.chunks[i]); err != nil {
			return errs.Locate("save", f.path, c.t.name, -1, err)
		}
	}
	return nil
}

// encodeTask reads the bytes of one task and encodes them.
func (f *encoder) encodeTask(ctx context.Context, worker int, c *task, s *slot, x *encodedChunk) error {
	t, start := c.t, time.Now()
	if c.n == 0 {
		defer addLap(&f.s.clock.hash, start)
		_, err := t.hashAll(ctx)
		if err == nil && f.plan.lay.Digests != "" {
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
		start = addLap(&f.s.clock.read, start)
	}
	x.out = x.data
	if f.plan.lay == nil {
		return nil
	}
	if f.plan.lay.Digests != "" && t.parts <= 1 {
		x.sum.Add(c.off, x.data)
		start = addLap(&f.s.clock.hash, start)
	}
	ch := &f.plan.lay.Chunks[c.chunk]
	if t.form == compressed {
		if !takeTrial(c, f.s.spec.ChunkBytes, x, ch) {
			f.encodeChunk(worker, t.ways, s, x, ch)
		}
		start = addLap(&f.s.clock.encode, start)
	}
	ch.Sum = crc32c.Sum(x.out)
	addLap(&f.s.clock.hash, start)
	return nil
}

// takeTrial uses the trial encoding of a chunk, and reports whether there is one.
func takeTrial(c *task, chunkBytes int64, x *encodedChunk, ch *tensor.Chunk) bool {
	t := c.t
	if t.trials == nil {
		return false
	}
	one := &t.trials[int64(c.part)*sizes.CeilDiv(t.bytes/t.parts, chunkBytes)+c.off/chunkBytes]
	ch.Codec, ch.Transform, ch.SegTiles = one.codec.Codec, one.codec.Transform, one.codec.SegTiles
	if one.out != nil {
		x.out = one.out
	}
	return true
}

// encodeChunk encodes a chunk, into the slot's memory if it fits.
func (f *encoder) encodeChunk(worker int, ways codec.Ways, s *slot, x *encodedChunk, ch *tensor.Chunk) {
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

// placeBatch assigns offsets to tasks, and adds their bytes to the hashes.
func (f *encoder) placeBatch(ctx context.Context, s *slot, first int) error {
	if p := f.plan.tasks[first].pack; p != nil {
		return errs.Locate("save", f.path, f.plan.tasks[first].t.name, -1, f.placePack(ctx, p))
	}
	gap := f.pos
	for i := range s.chunks {
		c := &f.plan.tasks[first+i]
		if err := f.placeTask(c, &s.chunks[i]); err != nil {
			return errs.Locate("save", f.path, c.t.name, -1, err)
		}
	}
	if at := s.chunks[0].at; at > gap { // gaps between chunks are written with the chunks
		return errs.Locate("save", f.path, f.plan.tasks[first].t.name, -1, f.draft.Skip(gap, at))
	}
	return nil
}

// placePack is placeBatch for a pack. It also takes host memory for the pack.
func (f *encoder) placePack(ctx context.Context, p *pack) (err error) {
	at, end, lay := make([]int64, len(p.rows)), f.pos, f.plan.lay
	for i := range p.rows {
		r, from := &p.rows[i], &p.packed[i]
		at[i] = end
		if lay != nil {
			if at[i], err = lay.Place(r.chunk, uint32(from.Stored)); err != nil {
				return err
			}
			if err := r.addSums(from); err != nil {
				return err
			}
		}
		end = at[i] + from.Stored
	}
	p.at = at
	if p.out, err = p.takeSpace(ctx, f.s.stage, end-at[0]); err != nil {
		return err
	}
	last := at[0]
	for i := range p.packed {
		from := &p.packed[i]
		clear(p.out[last-at[0] : at[i]-at[0]]) // the memory may have been used before
		last = at[i] + from.Stored
		from.To = unsafe.Pointer(&p.out[at[i]-at[0]])
	}
	if f.pos < at[0] {
		err = f.draft.Skip(f.pos, at[0])
	}
	f.pos = end
	return err
}

// flushPack is flushBatch for a pack. It copies the pack to the host, computes checksums, writes it and frees its slot.
func (f *encoder) flushPack(p *pack) error {
	start := time.Now()
	if err := p.gpu.QueueFetches(p.slot, p.packed); err != nil {
		return err
	}
	if err := p.gpu.Wait(p.slot); err != nil {
		return err
	}
	start = addLap(&f.s.clock.read, start)
	var bytes, tensors int64
	first := p.at[0]
	for i := range p.rows {
		r := &p.rows[i]
		if f.plan.lay != nil {
			lo := p.at[i] - first
			f.plan.lay.Chunks[r.chunk].Sum = crc32c.Sum(p.out[lo : lo+p.packed[i].Stored])
		}
		if bytes += int64(r.n); r.ends {
			tensors++
		}
	}
	addLap(&f.s.clock.hash, start)
	if d, ok := f.draft.(*publish.StagedDraft); ok {
		d.Hold(p.out, first)
	} else if err := f.draft.Write(p.out, first); err != nil {
		return err
	}
	p.packed, p.rows, p.at, p.out = nil, nil, nil, nil
	close(p.over)
	f.s.onGPU.Add(bytes)
	f.s.job.Bytes.Add(bytes)
	f.s.job.Tensors.Add(tensors)
	return nil
}

// placeTask assigns a task its offset, and adds its bytes to the hashes.
func (f *encoder) placeTask(c *task, x *encodedChunk) error {
	t := c.t
	t.sums.digest.Merge(x.sum)
	if c.n == 0 {
		return nil
	}
	if c.begins {
		f.hasher.Reset()
	}
	// Compare the source's hash even if the new file stores no hash. The chunks of a tensor in several parts are not in
	// the order of its bytes. Such a tensor is hashed by a separate task or uses its source's hash, which digestAll
	// compares if the file stores digests.
	if !t.sums.hashed && (f.plan.lay != nil || t.known() != nil) && t.parts == 1 {
		start := time.Now()
		_, _ = f.hasher.Write(x.data)
		addLap(&f.s.clock.hash, start)
		if c.ends {
			t.sums.hash, t.sums.hashed = codec.HashOf(f.hasher.Sum128()), true
			if t.known() != nil && t.sums.hash != t.known().Hash {
				return t.errOtherBytes()
			}
		}
	}
	if c.ends {
		f.s.job.Tensors.Add(1)
	}
	if t.parts == 1 {
		x.hashed = f.plan.original.Hashing().Pass(t.name, x.data)
	}
	if f.plan.again != nil {
		start := time.Now()
		f.plan.again.AddBytes(x.data)
		addLap(&f.s.clock.hash, start)
	}
	if x.at = f.pos; f.plan.lay != nil {
		var err error
		if x.at, err = f.plan.lay.Place(c.chunk, uint32(len(x.out))); err != nil {
			return err
		}
	}
	f.pos = x.at + int64(len(x.out))
	return nil
}

// flushBatch writes tasks. Their bytes may change afterwards.
func (f *encoder) flushBatch(s *slot, first, end int) error {
	c := &f.plan.tasks[first]
	if c.pack != nil {
		return errs.Locate("save", f.path, c.t.name, -1, f.flushPack(c.pack))
	}
	if err := f.writeBatch(s, c); err != nil {
		return errs.Locate("save", f.path, c.t.name, -1, err)
	}
	for i := range s.chunks {
		if err := f.plan.original.Hashing().Await(s.chunks[i].hashed); err != nil {
			return errs.Locate("save", f.path, f.plan.tasks[first+i].t.name, -1, err)
		}
		f.s.job.Bytes.Add(int64(f.plan.tasks[first+i].n))
	}
	return nil
}

// writeBatch writes the chunks of a slot and the gaps between them in one call. c is the task of the first chunk.
func (f *encoder) writeBatch(s *slot, c *task) error {
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
		return f.draft.WriteView(x.out, x.at) // the caller's memory, not a copy
	}
	return f.draft.Write(x.out, x.at)
}
