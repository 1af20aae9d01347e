package save

// This file describes the tensors to write, and where their bytes are.

import (
	"context"
	"math"
	"sort"
	"unicode/utf8"

	"github.com/overwire/overwire/gosrc/codec"
	"github.com/overwire/overwire/gosrc/codec/blocksum"
	"github.com/overwire/overwire/gosrc/codec/digest"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/format/overwire"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/tensor"
)

// A body reads the logical bytes of a tensor. It is safe for concurrent use.
type body interface {
	// bytes returns bytes [off, off+len(buf)) in plain order: either buf, filled,
	// or memory of the body that stays valid until the job ends.
	bytes(ctx context.Context, buf []byte, off int64) ([]byte, error)
}

// memory is a body in the caller's memory.
type memory []byte

func (m memory) bytes(_ context.Context, buf []byte, off int64) ([]byte, error) {
	return m[off : off+int64(len(buf))], nil
}

// scattered is a body in several places of the caller's memory.
type scattered struct {
	all  [][]byte
	ends []int64 // of each, in the tensor
}

func newScattered(all [][]byte) *scattered {
	p := &scattered{all: all}
	end := int64(0)
	for _, one := range all {
		end += int64(len(one))
		p.ends = append(p.ends, end)
	}
	return p
}

func (p *scattered) bytes(_ context.Context, buf []byte, off int64) ([]byte, error) {
	k := sort.Search(len(p.ends), func(k int) bool { return p.ends[k] > off })
	for done := 0; done < len(buf); k++ {
		from := p.all[k][int64(len(p.all[k]))-(p.ends[k]-off-int64(done)):]
		if done == 0 && len(from) >= len(buf) {
			return from[:len(buf)], nil
		}
		done += copy(buf[done:], from)
	}
	return buf, nil
}

// away is a body in memory outside the host.
type away struct {
	*Away
	ahead map[piece][]byte // what was read before it was asked for
}

func (a *away) bytes(ctx context.Context, buf []byte, off int64) ([]byte, error) {
	if len(buf) == 0 {
		return buf, nil
	}
	if b := a.ahead[piece{off, int64(len(buf))}]; b != nil {
		return b, nil
	}
	if err := errs.Cause(ctx); err != nil {
		return nil, err
	}
	return buf, a.Read(buf, off)
}

type form uint8

const (
	plain form = iota
	compressed
	alias
)

// An origin is a file that tensors come from.
type origin struct {
	src    source.Source
	format string // tensor.Source.Format
}

// An item is one tensor on its way into a file.
type item struct {
	name  string
	dtype tensor.DType
	shape []int64
	bytes int64
	body  body
	gpu   *gpu // encodes it; nil: the host does

	// Convert: the tensor of an overwire source, else nil, and how it is coded
	// there (0: not).
	known          *tensor.Tensor
	knownTransform uint8
	knownPlanes    bool    // some of its chunks there have codec 6
	origin         *origin // Convert: the source of the tensor

	// Set by classify.
	form   form
	ways   codec.Ways // of its chunks
	trials []trial    // its chunks, if it is small
	expect float64    // stored / logical, for the free-space check
	of     *item      // alias: the item that has its bytes; never itself an alias
	parts  int64

	// Set while it is written.
	hash   [16]byte
	hashed bool // hash is known before the tensor is written
	sums   blocksum.State
	digest digest.State

	digested *digest.Sum // by the GPU that encodes it; nil: digest has it
}

// checkItems refuses tensors that no file can hold, before anything is written.
func checkItems(path string, items []*item) error {
	seen := make(map[string]struct{}, len(items))
	if int64(len(items)) > math.MaxInt32-1 {
		return badArgument(path, "", "%d tensors are too many", len(items))
	}
	for _, t := range items {
		bad := func(format string, args ...any) error { return badArgument(path, t.name, format, args...) }
		switch {
		case t.name == "__metadata__" || t.name == overwire.IndexName:
			return bad("the name is reserved")
		case !utf8.ValidString(t.name):
			return bad("the name is not UTF-8")
		case !t.dtype.Valid():
			return bad("dtype code %d is unknown", t.dtype)
		case len(t.shape) > tensor.MaxRank:
			return bad("rank %d is larger than %d", len(t.shape), tensor.MaxRank)
		}
		if _, dup := seen[t.name]; dup {
			return bad("the name comes twice")
		}
		seen[t.name] = struct{}{}
		size, err := tensor.Size(t.dtype, t.shape)
		if err != nil {
			return bad("%v", err)
		}
		if size != t.bytes {
			return bad("shape %v as %v is %d bytes, but %d were given", t.shape, t.dtype, size, t.bytes)
		}
	}
	return nil
}

func checkMetadata(path string, m map[string]string) error {
	for k, v := range m {
		switch {
		case k == overwire.MetadataKey:
			return badArgument(path, "", "metadata key %q is reserved", k)
		case !utf8.ValidString(k) || !utf8.ValidString(v):
			return badArgument(path, "", "metadata %q is not UTF-8", k)
		}
	}
	return nil
}

// minPart is the least size of a column part: smaller parts cost more in tables and
// records than slicing saves.
const minPart = 4096

// chooseParts is the largest of asked, asked/2 … 1 whose parts consist of whole
// elements of every row.
func (t *item) chooseParts(asked int) int64 {
	as := tensor.Tensor{DType: t.dtype, Shape: t.shape, Bytes: t.bytes}
	for p := asked; p > 1; p /= 2 {
		if as.Splits(p) && t.bytes/int64(p) >= minPart {
			return int64(p)
		}
	}
	return 1
}

// joinParts stores the tensor in one part. The hash that it has from its source is then
// compared as it is written.
func (t *item) joinParts() {
	if t.parts > 1 && t.known != nil {
		t.hashed = false
	}
	t.parts = 1
}

// rowBits is that of a tensor.
func (t *item) rowBits() int64 {
	as := tensor.Tensor{DType: t.dtype, Shape: t.shape, Bytes: t.bytes}
	return as.RowBits()
}

// fillBytes copies bytes [off, off+len(dst)) to dst.
func (t *item) fillBytes(ctx context.Context, dst []byte, off int64) error {
	got, err := t.body.bytes(ctx, dst, off)
	if err == nil && &got[0] != &dst[0] {
		copy(dst, got)
	}
	return err
}

// gatherColumns returns bytes [off, off+len(buf)) of column part p, row after row: in
// buf, or as bytes does when there is one part.
func (t *item) gatherColumns(ctx context.Context, buf []byte, p, off int64) ([]byte, error) {
	if t.parts <= 1 {
		return t.body.bytes(ctx, buf, off)
	}
	row := t.bytes / t.shape[0] // tensors of several parts have rows
	width := row / t.parts
	for done := int64(0); done < int64(len(buf)); {
		r, c := (off+done)/width, (off+done)%width
		n := min(width-c, int64(len(buf))-done)
		if err := t.fillBytes(ctx, buf[done:done+n], r*row+p*width+c); err != nil {
			return nil, err
		}
		done += n
	}
	return buf, nil
}
