package memory

// This file places tensors in as few allocations as possible.

import "github.com/overwire/overwire/gosrc/errs"

const (
	// Align is the alignment of every tensor.
	Align = 256

	// The driver allocates memory above 1 MiB in units of 2 MiB. A tensor that would waste more than a sixteenth
	// of its size shares an allocation.
	unit       = 2 << 20
	arenaBytes = 32 << 20
)

// needsOwnBlock reports whether a tensor of n bytes gets a separate allocation.
func needsOwnBlock(n int64) bool {
	return n >= arenaBytes || n >= 1<<20 && ((n+unit-1)&^(unit-1)-n)*16 <= n
}

// A region is one allocation and the tensors in it.
type region struct {
	bytes  int64
	member []int
	at     []int64
}

// arrangeRegions assigns tensors to allocations.
func arrangeRegions(sizes []int64) ([]region, error) {
	var all []region
	shared := -1
	for i, n := range sizes {
		switch {
		case n < 0 || n > 1<<46:
			return nil, errs.New(errs.ErrArgument, "invalid size %d of tensor %d: expected 0 to %d", n, i, int64(1)<<46)
		case n == 0:
			continue
		case needsOwnBlock(n):
			all = append(all, region{bytes: n, member: []int{i}, at: []int64{0}})
			continue
		}
		room := (n + Align - 1) &^ (Align - 1)
		if shared < 0 || all[shared].bytes+room > arenaBytes {
			shared = len(all)
			all = append(all, region{})
		}
		r := &all[shared]
		r.member, r.at = append(r.member, i), append(r.at, r.bytes)
		r.bytes += room
	}
	return all, nil
}
