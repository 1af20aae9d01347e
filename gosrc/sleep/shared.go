package sleep

// This file uses the host store: for tensors that it has, and to put tensors into it.

import (
	"context"
	"sync"
	"time"

	"github.com/overwire/overwire/gosrc/codec"
	"github.com/overwire/overwire/gosrc/codec/digest"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/hoststore"
	"github.com/overwire/overwire/gosrc/internal/spawn"
	"github.com/overwire/overwire/gosrc/job"
	"github.com/overwire/overwire/gosrc/tensor"
)

// KeepOnHost puts tensors into the host store, unless it has them already, so that Sleep need not compress them. Memory
// for the compressed tensors is only needed meanwhile. Unlike Sleep, it returns an error if there is no store.
func KeepOnHost(ctx context.Context, j *job.Job, spec Spec, in []Tensor) (Report, error) {
	start := time.Now()
	s := &sleeper{Spec: spec, job: j}
	err := keepTensors(ctx, s, in)
	s.report.Seconds = time.Since(start).Seconds()
	if err != nil {
		return Report{}, errs.Locate("sleep", "", "", -1, err)
	}
	return s.report, nil
}

func keepTensors(ctx context.Context, s *sleeper, in []Tensor) error {
	yes := true
	link := hoststore.NewLink(&yes)
	sums, parts, rest, err := findParts(ctx, s, link, in)
	link.Done()
	for i := range parts {
		_ = parts[i].Source.Close()
	}
	if err != nil || len(rest) == 0 {
		return err
	}
	s.report = Report{}
	s.job.Bytes.Store(0)
	s.keep = true
	_, src, err := s.compressTensors(ctx, in)
	if err != nil {
		return err
	}
	defer s.mem.Free()
	if err := compareDigests(ctx, s, sums); err != nil {
		return err
	}
	s.report.Shared, s.report.Stored = s.report.Stored, 0
	return hoststore.KeepBytes(ctx, src, sums)
}

// compareDigests returns an error if the compressed bytes are not those of the digests, because tensors have changed
// meanwhile. It decodes the container instead of reading the tensors again, which may have their first bytes again.
func compareDigests(ctx context.Context, s *sleeper, sums map[string]digest.Sum) error {
	states, key := make([]digest.State, len(s.lay.Tensors)), digest.ProcessKey()
	buffers := sync.Pool{New: func() any { b := make([]byte, chunkBytes); return &b }}
	var mu sync.Mutex
	err := spawn.Each(ctx, "sleep digest", s.countWorkers(), len(s.lay.Chunks), func(c int) error {
		i, x := s.tensorOf(c), s.lay.Chunks[c]
		buf := buffers.Get().(*[]byte)
		defer buffers.Put(buf)
		b := (*buf)[:x.Logical]
		if err := codec.Decode(b, s.mem.Bytes(x.Off, int64(x.Stored)), x); err != nil {
			return changedError(s, i)
		}
		var part digest.State
		key.Add(&part, (int64(c)-int64(s.lay.Tensors[i].First))*chunkBytes, b)
		mu.Lock()
		defer mu.Unlock()
		states[i].Merge(part)
		return nil
	})
	for i := range states {
		t := &s.lay.Tensors[i]
		if t.Alias < 0 && states[i].Sum(t.Bytes) != sums[t.Name] && err == nil {
			err = changedError(s, i)
		}
	}
	return err
}

// changedError returns the error for a tensor of the layout that was changed.
func changedError(s *sleeper, i int) error {
	return errs.Locate("sleep", "", s.lay.Tensors[i].Name, -1, errs.New(errs.ErrArgument, "the tensor was changed "+
		"while it was put into the host store: call prepare_sleep again, and change no tensor before "+
		"SleepMemory.wait returns"))
}

// A foundPart is a container of the host store. isUsed says which tensors of its index are used.
type foundPart struct {
	hoststore.Part
	isUsed []bool
}

// findParts looks for tensors in the host store by name and digest. It returns the digests of all tensors by name, and
// in rest the tensors that the store does not have. The caller closes the sources, even after an error.
func findParts(ctx context.Context, s *sleeper, link *hoststore.Link, in []Tensor) (sums map[string]digest.Sum,
	parts []foundPart, rest []Tensor, err error) {
	if sums, err = parseDigests(s.Digests, in); err != nil {
		return nil, nil, nil, err
	}
	missing, want := map[string]int{}, map[string]digest.Sum{}
	for i := range in {
		if name := in[i].Name; len(in[i].Data) > 0 {
			missing[name], want[name] = i, sums[name]
		}
	}
	for _, p := range hoststore.FindParts(ctx, link, want) {
		f, isUsed := foundPart{p, make([]bool, len(p.Index.Tensors))}, false
		for k := range p.Index.Tensors {
			t := &p.Index.Tensors[k]
			i, isMissing := missing[t.Name]
			sum, hasDigest := p.Digests[t.Name]
			if isMissing && hasDigest && sum == sums[t.Name] && t.Alias < 0 && t.Bytes == int64(len(in[i].Data)) {
				f.isUsed[k] = true
				delete(missing, t.Name)
				s.report.Tensors++
				s.report.Bytes += t.Bytes
				s.report.Shared += t.Stored
				s.job.Bytes.Add(t.Bytes)
				isUsed = true
			}
		}
		if !isUsed { // the names or sizes of the tensors differ
			_ = p.Source.Close()
			continue
		}
		parts = append(parts, f)
	}
	for i := range in {
		if _, isMissing := missing[in[i].Name]; isMissing || len(in[i].Data) == 0 {
			rest = append(rest, in[i])
		}
	}
	if ctx.Err() != nil {
		err = errs.Cause(ctx)
	}
	return sums, parts, rest, err
}

func parseDigests(texts []string, in []Tensor) (map[string]digest.Sum, error) {
	if len(texts) != len(in) {
		return nil, errs.New(errs.ErrArgument, "%d digests for %d tensors", len(texts), len(in))
	}
	sums := map[string]digest.Sum{}
	for i, text := range texts {
		sum, err := digest.ParseSum(text)
		if err != nil {
			return nil, errs.Locate("sleep", "", in[i].Name, -1, err)
		}
		sums[in[i].Name] = sum
	}
	return sums, nil
}

// addParts adds the tensors that were found to an index.
func addParts(ix *tensor.Index, parts []foundPart) error {
	for _, f := range parts {
		from := f.Index.Sources[0]
		from.Gaps = true
		ix.Sources = append(ix.Sources, from)
		for k, t := range f.Index.Tensors {
			if !f.isUsed[k] {
				continue
			}
			chunks := f.Index.Chunks[t.First : t.First+t.Count]
			t.Source, t.First = int32(len(ix.Sources)-1), int32(len(ix.Chunks))
			ix.Tensors, ix.Chunks = append(ix.Tensors, t), append(ix.Chunks, chunks...)
		}
	}
	return ix.Validate(codec.Known)
}
