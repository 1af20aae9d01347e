package save

// This file has the verb Digests.

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/overwire/overwire/gosrc/codec/digest"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/format"
	"github.com/overwire/overwire/gosrc/format/overwire"
	"github.com/overwire/overwire/gosrc/internal/spawn"
	"github.com/overwire/overwire/gosrc/job"
	"github.com/overwire/overwire/gosrc/knob"
)

// A DigestReport has the digest of every tensor of a model, in the model's order.
type DigestReport struct {
	Tensors []TensorDigest `json:"tensors"`
	Bytes   int64          `json:"bytes"`  // that were read for it, decoded
	Kept    int            `json:"kept"`   // digests that the files keep, and nothing was read for
	OnGPU   int64          `json:"on_gpu"` // of Bytes, those that a GPU has decoded: none by Digests
	Seconds float64        `json:"seconds"`
}

// A TensorDigest is one tensor of a DigestReport.
type TensorDigest struct {
	Name   string  `json:"name"`
	DType  string  `json:"dtype"`
	Shape  []int64 `json:"shape"`
	Digest string  `json:"digest"` // 32 hex digits: docs/format.md 6; "" if it is computed elsewhere
}

// Digests gives the digests of a model's tensors: those that containers keep, and the
// others computed: it reads and decodes them block by
// block on all cores, in bounded memory, and compares the checksums of all chunks. It
// computes none of the tensors that are elsewhere by name; nil: all.
func Digests(ctx context.Context, j *job.Job, uris []string, storage format.Access,
	elsewhere func(name string) bool) (DigestReport, error) {
	start := time.Now()
	m, err := openSpread(ctx, uris, storage, false)
	if err != nil {
		return DigestReport{}, errs.Ended(ctx, err)
	}
	defer m.closeSources()
	if j == nil {
		j = job.New("digests")
	}
	rep, err := m.digestItems(ctx, j, elsewhere)
	if err == nil {
		err = m.refuseWritten()
	}
	rep.Seconds = time.Since(start).Seconds()
	return rep, errs.Ended(ctx, err)
}

func (m *model) digestItems(ctx context.Context, j *job.Job, elsewhere func(name string) bool) (rep DigestReport,
	err error) {
	workers := knob.Workers(0)
	items := m.items(workers)
	var spans []span
	kept, err := m.keptDigests()
	if err != nil {
		return DigestReport{}, err
	}
	here := make([]bool, len(items)) // whose bytes are read
	for i, t := range items {
		if kept[i] == nil && (elsewhere == nil || !elsewhere(t.name)) {
			here[m.holderOf(i)] = true
		}
	}
	for i, t := range items {
		if here[i] {
			rep.Bytes += t.bytes
			spans = t.cut(spans, i)
		}
	}
	j.TotalBytes.Store(rep.Bytes)
	j.TotalTensors.Store(int64(len(items)))
	states := make([]digest.State, len(items))
	var mu sync.Mutex
	buffers := sync.Pool{New: func() any { return new([]byte) }}
	err = spawn.Each(ctx, "save.digests", workers, len(spans), func(k int) error {
		s := &spans[k]
		buf := buffers.Get().(*[]byte)
		defer buffers.Put(buf)
		*buf = slices.Grow((*buf)[:0], int(s.n))
		b, err := s.t.body.bytes(ctx, (*buf)[:s.n], s.off)
		if err != nil {
			return err
		}
		var part digest.State
		part.Add(s.off, b)
		mu.Lock()
		states[s.k].Merge(part)
		mu.Unlock()
		j.Bytes.Add(s.n)
		return nil
	})
	if err != nil {
		return DigestReport{}, err
	}
	for i, t := range items {
		sum := ""
		switch {
		case kept[i] != nil:
			sum = kept[i].String()
			rep.Kept++
		case here[m.holderOf(i)]:
			sum = states[m.holderOf(i)].Sum(t.bytes).String()
		}
		rep.Tensors = append(rep.Tensors, TensorDigest{Name: t.name, DType: t.dtype.String(),
			Shape: append([]int64{}, t.shape...), Digest: sum})
		j.Tensors.Add(1)
	}
	return rep, nil
}

// holderOf is the tensor that has the bytes of tensor i.
func (m *model) holderOf(i int) int {
	if a := m.ix.Tensors[i].Alias; a >= 0 {
		return int(a)
	}
	return i
}

// keptDigests returns the digests that containers keep, by tensor; nil: none.
func (m *model) keptDigests() ([]*digest.Sum, error) {
	out := make([]*digest.Sum, len(m.ix.Tensors))
	own := make([][]int, len(m.ix.Sources)) // the tensors of each source
	for i, t := range m.ix.Tensors {
		own[t.Source] = append(own[t.Source], i)
	}
	for k := range m.ix.Sources {
		s := &m.ix.Sources[k]
		if !s.Overwire() || s.Unlisted > 0 { // a file keeps the digests of all its tensors, by their order
			continue
		}
		sums, err := overwire.ReadDigests(s.Mark, len(own[k]))
		if err != nil {
			return nil, errs.In("index", s.URI, err)
		}
		for j := range sums {
			out[own[k][j]] = &sums[j]
		}
	}
	return out, nil
}
