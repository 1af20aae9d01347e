package tensor

// This file finds tensors by name.

import "hash/maphash"

// names is an open-addressing table from names to tensor numbers. It takes 8 bytes per tensor; a map would take 50.
// Its random seed keeps a file from choosing names that collide.
type names struct {
	seed  maphash.Seed
	slots []int32 // tensor number + 1, or 0 if free; the length is a power of two, at least twice the tensors
}

func newNames(n int) names {
	size := 4
	for size < 2*n {
		size *= 2
	}
	return names{maphash.MakeSeed(), make([]int32, size)}
}

// slot returns the slot of the tensor with the given source and name, or the free slot for it. Tensors of other
// sources may have the same name.
func (n *names) slot(ts []Tensor, source int32, name string) *int32 {
	mask := uint64(len(n.slots) - 1)
	for h := maphash.String(n.seed, name) & mask; ; h = (h + 1) & mask {
		s := &n.slots[h]
		if *s == 0 || ts[*s-1].Source == source && ts[*s-1].Name == name {
			return s
		}
	}
}

// put adds tensor i, unless a tensor of the same source already has its name.
func (n *names) put(ts []Tensor, i int) (added bool) {
	s := n.slot(ts, ts[i].Source, ts[i].Name)
	if *s != 0 {
		return false
	}
	*s = int32(i + 1)
	return true
}

// Finder returns a function that returns the number of the tensor with a given source and name, or -1. The function
// is safe for concurrent use.
func (ix *Index) Finder() func(source int, name string) int {
	n := newNames(len(ix.Tensors))
	for i := range ix.Tensors {
		n.put(ix.Tensors, i)
	}
	return func(source int, name string) int { return int(*n.slot(ix.Tensors, int32(source), name)) - 1 }
}

// Duplicate returns the number of the first tensor with the same source and name as an earlier tensor, or -1.
func Duplicate(ts []Tensor) int {
	n := newNames(len(ts))
	for i := range ts {
		if !n.put(ts, i) {
			return i
		}
	}
	return -1
}
