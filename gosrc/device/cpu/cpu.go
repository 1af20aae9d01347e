// Package cpu implements the host as a device. Tensors are in anonymous memory on huge pages, and chunks are decoded on
// the calling goroutine.
package cpu

import (
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/overwire/overwire/gosrc/codec"
	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/errs"
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
