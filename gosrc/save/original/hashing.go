package original

// This file hashes a file while it is compressed, using the bytes that the encoder has read.

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"time"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/avx"
	"github.com/overwire/overwire/gosrc/internal/spawn"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/tensor"
)

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
