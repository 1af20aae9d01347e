// Package codec decodes stored chunks into logical bytes and encodes logical bytes into chunks. Each codec is a
// subpackage with a Decode and an Encode function over byte slices. The switches in this package select among them;
// codecs do not register themselves. The stored bytes of codec 0, raw, are the logical bytes.
package codec

import (
	"hash/crc32"
	"slices"

	"github.com/overwire/overwire/gosrc/codec/planes"
	"github.com/overwire/overwire/gosrc/codec/x16"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/tensor"
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Sum returns the checksum of stored bytes: CRC-32C (Castagnoli).
func Sum(p []byte) uint32 { return sumBytes(p) }

// Known reports whether this build can decode chunks with a codec and transform, and whether the format allows them
// for a tensor of type d.
func Known(c tensor.Codec, transform uint8, d tensor.DType) bool {
	switch c {
	case tensor.CodecRaw:
		return transform == 0 && d.Valid()
	case tensor.CodecX16:
		return slices.Contains(x16.TransformsFor(d), transform)
	case tensor.CodecPlanes:
		return d.Valid() && planes.Allowed(transform, d)
	}
	return false
}

// Decode fills dst with the logical bytes of one stored chunk.
//
// len(dst) must be c.Logical and len(src) must be c.Stored. The caller must verify the checksum (Sum) first. Invalid
// bytes give errs.ErrCorrupt, and the contents of dst are then undefined. Decode never writes outside dst. It is safe
// for concurrent use.
func Decode(dst, src []byte, c tensor.Chunk) error {
	if uint64(len(dst)) != uint64(c.Logical) || uint64(len(src)) != uint64(c.Stored) {
		return errs.New(errs.ErrArgument, "a chunk with %d stored and %d logical bytes got buffers of %d and %d bytes",
			c.Stored, c.Logical, len(src), len(dst))
	}
	switch c.Codec {
	case tensor.CodecRaw:
		if c.Transform != 0 {
			return errs.New(errs.ErrCorrupt, "a raw chunk has transform %d, expected 0", c.Transform)
		}
		if len(dst) != len(src) {
			return errs.New(errs.ErrCorrupt, "a raw chunk has %d stored and %d logical bytes", len(src), len(dst))
		}
		copy(dst, src)
		return nil
	case tensor.CodecX16:
		return x16.Decode(dst, src, c.Transform, c.SegTiles)
	case tensor.CodecPlanes:
		return planes.Decode(dst, src, c.Transform)
	}
	return errs.New(errs.ErrNotSupported, "unknown codec %d", uint8(c.Codec))
}

// Use selects the decoder by name: "scalar", "neon", "avx2" or "avx512". For any other name, or one that the machine
// does not support, it selects the best available decoder. It must be called at the start of the process, because it
// must not run concurrently with Decode.
func Use(name string) {
	level, ok := map[string]x16.Level{"scalar": x16.Scalar, "neon": x16.NEON, "avx2": x16.AVX2,
		"avx512": x16.AVX512}[name]
	if !ok {
		level = x16.Best()
	}
	x16.Use(level)
}
