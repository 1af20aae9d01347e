package codec

// Encodes each chunk with the codec that makes it smallest, and returns the names of codecs.

import (
	"slices"
	"strings"

	"github.com/overwire/overwire/gosrc/codec/planes"
	"github.com/overwire/overwire/gosrc/codec/x16"
	"github.com/overwire/overwire/gosrc/tensor"
)

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

// worth limits codec 6: it must save 1/worth of the chunk compared with X16, which is faster and decodes on a GPU.
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

// Encode encodes data in each of the given ways and sets record for the shortest result, which may be raw. It returns
// data itself for a raw chunk, otherwise bytes in buf or in a new array.
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
