package cpu

// Reuses small arenas after their tensors have been freed. Mapping and unmapping an arena takes longer than reading its
// contents, and it slows the thread down afterwards, because the processor loses its address translations.

import (
	"math/bits"
	"sync"
	"unsafe"

	"github.com/overwire/overwire/gosrc/device"
)

const (
	// Arenas have 2^k bytes, from leastArena to mostArena. Up to mostArena bytes of each size are cached.
	leastArena, mostArena = 8 << 10, 512 << 10
	arenaSizes            = 7
)

// free holds unused arenas, by size. The lists are in memory that is never unmapped, because tensors may outlive
// everything else. Taking an arena needs the lock, but returning one does not.
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
