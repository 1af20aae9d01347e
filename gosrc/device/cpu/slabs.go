package cpu

// This file keeps small slabs that tensors have left, for the next ones: to map memory and to unmap it
// takes longer than to read what it is for, and makes all that the thread does next slower, since the
// processor forgets where its pages lie.

import (
	"math/bits"
	"sync"
	"unsafe"

	"github.com/overwire/overwire/gosrc/device"
)

const (
	// Slabs that are kept have 2^k bytes, from leastSlab to mostSlab; of each size, mostSlab bytes are kept.
	leastSlab, mostSlab = 8 << 10, 512 << 10
	slabSizes           = 7
)

// free are the slabs without a tensor, by size. The lists lie in memory that is never unmapped, since
// tensors may outlive all else. To take a slab needs the lock; to leave one does not.
var free struct {
	sync.Mutex
	lists *[slabSizes]device.FreeList // nil: not there yet
}

// allocateBlock returns n zeroed bytes and the block that owns them, which is of a kind, or a slab.
func allocateBlock(n, holders, kind int64) (unsafe.Pointer, *device.Block, error) {
	if kind != device.KindMap || n+Align > mostSlab {
		base, length, err := Map(n + Align)
		if err != nil {
			return nil, nil, err
		}
		return base, device.NewBlock(unsafe.Add(base, n), holders, base, uint64(length), kind), nil
	}
	length := int64(leastSlab)
	if n+Align > leastSlab {
		length = 1 << bits.Len64(uint64(n+Align-1))
	}
	list, base, err := takeSlab(length)
	if err != nil {
		return nil, nil, err
	}
	if base != nil {
		clear(unsafe.Slice((*byte)(base), n))
	} else if base, _, err = Map(length); err != nil {
		return nil, nil, err
	}
	slab := device.NewListed(unsafe.Add(base, n), holders, base, uint64(length), device.KindSlab,
		unsafe.Pointer(list))
	return base, &slab.Block, nil
}

// takeSlab returns the list of slabs of a length, and the memory of one of them; nil: the list is empty.
func takeSlab(length int64) (*device.FreeList, unsafe.Pointer, error) {
	free.Lock()
	defer free.Unlock()
	if free.lists == nil {
		p, _, err := Map(int64(unsafe.Sizeof(*free.lists)))
		if err != nil {
			return nil, nil, err
		}
		free.lists = (*[slabSizes]device.FreeList)(p)
		for i := range free.lists {
			free.lists[i].Room = mostSlab
		}
	}
	list := &free.lists[bits.Len64(uint64(length/leastSlab))-1]
	slab := list.TakeBlock()
	if slab == nil {
		return list, nil, nil
	}
	base, _ := slab.Base()
	return list, base, nil
}
