package nvcomp

// This file decodes and makes bitstreams that lie on a GPU.

import (
	"github.com/overwire/overwire/gosrc/codec/x16"
	"github.com/overwire/overwire/gosrc/device/cuda"
	"github.com/overwire/overwire/gosrc/fault"
	"github.com/overwire/overwire/gosrc/tensor"
)

// GPUNames lists the algorithms whose streams kernels decode.
func GPUNames() []string {
	var names []string
	for _, a := range algorithms {
		if cuda.Decodes(uint32(a.id)) {
			names = append(names, a.name)
		}
	}
	return names
}

// onGPU finds an algorithm, of those that the host knows or not.
func onGPU(name string) (uint32, error) {
	a, err := byName(name)
	if err != nil {
		return 0, err
	}
	return uint32(a.id), nil
}

// GPUDecode queues the decoding of streams of one algorithm that lie on a GPU,
// to where their content shall be: see cuda.Device.Decode.
func GPUDecode(index int, on cuda.Order, name string, streams []cuda.Stream) (*cuda.Batch, error) {
	id, err := onGPU(name)
	if err != nil {
		return nil, err
	}
	d, err := cuda.Open(index)
	if err != nil {
		return nil, err
	}
	return d.Decode(on, id, streams)
}

// GPUTransform is the transform of X16 for contents of a dtype (by safetensors'
// name; "": not known), of which sample is some: 0 where none gains anything, -1
// where it takes a sample to say and there is none.
func GPUTransform(dtype string, sample []byte) (int, error) {
	d, known := tensor.DType(0), false
	if dtype != "" {
		if d, known = tensor.ParseDType(dtype); !known {
			return 0, fault.New(fault.ErrArgument, "no such dtype: %q", dtype)
		}
	}
	if list := x16.TransformsFor(d); known && len(list) == 1 {
		return int(list[0]), nil
	}
	if len(sample) == 0 {
		return -1, nil
	}
	return int(transformFor(d, known, sample)), nil
}

// GPUEncode queues the making of streams of X16 out of contents that lie on a
// GPU: see cuda.Device.Encode. scratch has room bytes.
func GPUEncode(index int, on cuda.Order, streams []cuda.Stream, scratch uint64, room int64) (*cuda.Batch, error) {
	if need := cuda.Scratch(streams); need > room || scratch%16 != 0 {
		return nil, fault.New(fault.ErrArgument, "%d bytes of scratch at %#x, %d are needed", room, scratch, need)
	}
	d, err := cuda.Open(index)
	if err != nil {
		return nil, err
	}
	return d.Encode(on, streams, scratch)
}

// A Glance is what GPUPeek sees of a stream.
type Glance struct {
	Size, Chunk int64
	Algorithm   string
	Err         error
}

// GPUPeek asks streams that lie on a GPU what they are, and waits for the answer.
// name "" is for native streams, which say it. A length that only decoding tells
// is fault.ErrNotSupported.
func GPUPeek(index int, on cuda.Order, kind Kind, name string, streams []cuda.Stream) ([]Glance, error) {
	var id uint32
	if name != "" || kind != Native {
		var err error
		if id, err = onGPU(name); err != nil {
			return nil, err
		}
	}
	if kind == Raw && id != uint32(X16) && id != uint32(Snappy) {
		return nil, fault.New(fault.ErrNotSupported, "a raw block of %s does not say its length at a fixed place", name)
	}
	d, err := cuda.Open(index)
	if err != nil {
		return nil, err
	}
	peeked, err := d.Peek(on, cuda.Kind(kind), id, streams)
	if err != nil {
		return nil, err
	}
	out := make([]Glance, len(peeked))
	for i, p := range peeked {
		out[i] = Glance{Size: p.Size, Chunk: p.Chunk, Err: p.Err}
		a, err := byID(Algorithm(p.Format))
		switch {
		case p.Err != nil:
		case p.Format > 255 || err != nil:
			out[i].Err = fault.New(fault.ErrFormat, "a native stream of format %d", p.Format)
			if err != nil {
				out[i].Err = err
			}
		case name != "" && uint32(a.id) != id:
			out[i].Err = fault.New(fault.ErrArgument, "the stream is %s, not %s", a.name, name)
		default:
			out[i].Algorithm = a.name
		}
	}
	return out, nil
}
