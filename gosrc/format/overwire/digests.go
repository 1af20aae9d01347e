package overwire

// This file stores digests of the tensors in a container (docs/format.md section 1.2).

import (
	"encoding/base64"
	"encoding/json"

	"github.com/overwire/overwire/gosrc/codec/digest"
	"github.com/overwire/overwire/gosrc/errs"
)

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
		return nil, errs.New(errs.ErrFormat, "the digests have %d characters, which does not fit %d tensors",
			len(m.Digests), n)
	}
	sums := make([]digest.Sum, n)
	for i := range sums {
		sums[i] = digest.Sum{High: le.Uint64(b[digestSize*i:]), Low: le.Uint64(b[digestSize*i+8:])}
	}
	return sums, nil
}
