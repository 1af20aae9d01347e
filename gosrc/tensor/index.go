package tensor

// This file defines the types that describe a model, and the limits of readers.

// These are the limits of all readers.
const (
	MaxHeader     = 100_000_000 // bytes of a safetensors header, for reading and writing
	MaxIndex      = 1 << 30     // bytes of a container's index
	MaxRank       = 64
	MaxChunkBytes = 16 << 20 // logical bytes of one chunk
	MaxColParts   = 8
)

// A Codec identifies the encoding of a chunk's bytes.
type Codec uint8

// These are the codec ids of docs/format.md, which reserves the gaps.
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
