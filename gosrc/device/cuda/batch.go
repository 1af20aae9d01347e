//go:build cgo

package cuda

/*
#include <stdlib.h>
#include "batch.h"
#include "../../../cuda/abi.h"
#include "../../../cuda/abi_stream.h"
*/
import "C"

import (
	"sync"
	"unsafe"

	"github.com/overwire/overwire/gosrc/fault"
)

// Kernels of batches, in the order of their numbers.
const (
	batchNames = "ow_stream_open\x00ow_stream_close\x00ow_stream_peek\x00ow_stream_x16\x00ow_lz4_decode\x00ow_snappy_decode\x00" +
		"ow_cascaded_decode\x00ow_stream_cut\x00ow_x16_encode\x00ow_stream_sum\x00ow_stream_join\x00"
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
	batchKernels
)

// decoders are the kernels that take rows of items, by nvCOMP's number of the
// algorithm.
var decoders = map[uint32]int{C.OW_STREAM_LZ4: batchLZ4, C.OW_STREAM_SNAPPY: batchSnappy, C.OW_STREAM_CASCADED: batchCascaded}

// Decodes says whether streams of an algorithm are decoded by a kernel.
func Decodes(format uint32) bool {
	_, ok := decoders[format]
	return ok || format == FormatX16
}

const (
	padBytes  = 16 << 10 // pinned: words of status, then the table
	padRoom   = 64 << 10 // on the device: the table, then rows
	padCount  = 128      // that many batches are under way before one waits
	padEvents = 2
	rowBytes  = int(unsafe.Sizeof(C.ow_batch_item{}))
	headSize  = int(unsafe.Sizeof(C.ow_stream_head{}))
	entrySize = int(unsafe.Sizeof(C.ow_stream{}))
	peekSize  = int(unsafe.Sizeof(C.ow_stream_peek_t{}))
)

// A pad is the memory that one batch is written on. Its kernels may still run:
// then batch is not nil, or nobody asks any more.
type pad struct {
	host        unsafe.Pointer
	mapped, dev C.owcu_ptr
	bytes, room int
	join, done  C.owcu_handle
	used        bool // done was recorded
	batch       *Batch
}

// A slab is one pinned and one device allocation, cut into pads.
type slab struct {
	pages pages
	c     *C.struct_owcu_pad // with its events, in C memory
	pads  []*pad
}

// batches is a Device's part in all this.
type batches struct {
	mu      sync.Mutex
	kernels *[batchKernels]C.owcu_handle
	waiting int // callers of Wait: no event is destroyed meanwhile
	small   *slab
	next    int
	large   []*slab // of one pad each
}

// A Batch is work that was queued on a stream.
type Batch struct {
	d     *Device // whose batch.mu guards the rest
	n     int
	pad   *pad // nil: words and err are known
	words []uint32
	peeks []C.ow_stream_peek_t
	err   error
}

// bring makes the kernels ready. b.mu is held.
func (d *Device) bring() error {
	if d.batch.kernels != nil {
		return nil
	}
	if _, err := d.functions(); err != nil {
		return err
	}
	names := []byte(batchNames)
	var fns [batchKernels]C.owcu_handle
	var e C.struct_owcu_error
	if C.owcu_kernels(d.ctx, d.module.module, (*C.char)(unsafe.Pointer(&names[0])), batchKernels, &fns[0], &e) != 0 {
		return failure(d.index, &e)
	}
	d.batch.kernels = &fns
	return nil
}

func (d *Device) newSlab(count, bytes, room int) (*slab, error) {
	p, err := newPages(int64(count * bytes))
	if err != nil {
		return nil, err
	}
	events := padEvents * count
	c := (*C.struct_owcu_pad)(C.calloc(1, C.size_t(unsafe.Sizeof(C.struct_owcu_pad{})+uintptr(events)*unsafe.Sizeof(C.owcu_handle(nil)))))
	if c == nil {
		panic("out of memory for the events of a batch")
	}
	c.events, c.count = (*C.owcu_handle)(unsafe.Add(unsafe.Pointer(c), unsafe.Sizeof(*c))), C.int(events)
	s := &slab{pages: p, c: c}
	var e C.struct_owcu_error
	if rc := C.owcu_pad_new(d.ctx, c, p.p, C.uint64_t(count*bytes), C.uint64_t(count*room), &e); rc != 0 {
		if rc > 0 {
			d.later(func() bool { return d.releaseSlab(s) })
		} else {
			s.forget()
		}
		return nil, d.sized(failure(d.index, &e), int64(count*room), "the tables of a batch")
	}
	each := unsafe.Slice(c.events, events)
	for i := range count {
		s.pads = append(s.pads, &pad{
			host: unsafe.Add(p.p, i*bytes), mapped: c.mapped + C.owcu_ptr(i*bytes), dev: c.device + C.owcu_ptr(i*room), bytes: bytes, room: room,
			join: each[padEvents*i], done: each[padEvents*i+1],
		})
	}
	return s, nil
}

// forget frees what a slab has on the host; the driver has none of it any more.
func (s *slab) forget() {
	s.pages.free()
	C.free(unsafe.Pointer(s.c))
}

// freeSlab waits for the batches of a slab and gives it back.
func (d *Device) freeSlab(s *slab) error {
	for _, p := range s.pads {
		d.settle(p)
	}
	var e C.struct_owcu_error
	rc := C.owcu_pad_free(d.ctx, s.c, &e)
	if rc <= 0 {
		s.forget()
	}
	return d.given(rc, &e, func() bool { return d.releaseSlab(s) })
}

// releaseSlab gives a slab back that no batch uses, and says whether it is gone.
func (d *Device) releaseSlab(s *slab) bool {
	var e C.struct_owcu_error
	if C.owcu_pad_free(d.ctx, s.c, &e) > 0 {
		return false
	}
	s.forget()
	return true
}

// trimBatches gives back the memory of batches, when they are done, unless
// somebody waits for one.
func (d *Device) trimBatches() (err error) {
	b := &d.batch
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.waiting > 0 {
		return nil
	}
	all := b.large
	if b.small != nil {
		all = append(all, b.small)
	}
	b.small, b.large = nil, nil
	for _, s := range all {
		if e := d.freeSlab(s); err == nil {
			err = e
		}
	}
	return err
}

// settle waits for a pad's last batch, and tells it what became of it.
func (d *Device) settle(p *pad) {
	if !p.used {
		return
	}
	var e C.struct_owcu_error
	rc := C.owcu_batch_wait(d.ctx, p.done, nil, &e)
	p.used = false
	if p.batch == nil {
		return
	}
	var err error
	if rc != 0 {
		err = failure(d.index, &e)
	}
	p.batch.end(p, err)
}

// end reads what a batch's kernels said.
func (b *Batch) end(p *pad, err error) {
	if b.pad != p {
		return
	}
	b.err = err
	b.words = append([]uint32(nil), unsafe.Slice((*uint32)(p.host), b.n)...)
	if b.peeks != nil {
		copy(b.peeks, unsafe.Slice((*C.ow_stream_peek_t)(unsafe.Add(p.host, peekAt(b.n))), b.n))
	}
	b.pad, p.batch = nil, nil
}

// pad gives the memory for n streams and rows. b.mu is held.
func (d *Device) pad(n, rows int) (*pad, error) {
	b := &d.batch
	bytes, room := need(n, rows)
	if bytes <= padBytes && room <= padRoom {
		if b.small == nil {
			s, err := d.newSlab(padCount, padBytes, padRoom)
			if err != nil {
				return nil, err
			}
			b.small = s
		}
		p := b.small.pads[b.next%padCount]
		b.next++
		d.settle(p)
		return p, nil
	}
	const most = 4
	for i, s := range b.large {
		if p := s.pads[0]; p.bytes >= bytes && p.room >= room && d.settled(p) {
			b.large = append(append(b.large[:i:i], b.large[i+1:]...), s) // the last used goes last
			d.settle(p)
			return p, nil
		}
	}
	if len(b.large) >= most && b.waiting == 0 {
		first := b.large[0]
		b.large = b.large[1:]
		d.later(func() bool { return d.retire(first) })
	}
	up := func(n int) int { return (n + n/4 + huge - 1) &^ (huge - 1) }
	s, err := d.newSlab(1, up(bytes), up(room))
	if err != nil {
		return nil, err
	}
	b.large = append(b.large, s)
	return s.pads[0], nil
}

// settled says whether a pad's last batch is done.
func (d *Device) settled(p *pad) bool {
	if !p.used {
		return true
	}
	var e C.struct_owcu_error
	var ready C.int
	return C.owcu_batch_wait(d.ctx, p.done, &ready, &e) != 0 || ready != 0
}

// retire gives a slab of one pad back when its batch is done, and says whether it
// is gone.
func (d *Device) retire(s *slab) bool {
	d.batch.mu.Lock()
	done := d.batch.waiting == 0 && d.settled(s.pads[0])
	if done {
		d.settle(s.pads[0])
	}
	d.batch.mu.Unlock()
	return done && d.releaseSlab(s)
}

// Where things lie on a pad: words of status, then the table; when streams are
// only looked at, what they say follows.
func tableAt(n int) int { return (4*n + 63) &^ 63 }
func peekAt(n int) int  { return tableAt(n) + headSize + n*entrySize }

func need(n, rows int) (bytes, room int) {
	return peekAt(n) + n*peekSize, rowsAt(n) + rows*rowBytes
}

// rowsAt is where the rows lie on the device.
func rowsAt(n int) int { return (headSize + n*entrySize + 255) &^ 255 }

// MaxBatch is the most streams, and the most chunks of them, of one batch.
const MaxBatch = 1 << 24

// Decode queues the decoding of streams of one algorithm on a stream of the
// caller's, after what is queued now on those of `on.After`. It does not wait:
// sources and destinations stay as they are until the Batch is done.
func (d *Device) Decode(on Order, format uint32, streams []Stream) (*Batch, error) {
	rows := 0
	for i := range streams {
		s := &streams[i]
		if s.Chunk <= 0 || s.Size < 0 || s.Stored < 0 {
			return nil, fault.New(fault.ErrArgument, "stream %d: %d bytes of content in chunks of %d", i, s.Size, s.Chunk)
		}
		rows += s.rows()
		if rows > MaxBatch || i >= MaxBatch {
			return nil, fault.New(fault.ErrArgument, "a batch of more than %d chunks", MaxBatch)
		}
	}
	if rows == 0 {
		return &Batch{d: d}, nil
	}
	decoder, items := decoders[format]
	if !items && format != FormatX16 {
		return nil, fault.New(fault.ErrNotSupported, "format %d on a GPU", format)
	}
	return d.start(on, task{format: format, streams: streams, rows: rows}, func(k *[batchKernels]C.owcu_handle, b *C.struct_owcu_batch, split uint32) {
		if !items {
			x := step(k[batchX16], rows*int(split), 32, 32*C.OW_X16_WARPS)
			x.shared = C.OW_STREAM_SHARED
			steps(b, x)
			if len(streams) <= C.OW_STREAM_FEW {
				b.bytes = 0
			}
			return
		}
		each := step(k[decoder], rows, 32, C.OW_BATCH_THREADS)
		each.items = 1
		steps(b, step(k[batchOpen], rows, 1, 32*C.OW_X16_WARPS), each, step(k[batchClose], rows, 1, 32*C.OW_X16_WARPS))
	})
}

// Peek asks streams how long their content is, and waits for the answer. Only
// Src and Stored of them count. Of raw blocks only those of X16 and Snappy say
// it.
func (d *Device) Peek(on Order, kind Kind, format uint32, streams []Stream) ([]Peeked, error) {
	if len(streams) == 0 {
		return nil, nil
	}
	each := make([]Stream, len(streams))
	for i, s := range streams {
		each[i] = Stream{Src: s.Src, Stored: s.Stored, Kind: kind}
	}
	b, err := d.start(on, task{format: format, streams: each, told: true}, func(k *[batchKernels]C.owcu_handle, b *C.struct_owcu_batch, _ uint32) {
		steps(b, step(k[batchPeek], len(each), 1, 32*C.OW_X16_WARPS))
	})
	if err != nil {
		return nil, err
	}
	if _, err := b.Wait(); err != nil {
		return nil, err
	}
	out := make([]Peeked, len(each))
	for i, p := range b.peeks {
		out[i] = Peeked{Size: int64(p.size), Chunk: int64(p.chunk), Format: uint32(p.format), Err: statusError(uint32(p.status))}
	}
	return out, nil
}

// step is a launch over n things of so many threads each.
func step(kernel C.owcu_handle, n, threads, block int) C.struct_owcu_step {
	per := block / threads
	return C.struct_owcu_step{kernel: kernel, n: C.uint32_t(n), grid: C.uint32_t((n + per - 1) / per), block: C.uint32_t(block)}
}

func steps(b *C.struct_owcu_batch, all ...C.struct_owcu_step) {
	b.nsteps = C.uint32_t(copy(b.steps[:], all))
}

// Encode queues the making of streams of X16 out of contents: Src and Size of a
// Stream are the content's, Dst and Stored the room for the stream, all on
// multiples of 16, as Chunk is where there are several; Arg is the transform of
// X16 (0: store as it is). scratch is memory of the device for a block of
// every chunk: Scratch tells how much.
// Batch.Sizes tells how long the streams became.
func (d *Device) Encode(on Order, streams []Stream, scratch uint64) (*Batch, error) {
	rows := 0
	for i := range streams {
		s := &streams[i]
		if s.Chunk <= 0 || s.Size < 0 || s.Stored < 0 || s.Arg > 8 || (s.Src|s.Dst)%16 != 0 || s.Chunk < s.Size && s.Chunk%16 != 0 || s.Chunk > maxBlock {
			return nil, fault.New(fault.ErrArgument, "content %d: %d bytes at %#x in chunks of %d, transform %d, to %#x", i, s.Size, s.Src, s.Chunk, s.Arg, s.Dst)
		}
		if s.Kind != 0 && s.Size > s.Chunk {
			return nil, fault.New(fault.ErrArgument, "content %d: %d bytes in one block", i, s.Size)
		}
		if rows += s.rows(); rows > MaxBatch {
			return nil, fault.New(fault.ErrArgument, "a batch of more than %d chunks", MaxBatch)
		}
	}
	if rows == 0 {
		return &Batch{d: d}, nil
	}
	t := task{format: FormatX16, streams: streams, rows: rows, told: true, scratch: scratch}
	return d.start(on, t, func(k *[batchKernels]C.owcu_handle, b *C.struct_owcu_batch, split uint32) {
		threads := int(C.ow_x16_threads(C.uint64_t(slotOf(streams))))
		encode := step(k[batchEncode], rows, threads, threads)
		encode.items = 1
		steps(b, step(k[batchCut], rows, 1, 32*C.OW_X16_WARPS), encode, step(k[batchSum], len(streams), 32, 32*C.OW_X16_WARPS),
			step(k[batchJoin], rows*int(split), 32, 32*C.OW_X16_WARPS))
	})
}

// A task is what a batch is about. rows 0: the streams are only looked at. told:
// kernels say something of each stream.
type task struct {
	format  uint32
	streams []Stream
	rows    int
	told    bool
	scratch uint64
}

// start writes a batch on a pad and queues it.
func (d *Device) start(on Order, t task, plan func(*[batchKernels]C.owcu_handle, *C.struct_owcu_batch, uint32)) (*Batch, error) {
	format, streams, rows := t.format, t.streams, t.rows
	g := &d.batch
	g.mu.Lock()
	defer g.mu.Unlock()
	if err := d.bring(); err != nil {
		return nil, err
	}
	p, err := d.pad(len(streams), rows)
	if err != nil {
		return nil, err
	}
	n := len(streams)
	clear(unsafe.Slice((*uint32)(p.host), n))
	table := unsafe.Add(p.host, tableAt(n))
	entries := unsafe.Slice((*C.ow_stream)(unsafe.Add(table, headSize)), n)
	first, split := 0, split(streams, rows)
	for i := range streams {
		s := &streams[i]
		entries[i] = C.ow_stream{
			src: C.uint64_t(s.Src), stored: C.uint64_t(s.Stored), dst: C.uint64_t(s.Dst), size: C.uint64_t(s.Size), chunk: C.uint64_t(s.Chunk),
			first: C.uint32_t(first), kind: C.uint32_t(s.Kind), format: C.uint32_t(format), arg: C.uint32_t(s.Arg),
		}
		if rows > 0 {
			k := s.rows()
			entries[i].rows = C.uint32_t(k)
			first += k
		}
	}
	*(*C.ow_stream_head)(table) = C.ow_stream_head{
		streams: C.uint32_t(n), rows: C.uint32_t(rows), split: C.uint32_t(split), told: C.uint32_t(peekAt(n)),
		scratch: C.uint64_t(t.scratch), slot: C.uint64_t(slotOf(streams)),
	}
	b := C.struct_owcu_batch{
		ctx: d.ctx, stream: C.uint64_t(on.Stream), join: p.join, done: p.done,
		to: p.dev, table: table, bytes: C.uint64_t(headSize + n*entrySize), status: p.mapped,
	}
	if len(on.After) > 0 {
		b.after, b.nafter = (*C.uint64_t)(C.CBytes(unsafe.Slice((*byte)(unsafe.Pointer(&on.After[0])), 8*len(on.After)))), C.uint64_t(len(on.After))
		defer C.free(unsafe.Pointer(b.after))
	}
	plan(g.kernels, &b, uint32(split))
	for i := range b.steps[:b.nsteps] {
		b.steps[i].a, b.steps[i].b = p.dev, p.dev+C.owcu_ptr(rowsAt(n))
		if b.bytes == 0 {
			b.steps[i].a = 0
		}
		if rows == 0 {
			b.steps[i].b = p.mapped + C.owcu_ptr(peekAt(n))
		}
	}
	made := &Batch{d: d, n: n, pad: p}
	if t.told {
		made.peeks = make([]C.ow_stream_peek_t, n)
	}
	var e C.struct_owcu_error
	if C.owcu_batch(&b, &e) != 0 {
		return nil, failure(d.index, &e)
	}
	p.used, p.batch = true, made
	return made, nil
}

// slotOf is the room of a block that is being made: none is longer than its chunk.
func slotOf(streams []Stream) (n int64) {
	for i := range streams {
		n = max(n, min(streams[i].Chunk, streams[i].Size))
	}
	return (n + 15) &^ 15
}

// Scratch is the bytes of scratch memory that Encode needs.
func Scratch(streams []Stream) (n int64) {
	for i := range streams {
		n += int64(streams[i].rows())
	}
	return n * slotOf(streams)
}

// Sizes is how long the streams of Encode became, once Wait has returned.
func (b *Batch) Sizes() []int64 {
	g := &b.d.batch
	g.mu.Lock()
	defer g.mu.Unlock()
	var out []int64
	for _, p := range b.peeks {
		out = append(out, int64(p.size))
	}
	return out
}

// Done says, without waiting for it, whether the batch is done. After an error of
// the device it is.
func (b *Batch) Done() bool {
	g := &b.d.batch
	g.mu.Lock()
	defer g.mu.Unlock()
	return b.pad == nil || b.d.settled(b.pad)
}

// Wait waits for the batch and says what each stream's decoding came to: nil
// where all is good. The error is the device's.
func (b *Batch) Wait() ([]error, error) {
	g := &b.d.batch
	g.mu.Lock()
	if p := b.pad; p != nil {
		g.waiting++
		g.mu.Unlock()
		// The pad may become another batch's meanwhile, which is done later: then
		// this one is told before.
		var e C.struct_owcu_error
		var err error
		if C.owcu_batch_wait(b.d.ctx, p.done, nil, &e) != 0 {
			err = failure(b.d.index, &e)
		}
		g.mu.Lock()
		g.waiting--
		b.end(p, err)
	}
	defer g.mu.Unlock()
	if b.err != nil {
		return nil, b.err
	}
	out := make([]error, b.n)
	for i, w := range b.words {
		out[i] = statusError(w)
	}
	return out, nil
}
