package format

// This file determines a model file's outline from its first bytes.

import (
	"math"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/format/safetensors"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/tensorizer"
)

// first is the number of bytes that determine a file's format, and its outline if the header fits in them.
const first = 512

// outlineOf returns the outline that model files are opened with.
func outlineOf(opt Options) source.Outline {
	return source.Outline{Size: sizeOf, Longer: opt.Lenient}
}

// sizeOf is Outline.Size. It returns -1 for a .tensors file, which does not say where it ends.
func sizeOf(uri string, head []byte) (size, need int64, err error) {
	switch {
	case len(head) < first:
		return 0, first, nil
	case tensorizer.Is(head):
		return -1, 0, nil
	}
	n, err := safetensors.Length("", head, math.MaxInt64)
	if err != nil {
		return 0, 0, errs.Place("index", uri, "", 0, err)
	}
	if 8+n > int64(len(head)) {
		return 0, 8 + n, nil
	}
	h, err := safetensors.Parse(uri, head[:8+n], math.MaxInt64, safetensors.Options{Lenient: true})
	if err != nil {
		return 0, 0, err
	}
	end := h.Data
	for i := range h.Tensors {
		end = max(end, h.Tensors[i].Off+h.Tensors[i].Bytes)
	}
	return end, 0, nil
}
