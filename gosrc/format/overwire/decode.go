package overwire

// This file reads a container's index.

import (
	"math"
	"slices"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/format/safetensors"
	"github.com/overwire/overwire/gosrc/internal/crc32c"
	"github.com/overwire/overwire/gosrc/tensor"
)

// Decode decodes and validates the index of one file. h is the file's header, for which Is returned true, and blob is
// the bytes of IndexName. The Metadata of the result is the user's, without the mark.
//
// Decode first compares the checksum: changed bytes give errs.ErrCorrupt. If the checksum is correct, an invalid value
// gives errs.ErrFormat, and a newer version or feature gives errs.ErrNotSupported.
func Decode(blob []byte, h *safetensors.Header, uri string, size int64, known tensor.Known) (*tensor.Index, error) {
	d := decoder{blob: blob, h: h}
	bad := func(name string, chunk int, err error) (*tensor.Index, error) {
		return nil, &errs.At{Verb: "index", Source: uri, Tensor: name, Chunk: int64(chunk), Offset: h.Data + d.at,
			Err: err}
	}
	if err := d.decodeFrame(); err != nil {
		return bad(IndexName, -1, err)
	}
	ix := &tensor.Index{
		Sources: []tensor.Source{{URI: uri, Size: size, Data: h.Data, Metadata: userMetadata(h.Metadata),
			Format: tensor.FormatOverwire, Mark: h.Metadata[MetadataKey]}},
		Tensors: make([]tensor.Tensor, d.tensors),
		Chunks:  make([]tensor.Chunk, d.chunks),
	}
	shapes := make([]int64, d.dims)
	for i := range shapes {
		shapes[i] = int64(le.Uint64(d.blob[headerSize+8*i:])) // Validate refuses negative dimensions
	}
	for i := range ix.Tensors {
		if err := d.decodeTensor(i, &ix.Tensors[i], &shapes); err != nil {
			return bad(h.Tensors[i+1].Name, -1, err)
		}
	}
	if d.at = 0; len(shapes) != 0 {
		return bad(IndexName, -1, errs.New(errs.ErrFormat, "%d dimensions belong to no tensor", len(shapes)))
	}
	for i := range ix.Chunks {
		if err := d.chunk(i, &ix.Chunks[i]); err != nil {
			return bad(IndexName, i, err)
		}
	}
	if err := ix.Validate(known); err != nil {
		return nil, err
	}
	if need := featuresOf(ix.Tensors, ix.Chunks); need != d.features {
		d.at = 8
		return bad(IndexName, -1, errs.New(errs.ErrFormat, "the index has features %#x, but its chunks need %#x",
			d.features, need))
	}
	return ix, nil
}

// A decoder holds the offsets of a blob's sections. Its counts are only valid after decodeFrame has checked them
// against the blob's size and checksum.
type decoder struct {
	blob                  []byte
	h                     *safetensors.Header
	at                    int64 // the offset being decoded, for errors
	tensors, chunks, dims int
	records, chunkRecords int // offsets
	newer                 bool
	features              uint64
	delta                 bool // whether the file must be a delta
}

func (d *decoder) decodeFrame() error {
	b := d.blob
	corrupt := func(at int, format string, args ...any) error {
		d.at = int64(at)
		return errs.New(errs.ErrCorrupt, format, args...)
	}
	// Before the checksum is compared, the bytes may only be used to reject the index.
	if h := d.h; len(h.Tensors) == 0 || h.Tensors[0].Name != IndexName || h.Tensors[0].DType != tensor.U8 ||
		len(h.Tensors[0].Shape) != 1 || h.Tensors[0].Bytes != int64(len(b)) {
		return corrupt(0, "the index is not the first tensor, or not one-dimensional U8")
	}
	if len(b) < headerSize+trailerSize || string(b[:4]) != magic {
		return corrupt(0, "the index is too short: %d bytes", len(b))
	}
	tensors, chunks, dims := le.Uint32(b[16:]), le.Uint32(b[20:]), le.Uint32(b[24:])
	total := blobSize(uint64(tensors), uint64(chunks), uint64(dims))
	if total != uint64(len(b)) || le.Uint64(b[32:]) != total {
		return corrupt(16, "the index has %d bytes, but its header says %d: %d tensors, %d chunks, %d dimensions",
			len(b), le.Uint64(b[32:]), tensors, chunks, dims)
	}
	d.tensors, d.chunks, d.dims = int(tensors), int(chunks), int(dims)
	d.records = headerSize + 8*d.dims
	d.chunkRecords = d.records + tensorSize*d.tensors
	end := d.chunkRecords + chunkSize*d.chunks
	if sum := crc32c.Sum(b[:end]); sum != le.Uint32(b[end:]) {
		return errs.WithRule(errs.RuleChecksum,
			corrupt(end, "checksum mismatch of the index: %08x stored, %08x computed", le.Uint32(b[end:]), sum))
	}
	if !allZero(b[end+4:]) {
		return corrupt(end+4, "the padding of the index is not zero")
	}
	// The checksum matches, so a writer wrote exactly these bytes.
	major, minor := le.Uint16(b[4:]), le.Uint16(b[6:])
	d.newer = minor > Minor
	d.features = le.Uint64(b[8:])
	knownBits := uint64(featuresKnown)
	switch {
	case d.delta && d.features&FeatureDelta == 0:
		return errs.New(errs.ErrFormat, "this is a model, not a delta")
	case d.delta:
		knownBits = FeatureDelta
	case major == Major && d.features == FeatureDelta:
		return errs.New(errs.ErrNotSupported, "this is a delta, not a model: load_file(path, base=...) loads the "+
			"model, apply_delta applies it to tensors")
	}
	if major != Major || d.features&^knownBits != 0 || le.Uint16(b[28:]) != tensorSize ||
		le.Uint16(b[30:]) != chunkSize {
		d.at = 4
		return errs.New(errs.ErrNotSupported, "index version %d.%d with features %#x: %s", major, minor, d.features,
			remedyFor(uint64(major)))
	}
	if sum := le.Uint32(b[40:]); sum != d.h.Sum {
		return errs.WithRule(errs.RuleChecksum,
			corrupt(40, "checksum mismatch of the header before the data: %08x stored, %08x computed", sum, d.h.Sum))
	}
	if !d.newer && !allZero(b[44:headerSize]) {
		d.at = 44
		return errs.New(errs.ErrFormat, "reserved bytes of the index are not zero")
	}
	if d.h.Data%DataAlign != 0 {
		return errs.New(errs.ErrFormat, "the data section begins at %d, which is not a multiple of %d",
			d.h.Data, DataAlign)
	}
	if d.delta && d.tensors+d.chunks+d.dims != 0 {
		return errs.New(errs.ErrFormat, "a delta's index must be empty, but has %d tensors and %d chunks",
			d.tensors, d.chunks)
	}
	if d.tensors != len(d.h.Tensors)-1 && !d.delta {
		d.at = 16
		return errs.New(errs.ErrFormat, "the index has %d tensors, but the header has %d",
			d.tensors, len(d.h.Tensors)-1)
	}
	if d.tensors > math.MaxInt32-1 || d.chunks > math.MaxInt32 {
		return errs.New(errs.ErrFormat, "too many tensors or chunks")
	}
	return nil
}

// decodeTensor combines record i with the header's entry for the same tensor and checks that they agree. It removes
// the tensor's dimensions from shapes.
func (d *decoder) decodeTensor(i int, t *tensor.Tensor, shapes *[]int64) error {
	off := d.records + tensorSize*i
	d.at = int64(off)
	b := d.blob[off : off+tensorSize]
	bad := func(format string, args ...any) error { return errs.New(errs.ErrFormat, format, args...) }
	var r record
	r.readRecord(b)
	if !d.newer && !allZero(b[52:]) {
		return bad("reserved bytes are not zero")
	}
	if !r.dtype.Valid() || r.rank > tensor.MaxRank || r.rank > len(*shapes) {
		return bad("invalid dtype code %d or rank %d", r.dtype, r.rank)
	}
	if r.bytes > math.MaxInt64 || r.stored > math.MaxInt64 || r.first > math.MaxInt32 || r.count > math.MaxInt32 ||
		r.parts == 0 || r.count == 0 && (r.parts != 1 || r.chunkBytes != 0) {
		return bad("invalid record: %d bytes, %d stored, first chunk %d, %d chunks of %d bytes, %d parts",
			r.bytes, r.stored, r.first, r.count, r.chunkBytes, r.parts)
	}
	shape := (*shapes)[:r.rank:r.rank]
	*shapes = (*shapes)[r.rank:]
	in := &d.h.Tensors[i+1]
	*t = tensor.Tensor{Name: in.Name, Shape: shape, Bytes: int64(r.bytes), Off: in.Off, Stored: int64(r.stored),
		Hash:       r.hash,
		ChunkBytes: r.chunkBytes, First: int32(r.first), Count: int32(r.count), Alias: -1, DType: r.dtype,
		Parts: r.parts, Plain: r.layout == layoutPlain}
	if r.count == 0 {
		t.Parts = 0
	}
	if t.Stored != in.Stored {
		return bad("the index says %d stored bytes, but the header says %d", t.Stored, in.Stored)
	}
	if (r.layout == layoutAlias) != (r.alias != noAlias) {
		return bad("layout %d does not match alias %d", r.layout, r.alias)
	}
	switch r.layout {
	case layoutPlain:
		if in.DType != t.DType || !slices.Equal(in.Shape, t.Shape) {
			return bad("the index says %v %v, but the header says %v %v", t.DType, t.Shape, in.DType, in.Shape)
		}
		return nil
	case layoutAlias:
		if int64(r.alias) >= int64(d.tensors) {
			return bad("it is an alias of tensor %d, but there are %d tensors", r.alias, d.tensors)
		}
		t.Alias = int32(r.alias)
	case layoutChunks:
		if t.Count == 0 {
			return bad("it has no chunks, but its layout requires them")
		}
	default:
		return errs.New(errs.ErrNotSupported, "unknown layout %d: upgrade overwire", r.layout)
	}
	if in.DType != tensor.U8 || len(in.Shape) != 1 {
		return bad("the header says %v %v, expected one-dimensional U8", in.DType, in.Shape)
	}
	return nil
}

func (d *decoder) chunk(i int, c *tensor.Chunk) error {
	off := d.chunkRecords + chunkSize*i
	d.at = int64(off)
	b := d.blob[off : off+chunkSize]
	if le.Uint16(b[22:]) != 0 {
		return errs.New(errs.ErrNotSupported, "unknown features %#x of a chunk: upgrade overwire", le.Uint16(b[22:]))
	}
	if le.Uint64(b) > math.MaxInt64 || !d.newer && !allZero(b[26:]) {
		return errs.New(errs.ErrFormat, "an offset is 2^63 or more, or reserved bytes are not zero")
	}
	*c = tensor.Chunk{Off: int64(le.Uint64(b)), Stored: le.Uint32(b[8:]), Logical: le.Uint32(b[12:]),
		Sum: le.Uint32(b[16:]), Codec: tensor.Codec(b[20]), Transform: b[21], SegTiles: le.Uint16(b[24:])}
	return nil
}
