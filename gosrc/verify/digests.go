package verify

// This file computes the digests of tensors.

import (
	"context"
	"sync"
	"time"

	"github.com/overwire/overwire/gosrc/codec/digest"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/format"
	"github.com/overwire/overwire/gosrc/format/overwire"
	"github.com/overwire/overwire/gosrc/internal/spawn"
	"github.com/overwire/overwire/gosrc/job"
	"github.com/overwire/overwire/gosrc/knob"
	"github.com/overwire/overwire/gosrc/stored"
)

// A DigestReport holds the digest of every tensor of a model, in the model's order.
type DigestReport struct {
	Tensors []TensorDigest `json:"tensors"`
	Bytes   int64          `json:"bytes"`  // bytes read and decoded to compute digests
	Kept    int            `json:"kept"`   // number of digests that were stored in the files
	OnGPU   int64          `json:"on_gpu"` // the part of Bytes that a GPU decoded; Digests leaves it 0
	Seconds float64        `json:"seconds"`
}

// A TensorDigest is one tensor of a DigestReport.
type TensorDigest struct {
	Name   string  `json:"name"`
	DType  string  `json:"dtype"`
	Shape  []int64 `json:"shape"`
	Digest string  `json:"digest"` // 32 hex digits, see docs/format.md 6; "" if the tensor was skipped
}

// Digests returns the digests of a model's tensors. It uses digests that containers store, and computes the others. For
// that it reads and decodes tensors block by block on all cores, in bounded memory, and compares the checksums of all
// chunks. It skips tensors for which elsewhere returns true. elsewhere may be nil.
func Digests(ctx context.Context, j *job.Job, uris []string, access format.Access,
	elsewhere func(name string) bool) (DigestReport, error) {
	start := time.Now()
	m, err := stored.OpenNamed(ctx, uris, access, false)
	if err != nil {
		return DigestReport{}, errs.Ended(ctx, err)
	}
	defer m.Close()
	if j == nil {
		j = job.New("digests")
	}
	rep, err := digestAll(ctx, j, m, elsewhere)
	if err == nil {
		err = m.RefuseWritten()
	}
	rep.Seconds = time.Since(start).Seconds()
	return rep, errs.Ended(ctx, err)
}

func digestAll(ctx context.Context, j *job.Job, m *stored.Model, elsewhere func(name string) bool) (rep DigestReport,
	err error) {
	workers, tensors := knob.Workers(0), m.Index.Tensors
	have, err := storedDigests(m)
	if err != nil {
		return DigestReport{}, err
	}
	here := make([]bool, len(tensors)) // tensors to read
	for i := range tensors {
		if have[i] == nil && (elsewhere == nil || !elsewhere(tensors[i].Name)) {
			here[m.Holder(i)] = true
		}
	}
	var spans []stored.Span
	for i, r := range m.Readers(stored.NewCache(workers)) {
		if here[i] {
			rep.Bytes += tensors[i].Bytes
			spans = stored.AppendSpans(spans, r, i, tensors[i].Bytes)
		}
	}
	j.TotalBytes.Store(rep.Bytes)
	j.TotalTensors.Store(int64(len(tensors)))
	states := make([]digest.State, len(tensors))
	var mu sync.Mutex
	buffers := sync.Pool{New: func() any { return new([]byte) }}
	err = spawn.Each(ctx, "save.digests", workers, len(spans), func(k int) error {
		s := &spans[k]
		buf := buffers.Get().(*[]byte)
		defer buffers.Put(buf)
		b, err := s.Read(ctx, buf)
		if err != nil {
			return err
		}
		var part digest.State
		part.Add(s.Off, b)
		mu.Lock()
		states[s.Number].Merge(part)
		mu.Unlock()
		j.Bytes.Add(s.N)
		return nil
	})
	if err != nil {
		return DigestReport{}, err
	}
	for i := range tensors {
		t, sum := &tensors[i], ""
		switch {
		case have[i] != nil:
			sum = have[i].String()
			rep.Kept++
		case here[m.Holder(i)]:
			sum = states[m.Holder(i)].Sum(t.Bytes).String()
		}
		rep.Tensors = append(rep.Tensors, TensorDigest{Name: t.Name, DType: t.DType.String(),
			Shape: append([]int64{}, t.Shape...), Digest: sum})
		j.Tensors.Add(1)
	}
	return rep, nil
}

// storedDigests returns the stored digest of each tensor, or nil for tensors without one.
func storedDigests(m *stored.Model) ([]*digest.Sum, error) {
	out := make([]*digest.Sum, len(m.Index.Tensors))
	own := make([][]int, len(m.Index.Sources)) // the tensors of each source
	for i, t := range m.Index.Tensors {
		own[t.Source] = append(own[t.Source], i)
	}
	for k := range m.Index.Sources {
		s := &m.Index.Sources[k]
		if !s.Overwire() || s.Unlisted > 0 { // a file stores the digests of all its tensors, in their order, or none
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
