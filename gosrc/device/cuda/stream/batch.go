package stream

/*
#include "batch.h"
#include "../../../../cuda/abi.h"
#include "../../../../cuda/abi_stream.h"
*/
import "C"

import (
	"sync"
	"unsafe"

	"github.com/overwire/overwire/gosrc/device/cuda/driver"
	"github.com/overwire/overwire/gosrc/device/cuda/memory"
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

// decoders maps nvCOMP's algorithm numbers to the kernels that decode rows of items.
var decoders = map[uint32]int{C.OW_STREAM_LZ4: batchLZ4, C.OW_STREAM_SNAPPY: batchSnappy,
	C.OW_STREAM_CASCADED: batchCascaded}

// CanDecode reports whether a kernel can decode streams of an algorithm.
func CanDecode(format uint32) bool {
	_, ok := decoders[format]
	return ok || format == FormatX16
}

const (
	padBytes  = 16 << 10 // pinned memory: status words, then the table
	padRoom   = 64 << 10 // device memory: the table, then the rows
	padCount  = 128      // maximum batches in flight; the next one waits
	rowBytes  = int(unsafe.Sizeof(C.ow_batch_item{}))
	headSize  = int(unsafe.Sizeof(C.ow_stream_head{}))
	entrySize = int(unsafe.Sizeof(C.ow_stream{}))
	peekSize  = int(unsafe.Sizeof(C.ow_stream_peek_t{}))
)

// Batches runs batches of bitstreams on a device.
type Batches struct {
	on      *Streams
	kernels *driver.Kernels

	mu      sync.Mutex
	waiting int // callers in Wait, whose events must not be destroyed
	small   *arena
	next    int
	large   []*arena // each holds one pad
}

// NewBatches returns the Batches of a device. x16 is the module with their kernels.
func NewBatches(on *Streams, x16 *driver.Module) *Batches {
	return &Batches{on: on, kernels: x16.Kernels(batchNames)}
}

// A Batch is work queued on a stream.
type Batch struct {
	d     *Batches // d.mu guards the other fields
	n     int
	pad   *pad // nil when words and err are set
	words []uint32
	peeks []C.ow_stream_peek_t
	err   error
}

// Trim frees the memory of finished batches, unless a caller waits for a batch.
func (d *Batches) Trim() (err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.waiting > 0 {
		return nil
	}
	all := d.large
	if d.small != nil {
		all = append(all, d.small)
	}
	d.small, d.large = nil, nil
	for _, a := range all {
		if e := d.drainAndFree(a); err == nil {
			err = e
		}
	}
	return err
}

func (d *Batches) drainAndFree(a *arena) error {
	for _, p := range a.pads {
		if err := p.finish(); err != nil {
			d.on.mem.DeferFree(func() (bool, error) { return d.tryFreeIdle(a) })
			return err
		}
	}
	return d.on.mem.FreeNow(a.tryFree)
}

// takeResults reads the results of a batch from its pad.
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

// takePad returns memory for n streams and a number of rows. The caller holds d.mu.
func (d *Batches) takePad(n, rows int) (*pad, error) {
	bytes, room := padSizes(n, rows)
	if bytes <= padBytes && room <= padRoom {
		if d.small == nil {
			s, err := newPads(d.on, padCount, padBytes, padRoom)
			if err != nil {
				return nil, err
			}
			d.small = s
		}
		p := d.small.pads[d.next%padCount]
		d.next++
		return p, p.finish()
	}
	const most = 4
	for i, s := range d.large {
		if p := s.pads[0]; p.bytes >= bytes && p.room >= room && p.isDone() {
			d.large = append(append(d.large[:i:i], d.large[i+1:]...), s) // most recently used last
			return p, p.finish()
		}
	}
	if len(d.large) >= most && d.waiting == 0 {
		first := d.large[0]
		d.large = d.large[1:]
		d.on.mem.DeferFree(func() (bool, error) { return d.tryFreeIdle(first) })
	}
	up := func(n int) int { return (n + n/4 + memory.HugePage - 1) &^ (memory.HugePage - 1) }
	s, err := newPads(d.on, 1, up(bytes), up(room))
	if err != nil {
		return nil, err
	}
	d.large = append(d.large, s)
	return s.pads[0], nil
}

// tryFreeIdle frees an arena if its batches have ended. See memory.Free.
func (d *Batches) tryFreeIdle(a *arena) (gone bool, err error) {
	d.mu.Lock()
	isIdle := d.waiting == 0
	for _, p := range a.pads {
		isIdle = isIdle && p.isDone() && p.finish() == nil
	}
	d.mu.Unlock()
	if !isIdle {
		return false, nil
	}
	return a.tryFree()
}

// A pad contains status words, then the table, then the answers of Peek.
func tableOffset(n int) int   { return (4*n + 63) &^ 63 }
func answersOffset(n int) int { return tableOffset(n) + headSize + n*entrySize }

func padSizes(n, rows int) (bytes, room int) {
	return answersOffset(n) + n*peekSize, rowsOffset(n) + rows*rowBytes
}

// rowsOffset returns the offset of the rows in device memory.
func rowsOffset(n int) int { return (headSize + n*entrySize + 255) &^ 255 }

// MaxBatch is the maximum number of streams in a batch, and of chunks in these streams.
const MaxBatch = 1 << 24

// Decode queues the decoding of streams of one algorithm on the caller's stream, after the work that is now queued on
// the streams of `on.After`. It does not wait. Sources and destinations must stay valid and unchanged until the Batch
// has ended.
func (d *Batches) Decode(on Order, format uint32, streams []Bitstream) (*Batch, error) {
	rows := 0
	for i := range streams {
		s := &streams[i]
		if s.Chunk <= 0 || s.Size < 0 || s.Stored < 0 {
			return nil, errs.New(errs.ErrArgument, "stream %d: invalid size %d in chunks of %d", i, s.Size, s.Chunk)
		}
		rows += s.blockCount()
		if rows > MaxBatch || i >= MaxBatch {
			return nil, errs.New(errs.ErrArgument, "a batch cannot have more than %d chunks", MaxBatch)
		}
	}
	if rows == 0 {
		return &Batch{d: d}, nil
	}
	decoder, items := decoders[format]
	if !items && format != FormatX16 {
		return nil, errs.New(errs.ErrNotSupported, "algorithm %d is not supported on a GPU", format)
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

// Peek returns the lengths that streams state for their content, and waits for the result. It only uses Src and
// Stored. Raw blocks state a length only if they are X16 or Snappy.
func (d *Batches) Peek(on Order, kind Kind, format uint32, streams []Bitstream) ([]StreamInfo, error) {
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

// A kernelStep is a launch of a kernel for n items, with `threads` threads per item, in blocks of `block` threads (0
// means eight warps). items means that the kernel takes only rows.
type kernelStep struct {
	kernel, n, threads, block, shared int
	items                             bool
}

// Encode queues the encoding of contents to X16 streams. Src and Size of a Bitstream are the content, and Dst and
// Stored the space for the stream. Addresses must be multiples of 16, and so must Chunk if there are several chunks.
// Arg is the transform of X16 (0 stores the content unchanged). scratch is device memory of EncodeScratchSize bytes,
// with space for a block of each chunk. Batch.EncodedSizes returns the lengths of the streams.
func (d *Batches) Encode(on Order, streams []Bitstream, scratch uint64) (*Batch, error) {
	rows := 0
	for i := range streams {
		s := &streams[i]
		if s.Chunk <= 0 || s.Size < 0 || s.Stored < 0 || s.Arg > 8 || (s.Src|s.Dst)%16 != 0 ||
			s.Chunk < s.Size && s.Chunk%16 != 0 || s.Chunk > maxBlock {
			return nil, errs.New(errs.ErrArgument, "content %d: invalid size, alignment or transform: "+
				"%d bytes at %#x in chunks of %d, transform %d, to %#x", i, s.Size, s.Src, s.Chunk, s.Arg, s.Dst)
		}
		if s.Kind != 0 && s.Size > s.Chunk {
			return nil, errs.New(errs.ErrArgument, "content %d: %d bytes do not fit in one block", i, s.Size)
		}
		if rows += s.blockCount(); rows > MaxBatch {
			return nil, errs.New(errs.ErrArgument, "a batch cannot have more than %d chunks", MaxBatch)
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

// batchWork describes a batch. rows is 0 if streams are only inspected. few means that the table is passed with the
// launch. answers means that kernels write an answer for each stream.
type batchWork struct {
	format  uint32
	streams []Bitstream
	rows    int
	few     bool
	answers bool
	scratch uint64
}

// asCStep converts the step to C for a table, its rows and status words.
func (s kernelStep) asCStep(kernels []driver.Handle, table, rows, status uint64) C.struct_owcu_step {
	if s.block == 0 {
		s.block = 32 * C.OW_X16_WARPS
	}
	c := C.struct_owcu_step{kernel: C.owcu_handle(kernels[s.kernel]), block: C.uint32_t(s.block),
		grid: C.uint32_t(sizes.CeilDiv(s.n, s.block/s.threads)), shared: C.uint32_t(s.shared),
		few: C.uint32_t(cBool(s.kernel == batchX16))}
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
func (d *Batches) startBatch(on Order, work batchWork, plan func(split int) []kernelStep) (*Batch, error) {
	format, streams, rows := work.format, work.streams, work.rows
	if err := d.on.MakeStreamWait(on.Stream, on.After...); err != nil {
		return nil, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	kernels, err := d.kernels.Get()
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
		ctx: d.on.c, stream: C.uint64_t(on.Stream), done: p.done,
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
		return nil, d.on.errorOf(&e)
	}
	p.used, p.batch = true, batch
	return batch, nil
}

// encodedBlockSpace returns the space for an encoded block. No block is longer than its chunk.
func encodedBlockSpace(streams []Bitstream) (n int64) {
	for i := range streams {
		n = max(n, min(streams[i].Chunk, streams[i].Size))
	}
	return (n + 15) &^ 15
}

// EncodeScratchSize returns how many bytes of scratch memory Encode needs.
func EncodeScratchSize(streams []Bitstream) (n int64) {
	for i := range streams {
		n += int64(streams[i].blockCount())
	}
	return n * encodedBlockSpace(streams)
}

// EncodedSizes returns the lengths of the encoded streams. Wait must have returned.
func (b *Batch) EncodedSizes() []int64 {
	d := b.d
	d.mu.Lock()
	defer d.mu.Unlock()
	var out []int64
	for _, p := range b.peeks {
		out = append(out, int64(p.size))
	}
	return out
}

// Done reports, without waiting, whether the batch has ended. After a device error it has ended, unless the driver
// denies access to the context.
func (b *Batch) Done() bool {
	d := b.d
	d.mu.Lock()
	defer d.mu.Unlock()
	return b.pad == nil || b.pad.isDone()
}

// Wait waits for the batch. It returns the error of each stream (nil for a valid stream), and the device's error. If
// Done is false afterwards, the state is unknown: the batch may still be running, and Wait may be called again.
func (b *Batch) Wait() ([]error, error) {
	d := b.d
	d.mu.Lock()
	if p := b.pad; p != nil {
		d.waiting++
		d.mu.Unlock()
		// A later batch may use the pad during the wait, but only after this batch's result has been set.
		isKnown, err := p.wait()
		d.mu.Lock()
		d.waiting--
		if !isKnown && b.pad != nil {
			d.mu.Unlock()
			return nil, err
		}
		b.takeResults(p, err)
	}
	defer d.mu.Unlock()
	if b.err != nil {
		return nil, b.err
	}
	out := make([]error, b.n)
	for i, w := range b.words {
		out[i] = statusError(w)
	}
	return out, nil
}
