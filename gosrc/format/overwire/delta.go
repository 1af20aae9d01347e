package overwire

// This file defines the index that marks delta files (docs/format.md 7.1): the index of a container without tensors,
// with a critical feature bit.

import (
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/format/safetensors"
)

const (
	// FeatureDelta is the critical feature bit of delta files.
	FeatureDelta = 1 << 2

	// DeltaNotice is the Notice of delta files.
	DeltaNotice = "changes between two models, by overwire (to apply them: pip install -U overwire; apply_delta)"
)

// DeltaMark returns the metadata entry of delta files.
func DeltaMark() string { return markOf(nil, "", false) }

// DeltaIndexSize returns the size in bytes of the index of a delta file.
func DeltaIndexSize() int { return int(blobSize(0, 0, 0)) }

// AppendDelta appends the index of a delta file. head contains everything before the data section.
func AppendDelta(dst, head []byte) []byte {
	start := len(dst)
	dst = appendFrame(dst, FeatureDelta, 0, 0, 0, head)
	return appendTrailer(dst, start)
}

// IsDelta returns an error if a file for which Is returned true is not a delta. blob is the bytes of its index.
func IsDelta(blob []byte, h *safetensors.Header) error {
	d := decoder{blob: blob, h: h, delta: true}
	return d.decodeFrame()
}

// errDelta returns the error for a delta file that is opened as a model.
func errDelta() error {
	return errs.New(errs.ErrNotSupported,
		"this is a delta, not a model: load_file(path, base=...) loads the model, apply_delta applies it to tensors")
}
