// Package original restores exactly the file that a container was made from. It describes the file when it is
// compressed, plans its restored copy, and compares the two. Package format/overwire encodes the description.
package original

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"hash"
	"maps"
	"slices"
	"time"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/format/overwire"
	"github.com/overwire/overwire/gosrc/internal/avx"
	"github.com/overwire/overwire/gosrc/internal/spawn"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/stored"
	"github.com/overwire/overwire/gosrc/tensor"
)

// A Summary is the part of a report about one file. SHA256 is the plain file's hash in hex. It is "" if the file was
// not hashed because it was read over a network, or if its container stores no hash. Compared means that a decompressed
// file has the stored SHA-256 of the original.
type Summary struct {
	File     string `json:"file"`
	SHA256   string `json:"sha256"`
	Compared bool   `json:"compared"`
}

// A File is the safetensors file that a container is or was made from.
type File struct {
	*overwire.Origin
	src     source.Source // the file itself or its container
	hash    bool          // the file will be hashed
	hashing *Hashing
}

// Of returns the original of an opened source, or nil if there is none. A plain safetensors file is its own original; a
// container may store one. If hash is set, Hash will hash a local original.
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
	// A remote file cannot be hashed: its bytes are read only once, in the order in which they are compressed.
	f := &File{Origin: overwire.NewOrigin(head, s.Size), src: src, hash: hash && src.Facts().File != nil}
	if f.hash {
		f.SHA256 = overwire.Pending
	}
	return f, nil
}

// Hash starts to compute SHA256 if it is Pending. order lists the tensors that the caller can pass to Hashing, in the
// order in which it will pass them. window is the maximum number of pieces that are passed and not yet hashed. The
// caller must call Done once, and cancel ctx first if it does not pass all bytes. f may be nil.
func (f *File) Hash(ctx context.Context, order []string, window int) (err error) {
	if f != nil && f.hash {
		f.hashing, err = beginHashing(ctx, f, order, window)
	}
	return err
}

// Hashing returns the Hashing that Hash has started, or nil. f may be nil.
func (f *File) Hashing() *Hashing {
	if f == nil {
		return nil
	}
	return f.hashing
}

// refuseChanged refuses a file that was written to after it was opened, because its container could not restore it.
func (f *File) refuseChanged() error {
	err := source.Unwritten(f.src)
	if errors.Is(err, errs.ErrCorrupt) {
		err = errs.In("read", f.src.URI(), errs.New(errs.ErrCorrupt,
			"the file was written to while it was being compressed: compress it again"))
	}
	return err
}

// A Copy is an original that is being restored.
type Copy struct {
	Front   []byte          // the bytes before the data section
	Tensors []tensor.Tensor // in file order; their bytes follow without gaps
	// Compared is set by Done if the container stores the file's SHA-256.
	Compared bool
	file     *File
	sum      hash.Hash // nil if the copy is not hashed
}

// Again checks that the original has the given tensors (by name) and metadata, and returns
// a Copy of it. If they differ, the error is errs.ErrFormat. The copy's SHA-256 is computed
// if the container stores one to compare it with, or if always is set.
func (f *File) Again(ts map[string]*tensor.Tensor, metadata map[string]string, always bool) (*Copy, error) {
	uri := f.src.URI()
	front, h, err := f.Front(uri)
	if err != nil {
		return nil, err
	}
	bad := func(name, what string) error {
		return errs.Locate("index", uri, name, -1, errs.New(errs.ErrFormat,
			"the header of the stored original has %s than the container", what))
	}
	if delete(h.Metadata, overwire.MetadataKey); !maps.Equal(h.Metadata, metadata) {
		return nil, bad("", "different metadata")
	}
	if len(h.Tensors) != len(ts) {
		return nil, bad("", "more or fewer tensors")
	}
	for i := range h.Tensors {
		t := &h.Tensors[i]
		if own := ts[t.Name]; own == nil || own.DType != t.DType || !slices.Equal(own.Shape, t.Shape) {
			return nil, bad(t.Name, "a different tensor")
		}
	}
	p := &Copy{Front: front, Tensors: h.Tensors, file: f}
	if always || f.SHA256 != "" {
		p.sum = sha256.New()
	}
	p.AddBytes(front)
	return p, nil
}

// AddBytes hashes the next bytes of the tensors, in file order.
func (p *Copy) AddBytes(b []byte) {
	if p.sum != nil {
		avx.Clear()
		_, _ = p.sum.Write(b)
	}
}

// Done compares the copy's SHA-256, if it was computed, with the original's. If the original's is
// unknown, Done sets it to the copy's. In that case only the checksums of header and tensors were compared.
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

// Verify restores the original f of source k of a model without writing it, and compares its
// SHA-256 as Done does. It calls progress with the number of tensor bytes hashed, from one
// goroutine at a time. Memory use does not depend on the file's size.
func Verify(ctx context.Context, f *File, m *stored.Model, k, workers int, progress func(n int64)) (*Copy, error) {
	known, numbers := map[string]*tensor.Tensor{}, map[string]int{}
	for i := range m.Index.Tensors {
		if t := &m.Index.Tensors[i]; int(t.Source) == k {
			known[t.Name], numbers[t.Name] = t, i
		}
	}
	p, err := f.Again(known, m.Metadata(k), true)
	if err != nil {
		return nil, err
	}
	readers := m.Readers(stored.NewCache(workers))
	var spans []stored.Span
	for i := range p.Tensors {
		t := known[p.Tensors[i].Name]
		spans = stored.AppendSpans(spans, readers[numbers[t.Name]], i, t.Bytes)
	}
	err = stored.ReadInOrder(ctx, "save.sha256", workers, spans, nil, func(k int, b []byte) error {
		p.AddBytes(b)
		progress(spans[k].N)
		return nil
	})
	if err != nil {
		return nil, err
	}
	return p, p.Done()
}

// A Hashing computes the SHA-256 of a file in a separate goroutine. It reads only the tensors that are not passed in
// the order of the file. Methods of a nil Hashing do nothing.
type Hashing struct {
	file    *File
	ctx     context.Context
	front   []byte
	tensors []tensor.Tensor // in file order
	passed  map[string]bool // tensors that are passed
	pieces  chan piece
	ended   chan struct{}
	err     error         // valid after ended is closed
	busy    time.Duration // valid after ended is closed
}

// A piece holds the next bytes of a passed tensor. done is closed when they are hashed.
type piece struct {
	data []byte
	done chan struct{}
}

// beginHashing starts to hash f; see File.Hash.
func beginHashing(ctx context.Context, f *File, order []string, window int) (*Hashing, error) {
	front, head, err := f.Front(f.src.URI())
	if err != nil {
		return nil, err
	}
	h := &Hashing{file: f, ctx: ctx, front: front, tensors: head.Tensors, pieces: make(chan piece, window),
		ended: make(chan struct{})}
	h.passed = inOrder(order, head.Tensors)
	spawn.Go("save.sha256", func() {
		h.err = errs.New(errs.ErrEngine, "the hashing has not ended")
		defer close(h.ended)
		h.err = h.hashFile()
	})
	return h, nil
}

// Pass passes the next bytes of a tensor. They must not change until Await has returned for the returned channel.
func (h *Hashing) Pass(name string, data []byte) <-chan struct{} {
	if h == nil || !h.passed[name] {
		return nil
	}
	p := piece{data, make(chan struct{})}
	select {
	case h.pieces <- p:
	case <-h.ended:
	}
	return p.done
}

// Await waits until the bytes of a Pass are hashed.
func (h *Hashing) Await(done <-chan struct{}) error {
	if done == nil {
		return nil
	}
	select {
	case <-done:
		return nil
	case <-h.ended:
	}
	select {
	case <-done:
		return nil
	default:
		return h.err
	}
}

// Done waits until the file is hashed and SHA256 is set.
func (h *Hashing) Done() error {
	if h == nil {
		return nil
	}
	<-h.ended
	return h.err
}

// BusyTime returns the time spent hashing. Call it after Done.
func (h *Hashing) BusyTime() time.Duration {
	if h == nil {
		return 0
	}
	return h.busy
}

func (h *Hashing) hashFile() error {
	sum := sha256.New()
	add := func(b []byte) {
		start := time.Now()
		avx.Clear()
		_, _ = sum.Write(b)
		h.busy += time.Since(start)
	}
	add(h.front)
	for i := range h.tensors {
		t := &h.tensors[i]
		if !h.passed[t.Name] {
			if err := ReadBlocks(h.ctx, h.file.src, t.Off, t.Bytes, add); err != nil {
				return err
			}
			continue
		}
		for n := int64(0); n < t.Bytes; {
			select {
			case p := <-h.pieces:
				add(p.data)
				n += int64(len(p.data))
				close(p.done)
			case <-h.ctx.Done():
				return errs.Cause(h.ctx)
			}
		}
	}
	if err := h.file.refuseChanged(); err != nil {
		return err
	}
	h.file.SHA256 = hex.EncodeToString(sum.Sum(nil))
	return nil
}

// ReadBlocks passes n bytes of a source, starting at off, to add, in blocks that fit in a core's second-level cache.
func ReadBlocks(ctx context.Context, src source.Source, off, n int64, add func(b []byte)) error {
	buf := make([]byte, min(n, 128<<10))
	for end := off + n; off < end; off += int64(len(buf)) {
		buf = buf[:min(int64(len(buf)), end-off)]
		if err := src.ReadAt(ctx, buf, off); err != nil {
			return err
		}
		add(buf)
	}
	return nil
}

// inOrder returns the largest subsequence of order, by bytes, that is in file order.
func inOrder(order []string, tensors []tensor.Tensor) map[string]bool {
	place := make(map[string]int, len(tensors))
	for i := range tensors {
		place[tensors[i].Name] = i
	}
	// A step is a tensor of order. bytes is the size of the best chain that ends with the step, and before is the
	// previous step of that chain, or -1.
	type step struct {
		bytes  int64
		before int
	}
	steps := make([]step, len(order))
	tree := make([]int, len(tensors)+1) // Fenwick tree: the best step, plus 1, of a range of tensors
	best := -1
	for k, name := range order {
		i, known := place[name]
		if !known {
			continue
		}
		s := step{tensors[i].Bytes, -1}
		for j := i; j > 0; j &= j - 1 {
			if b := tree[j] - 1; b >= 0 && (s.before < 0 || steps[b].bytes > steps[s.before].bytes) {
				s.before = b
			}
		}
		if s.before >= 0 {
			s.bytes += steps[s.before].bytes
		}
		steps[k] = s
		for j := i + 1; j <= len(tensors); j += j & -j {
			if b := tree[j] - 1; b < 0 || steps[b].bytes < s.bytes {
				tree[j] = k + 1
			}
		}
		if best < 0 || s.bytes > steps[best].bytes {
			best = k
		}
	}
	chain := map[string]bool{}
	for k := best; k >= 0; k = steps[k].before {
		chain[order[k]] = true
	}
	return chain
}
