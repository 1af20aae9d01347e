package nvcomp

// Decodes, encodes and inspects bitstreams on a GPU.

import (
	"github.com/overwire/overwire/gosrc/codec/x16"
	"github.com/overwire/overwire/gosrc/device/cuda"
	"github.com/overwire/overwire/gosrc/device/cuda/stream"
	"github.com/overwire/overwire/gosrc/errs"
)

// GPUNames returns the algorithms that GPU kernels can decode.
func GPUNames() []string {
	var names []string
	for _, a := range algorithms {
		if stream.CanDecode(uint32(a.id)) {
			names = append(names, a.name)
		}
	}
	return names
}

// GPUDecode queues the decoding of streams of one algorithm on a GPU. See stream.Batches.Decode.
func GPUDecode(index int, on stream.Order, name string, streams []stream.Bitstream) (*stream.Batch, error) {
	a, err := byName(name)
	if err != nil {
		return nil, err
	}
	d, err := cuda.Open(index)
	if err != nil {
		return nil, err
	}
	return d.Decode(on, uint32(a.id), streams)
}

// GPUTransform returns the X16 transform for contents of a dtype (a safetensors name, or "" if unknown). sample is a
// part of the contents. The result is 0 if no transform compresses it, and -1 if a sample is needed but missing.
func GPUTransform(dtype string, sample []byte) (int, error) {
	d, isKnown, err := dtypeNamed(dtype)
	if err != nil {
		return 0, err
	}
	if list := x16.TransformsFor(d); isKnown && len(list) == 1 {
		return int(list[0]), nil
	}
	if len(sample) == 0 {
		return -1, nil
	}
	return int(transformFor(d, isKnown, sample)), nil
}

// GPUEncode queues the encoding of contents as X16 streams on a GPU. See stream.Batches.Encode. room is the size of
// scratch in bytes.
func GPUEncode(index int, on stream.Order, streams []stream.Bitstream, scratch uint64,
	room int64) (*stream.Batch, error) {
	if need := stream.EncodeScratchSize(streams); need > room || scratch%16 != 0 {
		return nil, errs.New(errs.ErrArgument, "invalid scratch memory: %d bytes at %#x, expected %d",
			room, scratch, need)
	}
	d, err := cuda.Open(index)
	if err != nil {
		return nil, err
	}
	return d.Encode(on, streams, scratch)
}

// A Glance is the result of GPUPeek for one stream.
type Glance struct {
	Size, Chunk int64
	Algorithm   string
	Err         error
}

// GPUPeek inspects streams on a GPU and waits for the result. An empty name is for native streams, which contain
// their algorithm. If a length can only be found by decoding, the error is errs.ErrNotSupported.
func GPUPeek(index int, on stream.Order, kind Kind, name string, streams []stream.Bitstream) ([]Glance, error) {
	var id uint32
	if name != "" || kind != Native {
		a, err := byName(name)
		if err != nil {
			return nil, err
		}
		id = uint32(a.id)
	}
	if kind == Raw && id != uint32(X16) && id != uint32(Snappy) {
		return nil, errs.New(errs.ErrNotSupported, "a raw block of %s does not state its length at a fixed offset",
			name)
	}
	d, err := cuda.Open(index)
	if err != nil {
		return nil, err
	}
	heads, err := d.Peek(on, stream.Kind(kind), id, streams)
	if err != nil {
		return nil, err
	}
	out := make([]Glance, len(heads))
	for i, p := range heads {
		out[i] = Glance{Size: p.Size, Chunk: p.Chunk, Err: p.Err}
		a, err := byID(Algorithm(p.Format))
		switch {
		case p.Err != nil:
		case p.Format > 255 || err != nil:
			out[i].Err = errs.New(errs.ErrFormat, "the header of a native stream has an unknown algorithm: %d",
				p.Format)
			if err != nil {
				out[i].Err = err
			}
		case name != "" && uint32(a.id) != id:
			out[i].Err = errs.New(errs.ErrArgument, "the stream is %s, expected %s", a.name, name)
		default:
			out[i].Algorithm = a.name
		}
	}
	return out, nil
}
