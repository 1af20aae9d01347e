package overwire

// This file stores what a container has besides tensors: its origin (docs/format.md section 1), digests (section 1.2),
// and the mark of delta files (section 7.1).

import (
	"bytes"
	"compress/flate"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io"
	"sync"

	"github.com/overwire/overwire/gosrc/codec/digest"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/format/safetensors"
	"github.com/overwire/overwire/gosrc/tensor"
)

// An Origin describes the safetensors file that a container was made from. Together with the tensors, it is enough to
// write that file again.
type Origin struct {
	Size   int64  `json:"size"`             // bytes of the file
	SHA256 string `json:"sha256,omitempty"` // the file's hash in 64 hex digits, or "" if unknown
	Header string `json:"header"`           // the bytes before its data section, deflated and base64-encoded
}

// Pending is a placeholder, of the same length, for a SHA-256 that is not known yet.
const Pending = "0000000000000000000000000000000000000000000000000000000000000000"

// NewOrigin describes a file of the given size. head contains everything before its data section.
func NewOrigin(head []byte, size int64) *Origin {
	var b bytes.Buffer
	w := deflaters.Get().(*flate.Writer)
	defer deflaters.Put(w)
	w.Reset(&b)
	_, _ = w.Write(head) // writes to a Buffer cannot fail
	_ = w.Close()
	return &Origin{Size: size, Header: base64.StdEncoding.EncodeToString(b.Bytes())}
}

// deflaters are reused, because creating one allocates and clears 0.8 MB.
var deflaters = sync.Pool{New: func() any {
	w, _ := flate.NewWriter(nil, flate.DefaultCompression) // fails only for unknown levels
	return w
}}

// ReadOrigin returns the origin from a metadata entry for which Is returned true, or nil if the entry has none.
func ReadOrigin(mark string) (*Origin, error) {
	var m struct {
		Origin *Origin `json:"origin"`
	}
	if err := json.Unmarshal([]byte(mark), &m); err != nil {
		return nil, errs.New(errs.ErrFormat, "the origin cannot be read: %v", err)
	}
	o := m.Origin
	if o == nil {
		return nil, nil
	}
	sum, err := hex.DecodeString(o.SHA256)
	if err != nil || len(sum) != 0 && len(sum) != 32 || o.Size < 8 {
		return nil, errs.New(errs.ErrFormat,
			"invalid origin: size %d, SHA-256 %.80q; expected at least 8 bytes and 64 hex digits", o.Size, o.SHA256)
	}
	return o, nil
}

// Front returns the bytes before the data section, and the parsed header with tensors sorted by offset. It inflates
// at most the maximum size of a header. uri is the container's, for errors.
func (o *Origin) Front(uri string) ([]byte, safetensors.Header, error) {
	bad := func(err error) ([]byte, safetensors.Header, error) {
		return nil, safetensors.Header{}, errs.In("index", uri,
			errs.New(errs.ErrFormat, "the header of its origin is invalid: %v", err))
	}
	stream, err := base64.StdEncoding.DecodeString(o.Header)
	if err != nil {
		return bad(err)
	}
	most := min(o.Size, 8+tensor.MaxHeader)
	from := bytes.NewReader(stream)
	head, err := io.ReadAll(io.LimitReader(flate.NewReader(from), most+1))
	switch {
	case err == nil && int64(len(head)) > most:
		err = errs.New(errs.ErrFormat, "it has more than %d bytes", most)
	case err == nil && from.Len() > 0:
		err = errs.New(errs.ErrFormat, "%d bytes follow the Deflate stream", from.Len())
	}
	if err != nil {
		return bad(err)
	}
	h, err := safetensors.Parse(uri, head, o.Size, safetensors.Options{})
	if at, ok := errors.AsType[*errs.At](err); ok {
		err = at.Err
	}
	if err == nil {
		err = refuseNotice(&h) // an original is a plain file
	}
	if err != nil {
		return bad(err)
	}
	return head, h, nil
}

const digestSize = 16

// Digests returns the value of Layout.Digests for the digests of all tensors in file order.
func Digests(sums []digest.Sum) string {
	b := make([]byte, 0, digestSize*len(sums))
	for _, s := range sums {
		b = le.AppendUint64(le.AppendUint64(b, s.High), s.Low)
	}
	return base64.StdEncoding.EncodeToString(b)
}

// ReadDigests returns the digests of a file's n tensors, in order, from a metadata entry for which Is returned true.
// It returns nil if the entry has no digests.
func ReadDigests(mark string, n int) ([]digest.Sum, error) {
	var m struct {
		Digests string `json:"digests"`
	}
	if err := json.Unmarshal([]byte(mark), &m); err != nil {
		return nil, errs.New(errs.ErrFormat, "the digests cannot be read: %v", err)
	}
	if m.Digests == "" {
		return nil, nil
	}
	b, err := base64.StdEncoding.DecodeString(m.Digests)
	if err != nil || len(b) != digestSize*n {
		return nil, errs.New(errs.ErrFormat, "the digests have %d characters, which does not match %d tensors",
			len(m.Digests), n)
	}
	sums := make([]digest.Sum, n)
	for i := range sums {
		sums[i] = digest.Sum{High: le.Uint64(b[digestSize*i:]), Low: le.Uint64(b[digestSize*i+8:])}
	}
	return sums, nil
}

const (
	// FeatureDelta is the critical feature bit of delta files (docs/format.md 7.1). Their index is that of a container
	// without tensors.
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
