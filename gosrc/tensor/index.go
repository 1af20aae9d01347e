package tensor

import "sync"

// Limits that every reader holds, whatever a file says.
const (
	MaxHeader     = 100_000_000 // bytes of a safetensors header, reading and writing
	MaxIndex      = 1 << 30     // bytes of a container's index
	MaxRank       = 64
	MaxChunkBytes = 16 << 20 // logical bytes of one chunk
	MaxColParts   = 8
)

// Codec says how a chunk's stored bytes become logical bytes.
type Codec uint8

// Codec ids of docs/format.md; the gaps are reserved there.
const (
	CodecRaw Codec = 0
	CodecX16 Codec = 1
)

// String returns the codec's name for people ("raw", "X16").
func (c Codec) String() string {
	switch c {
	case CodecRaw:
		return "raw"
	case CodecX16:
		return "X16"
	}
	return "unknown"
}

// A Chunk is one independently stored, checked and decoded run of a tensor's
// bytes. Its place in the tensor follows from its number (see Tensor.Grid).
type Chunk struct {
	Off       int64  // in its source
	Stored    uint32 // bytes there
	Logical   uint32 // bytes of the tensor
	Sum       uint32 // CRC32C of the stored bytes
	Codec     Codec
	Transform uint8  // docs/format.md 3.1
	SegTiles  uint16 // X16: tiles per segment
}

// A Tensor says what a tensor is and where its bytes lie.
//
// A tensor of a plain safetensors file has Count 0: its bytes lie at
// [Off, Off+Bytes) of its source, unchecked. Every tensor of an overwire file
// has chunks, except aliases and tensors without bytes.
type Tensor struct {
	Name   string
	Shape  []int64 // often a slice of one array that the whole Index shares
	Bytes  int64   // logical size
	Off    int64   // of the first stored byte, in its source
	Stored int64   // bytes stored: Bytes when plain, 0 for an alias
	Hash   [16]byte
	// ChunkBytes and Parts are the chunk grid (docs/format.md 2); 0 without chunks.
	ChunkBytes   uint32
	First, Count int32 // Index.Chunks[First : First+Count]
	Source       int32 // Index.Sources[Source]
	Alias        int32 // Index.Tensors[Alias] holds the bytes; -1: this one does
	DType        DType
	Parts        uint8
	// Plain: the bytes lie in their natural order under the tensor's own dtype
	// and shape, as any safetensors reader expects them. True for every tensor
	// of a plain file.
	Plain bool
	// Block, if not 0, is what the plain bytes are made of from Off on: parts of
	// the file that cost as much to read in part as whole, because they were
	// encrypted as one.
	Block int64
}

// A Source names one file or object of an Index and what its header said
// beside the tensors.
type Source struct {
	URI      string
	Size     int64
	Data     int64 // offset of the data section
	Metadata map[string]string
	Format   string // its name: see FormatOverwire
	Gaps     bool   // something else may stand between the tensors' bytes
}

// The names of the formats that the engine itself has rules for. What has another
// one holds plain tensors.
const (
	FormatOverwire    = "overwire" // has an overwire index
	FormatSafetensors = "safetensors"
)

// Overwire says whether the file has an overwire index.
func (s *Source) Overwire() bool { return s.Format == FormatOverwire }

// An Index is everything known of a model before a data byte is read: all
// validated, nothing lazily parsed. It is immutable once built and safe for
// concurrent use.
type Index struct {
	Sources []Source
	Tensors []Tensor // in source order, then file order
	Chunks  []Chunk

	once  sync.Once
	names names // see Find
}
