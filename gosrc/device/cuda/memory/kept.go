package memory

// This file caches free blocks for the next load.

import (
	"slices"
	"time"
)

// keepBytes and keepPieces limit the permanent cache, which is enough for the small tensors of most models. The cache
// keeps further blocks until no block was added or taken for keepFor, so that the next model can reuse them.
const (
	keepBytes  = 128 << 20
	keepPieces = 64
	keepFor    = time.Second
)

// A keptBlock is device memory that has no holder and is not used by any work.
type keptBlock struct {
	at    uint64
	bytes uint64
}

// keptBlocks caches blocks for the next load, because freeing a block may wait for all work queued on the device, and
// other calls are blocked until then. The oldest blocks come first. The owner of keptBlocks locks it.
type keptBlocks struct {
	blocks  []keptBlock
	touched time.Time // when a block was last added or taken
}

func (k *keptBlocks) add(at, bytes uint64) { k.blocks = append(k.blocks, keptBlock{at, bytes}) }

// take removes the smallest block that has n bytes and is not much larger.
func (k *keptBlocks) take(n uint64) (best keptBlock, ok bool) {
	at := -1
	for i, b := range k.blocks {
		if b.bytes >= n && b.bytes <= n+n/8+1<<20 && (at < 0 || b.bytes < k.blocks[at].bytes) {
			at = i
		}
	}
	if at < 0 {
		return keptBlock{}, false
	}
	best, k.touched = k.blocks[at], time.Now()
	k.blocks = slices.Delete(k.blocks, at, at+1)
	return best, true
}

// removeSurplus removes blocks beyond the permanent cache, the oldest first. later means that it is too early to do so.
func (k *keptBlocks) removeSurplus() (old []uint64, later bool) {
	n, count := uint64(0), len(k.blocks)
	for _, b := range k.blocks {
		n += b.bytes
	}
	for _, b := range k.blocks {
		if n <= keepBytes && count <= keepPieces {
			break
		}
		if time.Since(k.touched) < keepFor {
			return nil, true
		}
		old = append(old, b.at)
		n, count = n-b.bytes, count-1
	}
	k.blocks = k.blocks[len(old):]
	return old, false
}

func (k *keptBlocks) removeAll() (all []uint64) {
	for _, b := range k.blocks {
		all = append(all, b.at)
	}
	k.blocks = nil
	return all
}
