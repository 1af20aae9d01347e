package save

// Exports what tests in package save_test need.

import "context"

var (
	LeastOnGPU = &leastOnGPU
	ItemsIn    = itemsIn
)

// SetParts sets how many column parts the item has, at most the number asked for.
func (t *Item) SetParts(asked int) { t.parts = t.chooseParts(asked) }

// Parts is the number of column parts, and Bytes their total size.
func (t *Item) Parts() int64 { return t.parts }
func (t *Item) Bytes() int64 { return t.bytes }
func (t *Item) Name() string { return t.name }

// GatherColumns reads from column part p, as a save does.
func (t *Item) GatherColumns(ctx context.Context, buf []byte, p, off int64) ([]byte, error) {
	return t.gatherColumns(ctx, buf, p, off)
}

// InMemory is the item with its bytes in memory.
func (t *Item) InMemory(b []byte) *Item {
	m := *t
	m.body = memory(b)
	return &m
}
