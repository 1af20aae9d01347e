package cuda

/*
#include "batch.h"
#include "../../../cuda/abi.h"
#include "../../../cuda/abi_stream.h"
*/
import "C"

import (
	"sync"
	"unsafe"

	"github.com/overwire/overwire/cuda/built"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/sizes"
)

// Kernels of batches, in the order of their numbers.
const (
	batchNames = "ow_stream_open\x00ow_stream_close\x00ow_stream_peek\x00ow_stream_x16\x00ow_lz4_decode\x00" +
		"ow_snappy_decode\x00ow_cascaded_decode\x00ow_stream_cut\x00ow_x16_encode\x00ow_stream_sum\x00" +
		"ow_stream_join\x00ow_hash_sums\x00"
	batchOpen = iota - 1
	batchClose
	batchPeek
	batchX16
	batchLZ4
	batchSnappy
	batchCascaded
	batchCut
	batchEncode
	batchSum
	batchJoin
	batchHash
)

// decoders are the kernels that decode rows of items, by nvCOMP's number of the
// algorithm.
var decoders = map[uint32]int{C.OW_STREAM_LZ4: batchLZ4, C.OW_STREAM_SNAPPY: batchSnappy,
	C.OW_STREAM_CASCADED: batchCascaded}

// CanDecode reports whether a kernel decodes streams of an algorithm.
func CanDecode(format uint32) bool {
	_, ok := decoders[format]
	return ok || format == FormatX16
}

const (
	padBytes  = 16 << 10 // pinned: status words, then the table
	padRoom   = 64 << 10 // on the device: the table, then rows
	padCount  = 128      // batches in flight before the next one waits
	rowBytes  = int(unsafe.Sizeof(C.ow_batch_item{}))
	headSize  = int(unsafe.Sizeof(C.ow_stream_head{}))
	entrySize = int(unsafe.Sizeof(C.ow_stream{}))
	peekSize  = int(unsafe.Sizeof(C.ow_stream_peek_t{}))
)

// A pad is the memory of one batch: its status words, table and rows. While its
// kernels may run, batch is set, unless no one refers to the Batch.
type pad struct {
	host        unsafe.Pointer
	mapped, dev C.owcu_ptr
	bytes, room int
	done        C.owcu_handle
	used        bool // done was recorded
	batch       *Batch
}

// A slab is one pinned and one device allocation, with streams and events.
type slab struct {
	pages hugePages
	c     C.struct_owcu_slab
	pads  []*pad // into which it is cut for batches
}

// batchPool are the pads and kernels of a Device.
type batchPool struct {
	mu      sync.Mutex
	kernels []C.owcu_handle // nil: not yet looked up
	waiting int             // callers in Wait: their events must not be destroyed
	small   *slab
	next    int
	large   []*slab // of one pad each
}

// A Batch is work queued on a stream.
type Batch struct {
	d     *Device // whose batch.mu guards the rest
	n     int
	pad   *pad // nil: words and err are known
	words []uint32
	peeks []C.ow_stream_peek_t
	err   error
}

func (d *Device) batchKernels() ([]C.owcu_handle, error) {
	return d.loadKernels(&d.batch.kernels, d.module, built.X16, batchNames)
}

// newSlab allocates `bytes` of the host and `room` of the device; see owcu_slab_new.
func (d *Device) newSlab(bytes, room int64, streams, events, sleepers int, what string) (*slab, error) {
	p, err := newHugePages(bytes, d.near)
	if err != nil {
		return nil, err
	}
	s := &slab{pages: p}
	var e C.struct_owcu_error
	rc := C.owcu_slab_new(d.ctx, &s.c, p.p, C.uint64_t(p.n), C.uint64_t(room), C.int(streams), C.int(events),
		C.int(sleepers), &e)
	if rc == 0 {
		return s, nil
	}
	if rc > 0 {
		d.deferFree(func() bool { return d.tryFreeSlab(s) })
	} else {
		p.free()
	}
	return nil, d.addSizesToError(errorOf(d.index, &e), room, what)
}

// newSlabOfPads makes a slab that is cut into pads.
func (d *Device) newSlabOfPads(count, bytes, room int) (*slab, error) {
	s, err := d.newSlab(int64(count*bytes), int64(count*room), 0, count, 0, "the tables of a batch")
	if err != nil {
		return nil, err
	}
	for i, event := range unsafe.Slice(s.c.events, count) {
		s.pads = append(s.pads, &pad{
			host: unsafe.Add(s.pages.p, i*bytes), mapped: s.c.mapped + C.owcu_ptr(i*bytes),
			dev: s.c.device + C.owcu_ptr(i*room), bytes: bytes, room: room, done: event,
		})
	}
	return s, nil
}

// drainAndFreeSlab waits for the work on a slab and frees it.
func (d *Device) drainAndFreeSlab(s *slab) error {
	for _, p := range s.pads {
		if err := d.finishPad(p); err != nil {
			d.deferFree(func() bool { return d.tryFreeIdleSlab(s) })
			return err
		}
	}
	var e C.struct_owcu_error
	return d.handleFreeResult(d.tryFreeSlabMemory(s, &e), &e, func() bool { return d.tryFreeSlab(s) })
}

// tryFreeSlab frees a slab that no batch uses, and reports whether it is gone.
func (d *Device) tryFreeSlab(s *slab) bool {
	var e C.struct_owcu_error
	return d.tryFreeSlabMemory(s, &e) <= 0
}

func (d *Device) tryFreeSlabMemory(s *slab, e *C.struct_owcu_error) C.int {
	rc := C.owcu_slab_free(d.ctx, &s.c, e)
	if rc <= 0 {
		s.pages.free()
	}
	return rc
}

// trimBatches frees the memory of batches that are done, unless a caller waits for
// one.
func (d *Device) trimBatches() (err error) {
	pool := &d.batch
	pool.mu.Lock()
	defer pool.mu.Unlock()
	if pool.waiting > 0 {
		return nil
	}
	all := pool.large
	if pool.small != nil {
		all = append(all, pool.small)
	}
	pool.small, pool.large = nil, nil
	for _, s := range all {
		if e := d.drainAndFreeSlab(s); err == nil {
			err = e
		}
	}
	return err
}

// finishPad waits for a pad's last batch, and sets its result. After an error the pad stays in use: nothing
// is known of its kernels.
func (d *Device) finishPad(p *pad) error {
	if !p.used {
		return nil
	}
	isKnown, err := d.waitForPad(p)
	if !isKnown {
		return err
	}
	p.used = false
	if p.batch != nil {
		p.batch.takeResults(p, err)
	}
	return nil
}

// waitForPad waits for a pad's last batch. isKnown: it has ended, and err is its error; else the driver has answered
// nothing.
func (d *Device) waitForPad(p *pad) (isKnown bool, err error) {
	var e C.struct_owcu_error
	rc := C.owcu_wait_batch(d.ctx, p.done, &e)
	if rc != 0 {
		err = errorOf(d.index, &e)
	}
	return rc != C.OWCU_UNKNOWN, err
}

// takeResults reads the status words of a batch's kernels.
func (b *Batch) takeResults(p *pad, err error) {
	if b.pad != p {
		return
	}
	b.err = err
	b.words = append([]uint32(nil), unsafe.Slice((*uint32)(p.host), b.n)...)
	if b.peeks != nil {
		copy(b.peeks, unsafe.Slice((*C.ow_stream_peek_t)(unsafe.Add(p.host, answersOffset(b.n))), b.n))
	}
	b.pad, p.batch = nil, nil
}

// takePad returns memory for n streams and rows. The mu of Device.batch is held.
func (d *Device) takePad(n, rows int) (*pad, error) {
	pool := &d.batch
	bytes, room := padSizes(n, rows)
	if bytes <= padBytes && room <= padRoom {
		if pool.small == nil {
			s, err := d.newSlabOfPads(padCount, padBytes, padRoom)
			if err != nil {
				return nil, err
			}
			pool.small = s
		}
		p := pool.small.pads[pool.next%padCount]
		pool.next++
		return p, d.finishPad(p)
	}
	const most = 4
	for i, s := range pool.large {
		if p := s.pads[0]; p.bytes >= bytes && p.room >= room && d.isPadDone(p) {
			pool.large = append(append(pool.large[:i:i], pool.large[i+1:]...), s) // the most recently used goes last
			return p, d.finishPad(p)
		}
	}
	if len(pool.large) >= most && pool.waiting == 0 {
		first := pool.large[0]
		pool.large = pool.large[1:]
		d.deferFree(func() bool { return d.tryFreeIdleSlab(first) })
	}
	up := func(n int) int { return (n + n/4 + huge - 1) &^ (huge - 1) }
	s, err := d.newSlabOfPads(1, up(bytes), up(room))
	if err != nil {
		return nil, err
	}
	pool.large = append(pool.large, s)
	return s.pads[0], nil
}

// isPadDone reports whether a pad's last batch is done.
func (d *Device) isPadDone(p *pad) bool {
	if !p.used {
		return true
	}
	var e C.struct_owcu_error
	return C.owcu_is_batch_done(d.ctx, p.done, &e) != 0
}

// tryFreeIdleSlab frees a slab if its batches are done, and reports whether it is gone.
func (d *Device) tryFreeIdleSlab(s *slab) bool {
	d.batch.mu.Lock()
	isIdle := d.batch.waiting == 0
	for _, p := range s.pads {
		isIdle = isIdle && d.isPadDone(p) && d.finishPad(p) == nil
	}
	d.batch.mu.Unlock()
	return isIdle && d.tryFreeSlab(s)
}

// The layout of a pad: status words, then the table; for Peek the answers follow.
func tableOffset(n int) int   { return (4*n + 63) &^ 63 }
func answersOffset(n int) int { return tableOffset(n) + headSize + n*entrySize }

func padSizes(n, rows int) (bytes, room int) {
	return answersOffset(n) + n*peekSize, rowsOffset(n) + rows*rowBytes
}

// rowsOffset is the offset of the rows on the device.
func rowsOffset(n int) int { return (headSize + n*entrySize + 255) &^ 255 }

// MaxBatch is the most streams, and the most chunks in them, of one batch.
const MaxBatch = 1 << 24

// Decode queues the decoding of streams of one algorithm on the caller's stream,
// after what is queued now on those of `on.After`. It does not wait: sources and
// destinations must stay valid and unchanged until the Batch is done.
func (d *Device) Decode(on Order, format uint32, streams []Bitstream) (*Batch, error) {
	rows := 0
	for i := range streams {
		s := &streams[i]
		if s.Chunk <= 0 || s.Size < 0 || s.Stored < 0 {
			return nil, errs.New(errs.ErrArgument, "stream %d: %d bytes of content in chunks of %d", i, s.Size, s.Chunk)
		}
		rows += s.blockCount()
		if rows > MaxBatch || i >= MaxBatch {
			return nil, errs.New(errs.ErrArgument, "a batch of more than %d chunks", MaxBatch)
		}
	}
	if rows == 0 {
		return &Batch{d: d}, nil
	}
	decoder, items := decoders[format]
	if !items && format != FormatX16 {
		return nil, errs.New(errs.ErrNotSupported, "format %d on a GPU", format)
	}
	work := batchWork{format: format, streams: streams, rows: rows, few: !items && len(streams) <= C.OW_STREAM_FEW}
	return d.startBatch(on, work, func(split int) []kernelStep {
		if !items {
			return []kernelStep{{kernel: batchX16, n: rows * split, threads: 32, shared: C.OW_STREAM_SHARED}}
		}
		return []kernelStep{{kernel: batchOpen, n: rows, threads: 1},
			{kernel: decoder, n: rows, threads: 32, block: C.OW_BATCH_THREADS, items: true},
			{kernel: batchClose, n: rows, threads: 1}}
	})
}

// Peek returns what streams say about the length of their content, and waits for
// the answer. It uses only Src and Stored. Of raw blocks only those of X16 and
// Snappy know it.
func (d *Device) Peek(on Order, kind Kind, format uint32, streams []Bitstream) ([]StreamInfo, error) {
	if len(streams) == 0 {
		return nil, nil
	}
	each := make([]Bitstream, len(streams))
	for i, s := range streams {
		each[i] = Bitstream{Src: s.Src, Stored: s.Stored, Kind: kind}
	}
	b, err := d.startBatch(on, batchWork{format: format, streams: each, answers: true}, func(int) []kernelStep {
		return []kernelStep{{kernel: batchPeek, n: len(each), threads: 1}}
	})
	if err != nil {
		return nil, err
	}
	if _, err := b.Wait(); err != nil {
		return nil, err
	}
	out := make([]StreamInfo, len(each))
	for i, p := range b.peeks {
		out[i] = StreamInfo{Size: int64(p.size), Chunk: int64(p.chunk), Format: uint32(p.format),
			Err: statusError(uint32(p.status))}
	}
	return out, nil
}

// A kernelStep is a launch of a kernel, by its number, for n items, with `threads` threads each,
// in blocks of `block` threads (0: eight warps). items: it takes rows alone.
type kernelStep struct {
	kernel, n, threads, block, shared int
	items                             bool
}

// Encode queues the encoding of contents to X16 streams. Src and Size of a Bitstream
// are the content, Dst and Stored the space for the stream; all are multiples of
// 16, and so is Chunk if there are several chunks. Arg is the transform of X16 (0:
// store as it is). scratch is device memory for a block of every chunk, of EncodeScratchSize
// bytes. Batch.EncodedSizes returns the lengths of the streams.
func (d *Device) Encode(on Order, streams []Bitstream, scratch uint64) (*Batch, error) {
	rows := 0
	for i := range streams {
		s := &streams[i]
		if s.Chunk <= 0 || s.Size < 0 || s.Stored < 0 || s.Arg > 8 || (s.Src|s.Dst)%16 != 0 ||
			s.Chunk < s.Size && s.Chunk%16 != 0 || s.Chunk > maxBlock {
			return nil, errs.New(errs.ErrArgument, "content %d: %d bytes at %#x in chunks of %d, transform %d, to %#x",
				i, s.Size, s.Src, s.Chunk, s.Arg, s.Dst)
		}
		if s.Kind != 0 && s.Size > s.Chunk {
			return nil, errs.New(errs.ErrArgument, "content %d: %d bytes in one block", i, s.Size)
		}
		if rows += s.blockCount(); rows > MaxBatch {
			return nil, errs.New(errs.ErrArgument, "a batch of more than %d chunks", MaxBatch)
		}
	}
	if rows == 0 {
		return &Batch{d: d}, nil
	}
	work := batchWork{format: FormatX16, streams: streams, rows: rows, answers: true, scratch: scratch}
	return d.startBatch(on, work, func(split int) []kernelStep {
		threads := int(C.ow_x16_threads(C.uint64_t(encodedBlockSpace(streams))))
		return []kernelStep{{kernel: batchCut, n: rows, threads: 1},
			{kernel: batchEncode, n: rows, threads: threads, block: threads, items: true},
			{kernel: batchSum, n: len(streams), threads: 32}, {kernel: batchJoin, n: rows * split, threads: 32}}
	})
}

// batchWork describes a batch. rows is 0 if streams are inspected only; few: the table goes
// with the launch; answers: the kernels write an answer for each stream.
type batchWork struct {
	format  uint32
	streams []Bitstream
	rows    int
	few     bool
	answers bool
	scratch uint64
}

// asCStep is the step as C has it, of the kernels of batches, for a table, its rows and status words.
func (s kernelStep) asCStep(kernels []C.owcu_handle, table, rows, status uint64) C.struct_owcu_step {
	if s.block == 0 {
		s.block = 32 * C.OW_X16_WARPS
	}
	c := C.struct_owcu_step{kernel: kernels[s.kernel], grid: C.uint32_t(sizes.CeilDiv(s.n, s.block/s.threads)),
		block:  C.uint32_t(s.block),
		shared: C.uint32_t(s.shared), few: C.uint32_t(cBool(s.kernel == batchX16))}
	args := []uint64{table, rows, uint64(s.n), status}
	if s.items {
		args = args[1:3]
	}
	for i, v := range args {
		c.args[i] = C.uint64_t(v)
	}
	return c
}

// startBatch writes a batch to a pad and queues it.
func (d *Device) startBatch(on Order, work batchWork, plan func(split int) []kernelStep) (*Batch, error) {
	format, streams, rows := work.format, work.streams, work.rows
	if err := d.MakeStreamWait(on.Stream, on.After...); err != nil {
		return nil, err
	}
	pool := &d.batch
	pool.mu.Lock()
	defer pool.mu.Unlock()
	kernels, err := d.batchKernels()
	if err != nil {
		return nil, err
	}
	p, err := d.takePad(len(streams), rows)
	if err != nil {
		return nil, err
	}
	n := len(streams)
	clear(unsafe.Slice((*uint32)(p.host), n))
	table := unsafe.Add(p.host, tableOffset(n))
	entries := unsafe.Slice((*C.ow_stream)(unsafe.Add(table, headSize)), n)
	first, split := 0, warpsPerChunk(streams, rows)
	for i := range streams {
		s := &streams[i]
		entries[i] = C.ow_stream{
			src: C.uint64_t(s.Src), stored: C.uint64_t(s.Stored), dst: C.uint64_t(s.Dst), size: C.uint64_t(s.Size),
			chunk: C.uint64_t(s.Chunk),
			first: C.uint32_t(first), kind: C.uint32_t(s.Kind), format: C.uint32_t(format), arg: C.uint32_t(s.Arg),
		}
		if rows > 0 {
			k := s.blockCount()
			entries[i].rows = C.uint32_t(k)
			first += k
		}
	}
	*(*C.ow_stream_head)(table) = C.ow_stream_head{
		streams: C.uint32_t(n), rows: C.uint32_t(rows), split: C.uint32_t(split), answers: C.uint32_t(answersOffset(n)),
		scratch: C.uint64_t(work.scratch), slot: C.uint64_t(encodedBlockSpace(streams)),
	}
	request := C.struct_owcu_batch{
		ctx: d.ctx, stream: C.uint64_t(on.Stream), done: p.done,
		to: p.dev, table: table, bytes: C.uint64_t(headSize + n*entrySize),
	}
	at, to := uint64(p.dev), uint64(p.dev)+uint64(rowsOffset(n))
	if work.few {
		request.bytes, at = 0, 0
	}
	if rows == 0 {
		to = uint64(p.mapped) + uint64(answersOffset(n))
	}
	for i, s := range plan(split) {
		request.steps[i] = s.asCStep(kernels, at, to, uint64(p.mapped))
		request.nsteps++
	}
	batch := &Batch{d: d, n: n, pad: p}
	if work.answers {
		batch.peeks = make([]C.ow_stream_peek_t, n)
	}
	var e C.struct_owcu_error
	if C.owcu_submit_batch(&request, &e) != 0 {
		return nil, errorOf(d.index, &e)
	}
	p.used, p.batch = true, batch
	return batch, nil
}

// encodedBlockSpace is the space for an encoded block: no block is longer than its chunk.
func encodedBlockSpace(streams []Bitstream) (n int64) {
	for i := range streams {
		n = max(n, min(streams[i].Chunk, streams[i].Size))
	}
	return (n + 15) &^ 15
}

// EncodeScratchSize is how many bytes of scratch memory Encode needs.
func EncodeScratchSize(streams []Bitstream) (n int64) {
	for i := range streams {
		n += int64(streams[i].blockCount())
	}
	return n * encodedBlockSpace(streams)
}

// EncodedSizes returns the lengths of the streams of Encode, once Wait has returned.
func (b *Batch) EncodedSizes() []int64 {
	pool := &b.d.batch
	pool.mu.Lock()
	defer pool.mu.Unlock()
	var out []int64
	for _, p := range b.peeks {
		out = append(out, int64(p.size))
	}
	return out
}

// Done reports, without waiting, whether the batch is done. After a device error it
// is, but not while the driver lets no one into the context.
func (b *Batch) Done() bool {
	pool := &b.d.batch
	pool.mu.Lock()
	defer pool.mu.Unlock()
	return b.pad == nil || b.d.isPadDone(b.pad)
}

// Wait waits for the batch and returns the result of each stream, nil if all are
// good, and the device's error. If Done is false after that, the driver has answered nothing: the
// batch may still run, and Wait may be called again.
func (b *Batch) Wait() ([]error, error) {
	pool := &b.d.batch
	pool.mu.Lock()
	if p := b.pad; p != nil {
		pool.waiting++
		pool.mu.Unlock()
		// The pad may be used by a later batch meanwhile; this batch's result is
		// set before that.
		isKnown, err := b.d.waitForPad(p)
		pool.mu.Lock()
		pool.waiting--
		if !isKnown && b.pad != nil {
			pool.mu.Unlock()
			return nil, err
		}
		b.takeResults(p, err)
	}
	defer pool.mu.Unlock()
	if b.err != nil {
		return nil, b.err
	}
	out := make([]error, b.n)
	for i, w := range b.words {
		out[i] = statusError(w)
	}
	return out, nil
}
