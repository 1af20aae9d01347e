package nvcomp

// Encodes and decodes blocks of X16, the codec for weights.

import (
	"encoding/binary"
	"sync"

	"github.com/overwire/overwire/gosrc/codec/x16"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/tensor"
)

// An X16 block is a header and a chunk of docs/format.md. The header has fields that a file's index stores for a chunk:
// u8 codec (0 raw, 1 X16), u8 transform, u16 tiles per segment, u32 bytes of content. x16Head is the size of the
// header.
const x16Head = 8

func putX16Head(dst []byte, c *tensor.Chunk) {
	dst[0], dst[1] = byte(c.Codec), c.Transform
	binary.LittleEndian.PutUint16(dst[2:], c.SegTiles)
	binary.LittleEndian.PutUint32(dst[4:], c.Logical)
}

func x16Bound(n int64) int64 { return n + x16Head }

var x16Encoders = sync.Pool{New: func() any { return new(x16.Encoder) }}

func x16Encode(dst, src []byte, s *Spec) ([]byte, error) {
	if len(src) > tensor.MaxChunkBytes {
		return dst, errs.New(errs.ErrArgument, "X16 blocks have at most %d bytes, got %d: use a native stream",
			tensor.MaxChunkBytes, len(src))
	}
	e := x16Encoders.Get().(*x16.Encoder)
	defer x16Encoders.Put(e)
	at := len(dst)
	c := tensor.Chunk{Logical: uint32(len(src))}
	dst = append(dst, make([]byte, x16Head)...)
	putX16Head(dst[at:], &c)
	if s.transform != 0 {
		if out, tiles, ok := e.Encode(dst, src, s.transform); ok {
			c.Codec, c.Transform, c.SegTiles = tensor.CodecX16, s.transform, tiles
			putX16Head(out[at:], &c)
			return out, nil
		}
	}
	return append(dst, src...), nil
}

func x16Chunk(src []byte) (tensor.Chunk, error) {
	if len(src) < x16Head {
		return tensor.Chunk{}, errs.New(errs.ErrCorrupt, "an X16 block is too short: %d bytes", len(src))
	}
	return tensor.Chunk{
		Codec: tensor.Codec(src[0]), Transform: src[1], SegTiles: binary.LittleEndian.Uint16(src[2:]),
		Logical: binary.LittleEndian.Uint32(src[4:]), Stored: uint32(len(src) - x16Head),
	}, nil
}

func x16Size(src []byte) (int64, error) {
	c, err := x16Chunk(src)
	if err != nil {
		return 0, err
	}
	switch {
	case c.Logical > tensor.MaxChunkBytes:
		err = errs.New(errs.ErrCorrupt, "an X16 block states %d bytes, expected at most %d",
			c.Logical, tensor.MaxChunkBytes)
	case c.Codec == tensor.CodecRaw && (c.Logical != c.Stored || c.Transform != 0 || c.SegTiles != 0):
		err = errs.New(errs.ErrCorrupt, "invalid raw X16 block: %d stored bytes for %d bytes", c.Stored, c.Logical)
	case c.Codec == tensor.CodecX16:
		err = x16.Check(src[x16Head:], c)
	case c.Codec != tensor.CodecRaw:
		err = errs.New(errs.ErrCorrupt, "unknown codec %d of an X16 block", uint8(c.Codec))
	}
	return int64(c.Logical), err
}

func x16Decode(dst, src []byte) error {
	c, err := x16Chunk(src)
	if err != nil {
		return err
	}
	if uint64(c.Logical) != uint64(len(dst)) {
		return errs.New(errs.ErrCorrupt, "the X16 block has %d bytes, expected %d", c.Logical, len(dst))
	}
	switch {
	case c.Codec == tensor.CodecX16:
		return x16.Decode(dst, src[x16Head:], c.Transform, c.SegTiles)
	case c.Codec == tensor.CodecRaw && c.Logical == c.Stored:
		copy(dst, src[x16Head:])
		return nil
	}
	return errs.New(errs.ErrCorrupt, "invalid X16 block: codec %d, %d stored bytes for %d bytes",
		uint8(c.Codec), c.Stored, c.Logical)
}

// sampleBytes is the size of the sample that determines the transform of a buffer.
const sampleBytes = 256 << 10

// transformFor returns the transform that compresses a buffer best: among those of its dtype, or among all if the
// dtype is unknown. It returns 0 if none compresses the buffer.
func transformFor(d tensor.DType, known bool, src []byte) uint8 {
	list := []uint8{x16.BF16, x16.FP16, x16.FP32, x16.E4M3, x16.E5M2, x16.Int8, x16.Nibbles, x16.Bytes}
	if known {
		if list = x16.TransformsFor(d); list == nil {
			list = x16.TransformsFor(tensor.U8)
		}
	}
	if len(src) > sampleBytes {
		at := (len(src) - sampleBytes) / 2 &^ 15
		src = src[at : at+sampleBytes]
	}
	best, transform := 1.0, uint8(0)
	for _, t := range list {
		if e := x16.Estimate(src, t); e < best {
			best, transform = e, t
		}
	}
	return transform
}
