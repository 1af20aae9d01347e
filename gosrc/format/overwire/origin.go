package overwire

// This file stores a container's origin (docs/format.md section 1).

import (
	"bytes"
	"compress/flate"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io"
	"sync"

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
