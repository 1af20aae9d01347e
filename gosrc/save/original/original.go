// Package original lets a container restore the very file that it was made from: it
// describes that file when it is compressed, plans it when it is written again, and
// compares the two.
// format/overwire encodes the description.
package original

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"hash"
	"maps"
	"slices"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/format/overwire"
	"github.com/overwire/overwire/gosrc/internal/avx"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/tensor"
)

// A Summary is what a report says about one file. SHA256 is that of the plain file in hex; "": it was not hashed,
// since it came over a network, or its container has no hash. Compared says that a decompressed file was compared
// with the SHA256 of the one that was compressed.
type Summary struct {
	File     string `json:"file"`
	SHA256   string `json:"sha256"`
	Compared bool   `json:"compared"`
}

// A File is the safetensors file that a container is, or was, made from.
type File struct {
	*overwire.Origin
	src     source.Source // the opened source: the file itself, or its container
	hash    bool          // the file can be hashed
	hashing *Hashing
}

// Of returns the original of an opened source: a plain safetensors file is its own
// original, a container may store one; else nil. With hash, that of a local file is hashed.
func Of(ctx context.Context, src source.Source, s *tensor.Source, hash bool) (*File, error) {
	if s.Overwire() {
		o, err := overwire.ReadOrigin(s.Mark)
		if o == nil || err != nil {
			return nil, errs.In("index", s.URI, err)
		}
		return &File{Origin: o, src: src}, nil
	}
	if s.Format != tensor.FormatSafetensors {
		return nil, nil
	}
	head := make([]byte, s.Data)
	if err := src.ReadAt(ctx, head, 0); err != nil {
		return nil, err
	}
	// The bytes of a remote file arrive once, in the order in which they are
	// compressed.
	f := &File{Origin: overwire.NewOrigin(head, s.Size), src: src, hash: hash && src.Facts().File != nil}
	if f.hash {
		f.SHA256 = overwire.Pending
	}
	return f, nil
}

// Hash begins to set SHA256 if it is Pending. order has the tensors that can be passed
// to Hashing, in the order in which they will be; window is the most pieces that are
// passed and not hashed. The caller calls Done once, and cancels ctx before if not all is
// passed. f may be nil.
func (f *File) Hash(ctx context.Context, order []string, window int) (err error) {
	if f != nil && f.hash {
		f.hashing, err = beginHashing(ctx, f, order, window)
	}
	return err
}

// Hashing is the hashing that Hash has begun, or nil. f may be nil.
func (f *File) Hashing() *Hashing {
	if f == nil {
		return nil
	}
	return f.hashing
}

// refuseChanged refuses a file that was written to since it was opened: its container could
// not be decompressed.
func (f *File) refuseChanged() error {
	err := source.Unwritten(f.src)
	if errors.Is(err, errs.ErrCorrupt) {
		err = errs.In("read", f.src.URI(), errs.New(errs.ErrCorrupt,
			"the file was written to while it was being compressed: compress it again"))
	}
	return err
}

// A Copy is an original that is being written again.
type Copy struct {
	Front   []byte          // the bytes before the data section
	Tensors []tensor.Tensor // in the order of their bytes, which follow without gaps
	// Compared is set by Done if the container has the SHA-256 of the file.
	Compared bool
	file     *File
	sum      hash.Hash // nil: none is made
}

// Again checks that the original has the given tensors, by name, and metadata, and
// returns it. An original with others is errs.ErrFormat. Its SHA-256 is made if the
// container has one to compare it with, or always.
func (f *File) Again(ts map[string]*tensor.Tensor, metadata map[string]string, always bool) (*Copy, error) {
	uri := f.src.URI()
	front, h, err := f.Front(uri)
	if err != nil {
		return nil, err
	}
	bad := func(name, what string) error {
		return errs.Locate("index", uri, name, -1, errs.New(errs.ErrFormat,
			"the header of its origin has %s than its own", what))
	}
	if delete(h.Metadata, overwire.MetadataKey); !maps.Equal(h.Metadata, metadata) {
		return nil, bad("", "other metadata")
	}
	if len(h.Tensors) != len(ts) {
		return nil, bad("", "more or fewer tensors")
	}
	for i := range h.Tensors {
		t := &h.Tensors[i]
		if own := ts[t.Name]; own == nil || own.DType != t.DType || !slices.Equal(own.Shape, t.Shape) {
			return nil, bad(t.Name, "another tensor")
		}
	}
	p := &Copy{Front: front, Tensors: h.Tensors, file: f}
	if always || f.SHA256 != "" {
		p.sum = sha256.New()
	}
	p.AddBytes(front)
	return p, nil
}

// AddBytes takes the next bytes of the tensors, which follow one another in their order.
func (p *Copy) AddBytes(b []byte) {
	if p.sum != nil {
		avx.Clear()
		_, _ = p.sum.Write(b)
	}
}

// Done compares the SHA-256 of what was written with the original's, if one was made, or sets it if
// it is unknown: then the checksums of header and tensors are the proof.
func (p *Copy) Done() error {
	if p.sum == nil {
		return nil
	}
	sum := hex.EncodeToString(p.sum.Sum(nil))
	if p.file.SHA256 != "" && sum != p.file.SHA256 {
		return errs.In("check", p.file.src.URI(), errs.New(errs.ErrCorrupt,
			"the file that was compressed has the SHA-256 %s, but the decompressed file has %s", p.file.SHA256, sum))
	}
	p.Compared, p.file.SHA256 = p.file.SHA256 != "", sum
	return nil
}
