// Package cpu implements the host as a device. Tensors are in anonymous memory on huge pages, and chunks are decoded on
// the calling goroutine.
package cpu

import (
	"context"
	"errors"
	"math/bits"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/overwire/overwire/gosrc/codec"
	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/errs"
	"golang.org/x/sys/unix"
)

const (
	// Align is the alignment of every tensor, which is a cache line.
	Align = 64

	huge = 2 << 20
	page = 4096
	// Faulting in memory on 4 KiB pages takes eight times as long as on huge pages, so tensors share regions that are
	// large enough for huge pages. Each tensor returns its own pages when it is freed. Smaller tensors share
	// small arenas, so that a single tensor keeps little memory alive.
	regionBytes = 1 << 30
	small       = 256 << 10
	arenaBytes  = 4 << 20
)

// Alloc returns zeroed memory for tensors of the given sizes. If it fails, it allocates nothing. Each tensor is aligned
// to Align and has one holder, the caller.
func Alloc(sizes []int64) ([]device.Memory, error) {
	mem := make([]device.Memory, len(sizes))
	if err := pack(mem, sizes); err != nil {
		Release(mem)
		return nil, err
	}
	return mem, nil
}

// pack sets the memory of tensors. Large ones share regions, and small ones share arenas.
func pack(mem []device.Memory, sizes []int64) error {
	big, little := packer{limit: regionBytes}, packer{limit: arenaBytes}
	for i, n := range sizes {
		var err error
		switch {
		case n < 0:
			err = errs.New(errs.ErrArgument, "invalid tensor size %d: expected 0 or more bytes", n)
		case n == 0:
		case n < small:
			err = little.add(mem, sizes, i)
		default:
			err = big.add(mem, sizes, i)
		}
		if err != nil {
			return err
		}
	}
	if err := big.flush(mem, sizes); err != nil {
		return err
	}
	return little.flush(mem, sizes)
}

// Release releases every element of mem.
func Release(mem []device.Memory) {
	for i := range mem {
		mem[i].Release()
		mem[i] = device.Memory{}
	}
}

// A packer collects tensors until a region is full.
type packer struct {
	limit, used int64
	pending     []int
}

func (p *packer) add(mem []device.Memory, sizes []int64, i int) error {
	n := (sizes[i] + Align - 1) &^ (Align - 1)
	if n < sizes[i] {
		return errs.New(errs.ErrMemory, "a tensor of %d bytes is too large", sizes[i])
	}
	if p.used > 0 && p.used+n > p.limit {
		if err := p.flush(mem, sizes); err != nil {
			return err
		}
	}
	p.used += n
	p.pending = append(p.pending, i)
	return nil
}

// flush maps one region for the pending tensors and sets their memory.
func (p *packer) flush(mem []device.Memory, sizes []int64) error {
	if len(p.pending) == 0 {
		return nil
	}
	kind := int64(device.KindRegion)
	if p.limit == arenaBytes {
		kind = device.KindMap
	}
	// The Block comes after the tensors, so that they begin on a huge page.
	base, block, err := allocateBlock(p.used, int64(len(p.pending)), kind)
	if err != nil {
		return err
	}
	var off int64
	for _, i := range p.pending {
		mem[i] = device.Memory{Ptr: unsafe.Add(base, off), Bytes: sizes[i], Block: block}
		off += (sizes[i] + Align - 1) &^ (Align - 1)
	}
	p.pending, p.used = p.pending[:0], 0
	return nil
}

// Map returns anonymous memory of at least n bytes and its actual length, on huge pages if it is large
// enough. The caller frees it with Unmap or makes it a Block.
func Map(n int64) (unsafe.Pointer, int64, error) {
	if n <= 0 || n > 1<<46 {
		return nil, 0, &errs.Memory{Where: "host", Asked: n, Free: -1, Total: -1}
	}
	length := (n + page - 1) &^ (page - 1)
	p, err := reserve(length)
	if err != nil {
		return nil, 0, &errs.Memory{Where: "host", Asked: n, Free: -1, Total: -1, Err: err.Error()}
	}
	if length >= huge {
		_ = unix.Madvise(unsafe.Slice((*byte)(p), length), unix.MADV_HUGEPAGE)
	}
	return p, length, nil
}

// reserve maps length bytes of anonymous memory, in whole pages. If the memory can contain a huge page, it begins at
// a huge page boundary.
func reserve(length int64) (unsafe.Pointer, error) {
	slack := int64(0)
	if length >= huge {
		slack = huge
	}
	p, err := unix.MmapPtr(-1, 0, nil, uintptr(length+slack), unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil || slack == 0 {
		return p, err
	}
	head := (huge - int64(uintptr(p)&(huge-1))) & (huge - 1)
	if head > 0 {
		_ = unix.MunmapPtr(p, uintptr(head))
	}
	p = unsafe.Add(p, head)
	if slack > head {
		_ = unix.MunmapPtr(unsafe.Add(p, length), uintptr(slack-head))
	}
	return p, nil
}

// Unmap frees memory returned by Map.
func Unmap(p unsafe.Pointer, length int64) { _ = unix.MunmapPtr(p, uintptr(length)) }

// A Decoder runs decode tasks for one goroutine. The zero value is ready to use. It keeps scratch memory for
// chunks that are not contiguous at the destination.
type Decoder struct{ scratch []byte }

// Run decodes the chunk of a task from its stored bytes.
func (d *Decoder) Run(t *device.DecodeTask, stored []byte) error {
	n := int64(t.Chunk.Logical)
	if t.View == nil {
		return codec.Decode(unsafe.Slice((*byte)(t.Dst), n), stored, t.Chunk)
	}
	if int64(cap(d.scratch)) < n {
		d.scratch = make([]byte, n)
	}
	whole := d.scratch[:n]
	if err := codec.Decode(whole, stored, t.Chunk); err != nil {
		return err
	}
	t.View.Runs(n, func(dst, src, n int64) {
		copy(unsafe.Slice((*byte)(unsafe.Add(t.Dst, dst)), n), whole[src:src+n])
	})
	return nil
}

const (
	// Arenas have 2^k bytes, from leastArena to mostArena. Up to mostArena bytes of each size are cached.
	leastArena, mostArena = 8 << 10, 512 << 10
	arenaSizes            = 7
)

// free holds unused arenas, by size, for reuse. Mapping and unmapping an arena takes longer than reading its contents,
// and it slows the thread down afterwards, because the processor loses its address translations. The lists are in
// memory that is never unmapped, because tensors may outlive everything else. Taking an arena needs the lock, but
// returning one does not.
var free struct {
	sync.Mutex
	lists *[arenaSizes]device.FreeList // nil before the first use
}

// allocateBlock returns n zeroed bytes and the block that owns them. The block is an arena if kind is KindMap and n is
// small enough; otherwise it has the given kind.
func allocateBlock(n, holders, kind int64) (unsafe.Pointer, *device.Block, error) {
	if kind != device.KindMap || n+Align > mostArena {
		base, length, err := Map(n + Align)
		if err != nil {
			return nil, nil, err
		}
		return base, device.NewBlock(unsafe.Add(base, n), holders, base, uint64(length), kind), nil
	}
	length := int64(leastArena)
	if n+Align > leastArena {
		length = 1 << bits.Len64(uint64(n+Align-1))
	}
	list, base, err := takeArena(length)
	if err != nil {
		return nil, nil, err
	}
	if base != nil {
		clear(unsafe.Slice((*byte)(base), n))
	} else if base, _, err = Map(length); err != nil {
		return nil, nil, err
	}
	arena := device.NewListed(unsafe.Add(base, n), holders, base, uint64(length), device.KindArena,
		unsafe.Pointer(list))
	return base, &arena.Block, nil
}

// takeArena returns the list of arenas of a length, and the memory of one of its arenas, or nil if the list is empty.
func takeArena(length int64) (*device.FreeList, unsafe.Pointer, error) {
	free.Lock()
	defer free.Unlock()
	if free.lists == nil {
		p, _, err := Map(int64(unsafe.Sizeof(*free.lists)))
		if err != nil {
			return nil, nil, err
		}
		free.lists = (*[arenaSizes]device.FreeList)(p)
		for i := range free.lists {
			free.lists[i].Room = mostArena
		}
	}
	list := &free.lists[bits.Len64(uint64(length/leastArena))-1]
	arena := list.TakeBlock()
	if arena == nil {
		return list, nil, nil
	}
	base, _ := arena.Base()
	return list, base, nil
}

// MapFile maps a whole file of the given size as private and writable memory: writes never reach the file. The mapping
// has n holders, and Memory for parts of it must refer to the returned block. The mapping stays valid after the file is
// closed or unlinked. If another program truncates the file, reading the lost pages is fatal (SIGBUS), as for any
// mapping.
//
// The mapping of a file of at least a huge page begins at a huge page boundary, so that the kernel can map large
// folios of the page cache as a whole. That reduces page faults to a tenth.
//
// If alone is set, every byte has at most one holder, and releasing a holder drops its pages, including modified ones.
func MapFile(fd int, size int64, n int64, alone bool) (unsafe.Pointer, *device.Block, error) {
	if err := StillHas(fd, size); err != nil {
		return nil, nil, err
	}
	length := (size + page - 1) &^ (page - 1)
	// Reserve an additional page for the block, then map the file over the pages before it.
	base, err := reserve(length + page)
	if err != nil {
		return nil, nil, errs.New(errs.ErrMemory, "cannot map %d bytes: %v", size, err)
	}
	if _, err := unix.MmapPtr(fd, 0, base, uintptr(length), unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_PRIVATE|unix.MAP_FIXED); err != nil {
		_ = unix.MunmapPtr(base, uintptr(length+page))
		return nil, nil, errs.FromOS(err)
	}
	kind := int64(device.KindMap)
	if alone {
		kind = device.KindRegion
	}
	block := device.NewBlock(unsafe.Add(base, length), n, base, uint64(length+page), kind)
	return base, block, nil
}

// Announce asks the kernel to start reading the pages of [p, p+n) of a mapped file. It is only advice and does
// not wait.
func Announce(p unsafe.Pointer, n int64) {
	head := int64(uintptr(p) & (page - 1))
	_ = unix.Madvise(unsafe.Slice((*byte)(unsafe.Add(p, -head)), n+head), unix.MADV_WILLNEED)
}

// StillHas returns an error if a file is now shorter than size. The error is an errs.At with the offset of the
// current end.
func StillHas(fd int, size int64) error {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return errs.FromOS(err)
	}
	if st.Size < size {
		return &errs.At{Verb: "map", Chunk: -1, Offset: st.Size,
			Err: errs.New(errs.ErrCorrupt, "truncated: the file had %d bytes when it was opened, and now has %d", size,
				st.Size)}
	}
	return nil
}

// Populate reads the pages of [p, p+n) of a mapped file, and reports a failing disk as an error. On kernels before
// 5.14, and in sandboxes that forbid the call, it does nothing, and pages are read on first access.
func Populate(p unsafe.Pointer, n int64) error {
	const populateRead = 22 // MADV_POPULATE_READ
	head := int64(uintptr(p) & (page - 1))
	b := unsafe.Slice((*byte)(unsafe.Add(p, -head)), n+head)
	for {
		err := unix.Madvise(b, populateRead)
		switch {
		case err == nil, errors.Is(err, unix.EINVAL), errors.Is(err, unix.EPERM), errors.Is(err, unix.ENOSYS):
			return nil
		case errors.Is(err, unix.EINTR):
		case errors.Is(err, unix.EFAULT):
			return errs.New(errs.ErrIO, "the file cannot be read or was truncated")
		default:
			return errs.FromOS(err)
		}
	}
}

// A Queue is the device.Queue of the host. The worker that read a piece also decodes it, while the bytes are in
// the core's cache. The memory is allocated once and never grows.
type Queue struct {
	free   chan *slot
	memory device.Memory // holds all slots; zero if there are no slots
}

type slot struct {
	bytes, view []byte // view, if not nil, replaces bytes
	owned       atomic.Bool
}

func (s *slot) Memory() []byte {
	if s.view != nil {
		return s.view
	}
	return s.bytes
}

func (s *slot) View(b []byte) { s.view = b }

func (s *slot) ViewMirror() unsafe.Pointer { return nil }

func (s *slot) CheckOnSubmit() {}

// decoders is shared by all queues, because a pool per queue would keep its decoders until the
// second garbage collection.
var decoders = sync.Pool{New: func() any { return new(Decoder) }}

// NewQueue returns a queue with slots of at least size bytes. If size is 0, it has no slots.
func NewQueue(slots int, size int64) (*Queue, error) {
	if size == 0 {
		slots = 0
	}
	q := &Queue{free: make(chan *slot, slots)}
	if slots == 0 {
		return q, nil
	}
	size = (size + page - 1) &^ (page - 1)
	all, err := Alloc([]int64{size * int64(slots)})
	if err != nil {
		return nil, err
	}
	q.memory = all[0]
	mem := q.memory.Slice()
	for i := range int64(slots) {
		q.free <- &slot{bytes: mem[i*size : (i+1)*size : (i+1)*size]}
	}
	return q, nil
}

// Get waits for a free slot, or until ctx ends.
func (q *Queue) Get(ctx context.Context) (device.Slot, error) {
	select {
	case s := <-q.free:
		s.owned.Store(true)
		return s, nil
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

// GetFor is Get, because all readers share the slots.
func (q *Queue) GetFor(ctx context.Context, _ int) (device.Slot, error) { return q.Get(ctx) }

// Put returns a slot.
func (q *Queue) Put(s device.Slot) {
	own := s.(*slot)
	if !own.owned.Swap(false) {
		panic("cpu: slot returned twice")
	}
	own.view = nil
	q.free <- own
}

// Submit decodes the tasks and returns when they are done. After the first error, all later tasks get that error.
func (q *Queue) Submit(s device.Slot, _ int64, tasks []device.DecodeTask, done func(task int, err error)) error {
	defer q.Put(s)
	dec := decoders.Get().(*Decoder)
	defer decoders.Put(dec)
	memory := s.Memory()
	var err error
	for i := range tasks {
		t := &tasks[i]
		if err == nil {
			err = dec.Run(t, memory[t.Src:t.Src+t.Chunk.Stored])
		}
		done(i, err)
	}
	return nil
}

// Decode decodes the chunk of a task from its stored bytes.
func Decode(t *device.DecodeTask, stored []byte) error {
	dec := decoders.Get().(*Decoder)
	defer decoders.Put(dec)
	return dec.Run(t, stored)
}

// Drain returns immediately: Submit does all the work.
func (q *Queue) Drain(context.Context) error { return nil }

// Asynchronous returns false: workers do the decoding.
func (q *Queue) Asynchronous() bool { return false }

// CanCheck returns false: the worker that read a chunk compares its checksum.
func (q *Queue) CanCheck() bool { return false }

// TraceTimes does nothing: workers record the times.
func (q *Queue) TraceTimes(device.TraceFunc) error { return nil }

// PinnedBytes returns the size of all slots in bytes.
func (q *Queue) PinnedBytes() int64 { return q.memory.Bytes }

// Close waits until every slot has been returned, and frees the memory.
func (q *Queue) Close() {
	for range cap(q.free) {
		<-q.free
	}
	q.memory.Release()
}
