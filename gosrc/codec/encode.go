package codec

// Encodes each chunk with the codec that makes it smallest, and names the codec.

import (
	"slices"
	"strings"

	"github.com/overwire/overwire/gosrc/codec/planes"
	"github.com/overwire/overwire/gosrc/codec/x16"
	"github.com/overwire/overwire/gosrc/tensor"
)

// Name names a chunk's codec and transform for people ("X16/bf16").
func Name(c tensor.Chunk) string {
	switch c.Codec {
	case tensor.CodecX16:
		return c.Codec.String() + "/" + x16.Name(c.Transform)
	case tensor.CodecPlanes:
		return c.Codec.String() + "/" + planes.Name(c.Transform)
	}
	return c.Codec.String()
}

// Names names the codings of a tensor's chunks, joined by "+" with raw last; "plain" if all are raw.
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

// Codec 6 must save 1/worth of a chunk over X16, which decodes several times as fast and also on a GPU.
const worth = 1024

// Ways says how a chunk may be encoded: by a transform of each codec, 0 if not by that codec.
type Ways struct{ X16, Planes uint8 }

// An Encoder holds the encoders of all codecs and their memory. The zero value is ready to use. Only one
// goroutine may use it at a time.
type Encoder struct {
	x16    x16.Encoder
	planes planes.Encoder
	spare  []byte
}

// Encode encodes data in each of the given ways, and records the shortest result, which may be raw. It returns
// data itself for a raw chunk, else bytes in buf or in a new array.
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
	// Also try bytes, for data that repeats with another period than its elements, and for packed integers.
	if ways.Planes != planes.Bytes && (planes.Integers(ways.Planes) || e.planes.Zipped()) {
		take(planes.Bytes)
	}
	return out
}
