package tensor

// This file defines the types that describe a model and the limits of readers, finds tensors by name, selects some, and
// computes the sizes of tensors and their chunk grids.

import (
	"hash/maphash"
	"slices"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/sizes"
)

// Limits that all readers apply.
const (
	MaxHeader     = 100_000_000 // bytes of a safetensors header, for reading and writing
	MaxIndex      = 1 << 30     // bytes of a container's index
	MaxRank       = 64
	MaxChunkBytes = 16 << 20 // logical bytes of one chunk
	MaxColParts   = 8
)

// A Codec identifies the encoding of a chunk's bytes.
type Codec uint8

// Codec ids. docs/format.md reserves the gaps.
const (
	CodecRaw    Codec = 0
	CodecX16    Codec = 1
	CodecPlanes Codec = 6
)

// String returns the codec's name ("raw", "X16", "planes").
func (c Codec) String() string {
	switch c {
	case CodecRaw:
		return "raw"
	case CodecX16:
		return "X16"
	case CodecPlanes:
		return "planes"
	}
	return "unknown"
}

// A Chunk is a range of a tensor's bytes that is stored, checked and decoded separately. Tensor.Grid maps its number
// to its position in the tensor.
type Chunk struct {
	Off       int64  // offset of the stored bytes in the source
	Stored    uint32 // stored bytes
	Logical   uint32 // tensor bytes
	Sum       uint32 // CRC32C of the stored bytes
	Codec     Codec
	Transform uint8  // docs/format.md 3.1
	SegTiles  uint16 // X16: tiles per segment
}

// A Tensor describes a tensor and where its bytes are stored.
//
// A tensor of a plain safetensors file has Count 0: its bytes are at [Off, Off+Bytes) of its source and have no
// checksums. Every tensor of an overwire file has chunks, except aliases and tensors without bytes.
type Tensor struct {
	Name   string
	Shape  []int64 // often a slice of one array that the whole Index shares
	Bytes  int64   // logical size
	Off    int64   // offset of the first stored byte in the source
	Stored int64   // stored bytes: Bytes if plain, 0 for an alias
	Hash   [16]byte
	// ChunkBytes and Parts define the chunk grid (docs/format.md 2). They are 0 for a tensor without chunks.
	ChunkBytes   uint32
	First, Count int32 // Index.Chunks[First : First+Count]
	Source       int32 // Index.Sources[Source]
	Alias        int32 // Index.Tensors[Alias] has the bytes; -1 if this is not an alias
	DType        DType
	Parts        uint8
	// Plain means that any safetensors reader finds the tensor's bytes, dtype and shape in the file. It is true for
	// every tensor of a plain file.
	Plain bool
	// Block is the block size if the bytes from Off on are encrypted in blocks, which can only be read whole;
	// otherwise 0.
	Block int64
	// Cuts are offsets in the bytes of a plain tensor, in order. Reads between two of them are faster than others. nil
	// means that any reads are.
	Cuts []int64
}

// A Source is one file or object of an Index. It also holds the rest of the file's header.
type Source struct {
	URI      string
	Size     int64
	Data     int64             // offset of the data section
	Metadata map[string]string // the user's metadata, or nil
	Format   string            // format name, such as FormatOverwire
	Mark     string            // for a container, the metadata entry that marks it as one
	Gaps     bool              // whether there may be other bytes between the tensors
	Unlisted int               // number of tensors left out because an index.json does not list them
}

// The engine has special rules for these formats. Files of other formats have only plain tensors.
const (
	FormatOverwire    = "overwire" // has an overwire index
	FormatSafetensors = "safetensors"
)

// Overwire reports whether the file has an overwire index.
func (s *Source) Overwire() bool { return s.Format == FormatOverwire }

// An Index is everything known about a model before its data is read. It is validated, immutable, and safe for
// concurrent use.
type Index struct {
	Sources []Source
	Tensors []Tensor // in source order, then file order
	Chunks  []Chunk
}

// names is an open-addressing table from names to tensor numbers. It takes 8 bytes per tensor; a map would take 50.
// Its random seed keeps a file from choosing names that collide.
type names struct {
	seed  maphash.Seed
	slots []int32 // tensor number + 1, or 0 if free; the length is a power of two, at least twice the number of tensors
}

func newNames(n int) names {
	size := 4
	for size < 2*n {
		size *= 2
	}
	return names{maphash.MakeSeed(), make([]int32, size)}
}

// slot returns the slot of the tensor with the given source and name, or the free slot for it. Tensors in different
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

// Select returns an index of the tensors for which kept is true. It shares memory with ix and does not change it. If a
// tensor is dropped, its first remaining alias gets its bytes.
func (ix *Index) Select(kept []bool) (*Index, error) {
	out := &Index{Sources: slices.Clone(ix.Sources), Chunks: ix.Chunks}
	place := make([]int32, len(ix.Tensors)) // numbers in out; for a dropped tensor, the alias that gets its bytes
	n := int32(0)
	for i := range ix.Tensors {
		place[i] = -1
		if kept[i] {
			place[i] = n
			n++
		} else {
			s := &out.Sources[ix.Tensors[i].Source]
			s.Gaps = true
			s.Unlisted++
		}
	}
	out.Tensors = make([]Tensor, 0, n)
	for i, t := range ix.Tensors {
		if !kept[i] {
			continue
		}
		if t.Alias >= 0 {
			to := &ix.Tensors[t.Alias]
			if heir := place[t.Alias]; heir >= 0 {
				t.Alias = heir
			} else if to.Parts > 1 && !slices.Equal(to.Shape, t.Shape) {
				return nil, errs.Locate("index", ix.Sources[t.Source].URI, t.Name, -1,
					errs.New(errs.ErrNotSupported,
						"it shares the bytes of %q, which has a different shape and is not listed in the "+
							"index.json", to.Name))
			} else {
				place[t.Alias] = place[i]
				t.Off, t.Stored, t.First, t.Count = to.Off, to.Stored, to.First, to.Count
				t.ChunkBytes, t.Parts, t.Plain, t.Block, t.Alias = to.ChunkBytes, to.Parts, to.Plain, to.Block, -1
			}
		}
		out.Tensors = append(out.Tensors, t)
	}
	return out, nil
}

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
