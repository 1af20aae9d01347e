// Package codec decodes stored chunks into logical bytes and encodes logical bytes into chunks. Each codec is a
// subpackage with a Decode and an Encode function over byte slices. The switches in this package select among them;
// codecs do not register themselves. The stored bytes of codec 0, raw, are the logical bytes.
package codec

import (
	"encoding/binary"
	"slices"
	"strings"

	"github.com/zeebo/xxh3"

	"github.com/overwire/overwire/gosrc/codec/planes"
	"github.com/overwire/overwire/gosrc/codec/x16"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/tensor"
)

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
			return errs.New(errs.ErrCorrupt, "a raw chunk has %d stored and %d logical bytes: expected equal sizes",
				len(src), len(dst))
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

// Use selects the decoder: "scalar", "neon", "avx2" or "avx512". A name that is unknown, or that the machine does not
// support, selects the best decoder. Use must not run concurrently with Decode.
func Use(name string) {
	level, ok := map[string]x16.Level{"scalar": x16.Scalar, "neon": x16.NEON, "avx2": x16.AVX2,
		"avx512": x16.AVX512}[name]
	if !ok {
		level = x16.Best()
	}
	x16.Use(level)
}

// HashOf returns an XXH3-128 in the byte order of files (docs/format.md): the high half first, each half little-endian.
func HashOf(sum xxh3.Uint128) (out [16]byte) {
	binary.LittleEndian.PutUint64(out[:], sum.Hi)
	binary.LittleEndian.PutUint64(out[8:], sum.Lo)
	return out
}

// Name returns a readable name for a chunk's codec and transform, such as "X16/bf16".
func Name(c tensor.Chunk) string {
	switch c.Codec {
	case tensor.CodecX16:
		return c.Codec.String() + "/" + x16.Name(c.Transform)
	case tensor.CodecPlanes:
		return c.Codec.String() + "/" + planes.Name(c.Transform)
	}
	return c.Codec.String()
}

// Names returns the encodings of a tensor's chunks, joined by "+", with raw last, or "plain" if all chunks are raw.
func Names(chunks []tensor.Chunk) string {
	var names []string
	raw := ""
	for _, c := range chunks {
		if c.Codec == tensor.CodecRaw {
			raw = "+raw"
		} else if n := Name(c); !slices.Contains(names, n) {
			names = append(names, n)
		}
	}
	if names == nil {
		return "plain"
	}
	return strings.Join(names, "+") + raw
}

// worth limits codec 6. It is used only if it saves another 1/worth of the chunk, because it decodes slowly and only on
// the CPU.
const worth = 1024

// Ways holds the transform to try for each codec. 0 means that the codec is not tried.
type Ways struct{ X16, Planes uint8 }

// An Encoder holds the encoders of all codecs and their buffers. The zero value is ready to use. It must not be used
// concurrently.
type Encoder struct {
	x16    x16.Encoder
	planes planes.Encoder
	spare  []byte
}

// Encode encodes data in each of the given ways and sets record for the result that it chooses, which may be raw. It
// chooses the shortest, but codec 6 only if that saves another 1/worth. It returns data itself for a raw chunk,
// otherwise bytes in buf or in a new array.
func (e *Encoder) Encode(buf, data []byte, ways Ways, record *tensor.Chunk) []byte {
	out := data
	record.Codec, record.Transform, record.SegTiles = tensor.CodecRaw, 0, 0
	if ways.X16 != 0 {
		if enc, seg, ok := e.x16.Encode(buf[:0], data, ways.X16); ok && len(enc) < len(data) {
			out, buf = enc, enc
			record.Codec, record.Transform, record.SegTiles = tensor.CodecX16, ways.X16, seg
		}
	}
	if ways.Planes == 0 {
		return out
	}
	take := func(transform uint8) {
		enc, ok := e.planes.Encode(e.spare[:0], data, transform)
		e.spare = enc
		least := len(out)
		if record.Codec != tensor.CodecPlanes {
			least -= len(data) / worth
		}
		if ok && len(enc) < least {
			buf = append(buf[:0], enc...)
			out = buf
			record.Codec, record.Transform, record.SegTiles = tensor.CodecPlanes, transform, 0
		}
	}
	take(ways.Planes)
	// Also try single bytes, for packed integers and periods that are not a multiple of the element size.
	if ways.Planes != planes.Bytes && (planes.Integers(ways.Planes) || e.planes.Zipped()) {
		take(planes.Bytes)
	}
	return out
}
