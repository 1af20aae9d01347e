package save

// This file exports names for the tests in package save_test.

import "context"

var (
	LeastOnGPU = &leastOnGPU
	ItemsIn    = itemsIn
)

// SetParts sets the item's number of column parts, at most the number asked for.
func (t *Item) SetParts(asked int) { t.parts = t.chooseParts(asked) }

// Parts returns the number of column parts. Bytes returns their total size.
func (t *Item) Parts() int64 { return t.parts }
func (t *Item) Bytes() int64 { return t.bytes }
func (t *Item) Name() string { return t.name }

// GatherColumns reads from column part p, as a save does.
func (t *Item) GatherColumns(ctx context.Context, buf []byte, p, off int64) ([]byte, error) {
	return t.gatherColumns(ctx, buf, p, off)
}

// InMemory returns the item with its bytes in memory.
func (t *Item) InMemory(b []byte) *Item {
	m := *t
	m.body = memory(b)
	return &m
}
