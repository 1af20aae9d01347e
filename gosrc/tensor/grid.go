package tensor

// This file computes the sizes of tensors and their chunk grids.

import (
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/sizes"
)

// Size returns the size of a tensor in bytes: the product of its dimensions times the bits per element. Every step is
// checked for overflow. The error rules and the order of steps match safetensors, so any dimension is accepted after
// a zero dimension.
func Size(d DType, shape []int64) (int64, error) {
	if !d.Valid() {
		return 0, errs.New(errs.ErrFormat, "unknown dtype code %d", uint8(d))
	}
	n, ok := uint64(1), true
	for _, dim := range shape {
		if dim < 0 {
			return 0, errs.New(errs.ErrFormat, "negative dimension %d", dim)
		}
		if n, ok = sizes.Mul(n, uint64(dim)); !ok {
			return 0, errs.OfRule("ValidationOverflow", errs.ErrFormat, "shape %v has more than 2^64 elements", shape)
		}
	}
	total, ok := sizes.Mul(n, uint64(d.Bits()))
	if !ok {
		return 0, errs.OfRule("ValidationOverflow", errs.ErrFormat, "shape %v of %v takes more than 2^61 bytes",
			shape, d)
	}
	if total%8 != 0 {
		return 0, errs.OfRule("MisalignedSlice", errs.ErrFormat, "shape %v of %v ends inside a byte", shape, d)
	}
	return int64(total / 8), nil // the result is at most 2^61
}

// Rows returns the number of rows of the tensor as a matrix: dimension 0, or 1 for rank 0.
func (t *Tensor) Rows() int64 {
	if len(t.Shape) == 0 {
		return 1
	}
	return t.Shape[0]
}

// RowBits returns the size of one row in bits, or 0 for a tensor without bytes. Rows of sub-byte dtypes may end
// inside a byte; such a tensor cannot be divided into column parts or sliced by rows.
func (t *Tensor) RowBits() int64 {
	rows := t.Rows()
	if rows == 0 || t.Bytes == 0 {
		return 0
	}
	return t.Bytes/rows*8 + t.Bytes%rows*8/rows // = Bytes * 8 / rows, without overflow
}

// Splits reports whether the tensor's rows can be divided into p column parts of whole elements and whole bytes.
func (t *Tensor) Splits(p int) bool {
	if p == 1 {
		return true
	}
	row := t.RowBits()
	return row > 0 && row%int64(p*t.DType.Bits()) == 0 && row/int64(p)%8 == 0
}

// A Grid divides a tensor's bytes into chunks (docs/format.md 2). Column part p holds the bytes [p, p+1) x RowBytes /
// Parts of every row, row after row. It is divided into chunks of ChunkBytes; the last chunk may be shorter. Chunks
// are numbered part by part. A single part holds the tensor's bytes in order.
type Grid struct {
	Parts      int64
	PartBytes  int64 // bytes of one part
	PartRow    int64 // bytes of one row in one part; 0 if Parts is 1
	ChunkBytes int64
	PerPart    int64 // chunks per part
}

// Grid returns the tensor's chunk grid, or the zero Grid for a tensor without chunks. At least the tensor's Shape,
// DType, Bytes, Parts and ChunkBytes must be valid.
func (t *Tensor) Grid() Grid {
	if t.ChunkBytes == 0 || t.Parts == 0 {
		return Grid{}
	}
	g := Grid{Parts: int64(t.Parts), ChunkBytes: int64(t.ChunkBytes)}
	g.PartBytes = t.Bytes / g.Parts
	if g.Parts > 1 {
		g.PartRow = t.RowBits() / 8 / g.Parts
	}
	g.PerPart = sizes.CeilDiv(g.PartBytes, g.ChunkBytes)
	return g
}

// Chunks returns the number of chunks.
func (g Grid) Chunks() int64 { return g.Parts * g.PerPart }

// Chunk returns the position of chunk i: its part, and its byte range [lo, hi) in that part. i is in [0, Chunks()).
func (g Grid) Chunk(i int64) (part, lo, hi int64) {
	part = i / g.PerPart
	lo = i % g.PerPart * g.ChunkBytes
	return part, lo, min(lo+g.ChunkBytes, g.PartBytes)
}
