package delta

// This file applies chains of deltas to tensors in place, on the host or on a GPU, and creates deltas on a GPU. It
// checks everything before it changes the first byte, and undoes a change that fails later.

import (
	"cmp"
	"context"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/overwire/overwire/gosrc/codec/delta"
	"github.com/overwire/overwire/gosrc/codec/digest"
	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/device/cuda"
	"github.com/overwire/overwire/gosrc/device/cuda/stream"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/sizes"
	"github.com/overwire/overwire/gosrc/internal/spawn"
	"github.com/overwire/overwire/gosrc/tensor"
)

// A Target is a dense tensor in host memory (CUDA is 0) or on GPU CUDA - 1. Until Apply returns, only work that is
// queued on Stream may use it.
type Target struct {
	Name   string
	DType  tensor.DType
	Shape  []int64
	At     uint64
	CUDA   int32
	Stream uintptr
}

// A Report describes what was written or applied. Bytes counts tensor bytes. Stored counts the bytes of the written
// file or of the applied chunks.
type Report struct {
	Tensors int      `json:"tensors"`
	Changed int      `json:"changed"` // tensors that changed
	Bytes   int64    `json:"bytes"`
	Stored  int64    `json:"stored"`
	Stages  []Stage  `json:"stages"`
	Files   []string `json:"files"` // written files; an index.json is last
}

// A Stage is a part of the work and its duration.
type Stage struct {
	Name    string  `json:"name"`
	Seconds float64 `json:"seconds"`
}

// Stages measures the consecutive stages of the work.
type Stages struct {
	list []Stage
	last time.Time
}

// Begin starts the first stage.
func Begin() *Stages { return &Stages{last: time.Now()} }

// End ends a stage and begins the next one.
func (s *Stages) End(name string) {
	now := time.Now()
	s.list = append(s.list, Stage{name, now.Sub(s.last).Seconds()})
	s.last = now
}

// List returns the stages that have ended.
func (s *Stages) List() []Stage { return s.list }

// A Part selects the part of the work that Apply does. Processes that change tensors together must all check before
// any of them changes tensors.
type Part string

// Check only compares the digests. Change is the part of Whole after Check. Undo reverses Change.
const (
	Whole  Part = ""
	Check  Part = "check"
	Change Part = "change"
	Undo   Part = "undo"
)

// A step is a target with its part of the chain. back means that the chain is applied in reverse.
type step struct {
	*Target
	bytes int64
	links []link
	back  bool
}

func (s *step) first() digest.Sum { return s.digestAt(s.back) }
func (s *step) last() digest.Sum  { return s.digestAt(!s.back) }

func (s *step) digestAt(last bool) digest.Sum {
	if last {
		return s.links[len(s.links)-1].tensor.New
	}
	return s.links[0].tensor.Base
}
func (s *step) hasChanges() bool {
	return slices.ContainsFunc(s.links, func(l link) bool { return len(l.tensor.Chunks) > 0 })
}

// An applier applies steps to the memory of one device.
type applier interface {
	// digestSteps returns the digests of the current bytes of the steps' tensors.
	digestSteps(ctx context.Context) ([]digest.Sum, error)
	// prepareSteps prepares apply without changing tensors. It may run concurrently with digestSteps.
	prepareSteps(ctx context.Context) error
	// apply XORs the chain into the tensors; a second call reverses this. If it returns an error, it has undone its
	// changes.
	apply() error
}

// Apply applies a chain to targets, with the given number of workers. Targets that are in no file are not changed.
// Names without a target give errs.ErrArgument, unless missing is set.
//
// Before Apply changes the first byte, it compares the digests of all tensors with the base of the chain. A different
// digest gives errs.ErrBase. After the change it compares digests again, and undoes the change if one is wrong. An
// error after the first change lists which tensors have old and new values, and which must be loaded again. Once the
// change begins, ctx has no effect.
func Apply(ctx context.Context, chain []*File, targets []Target, missing bool, workers int, part Part) (r Report,
	err error) {
	if part != Whole && part != Check && part != Change && part != Undo {
		return r, errs.New(errs.ErrArgument, "delta: unknown part %q", part)
	}
	stages := Begin()
	steps, err := planSteps(chain, targets, missing)
	if err != nil {
		return r, err
	}
	for i := range steps {
		s := &steps[i]
		s.back = part == Undo
		r.Tensors++
		r.Bytes += s.bytes
		if s.hasChanges() {
			r.Changed++
		}
		for _, l := range s.links {
			for _, c := range l.tensor.Chunks {
				r.Stored += int64(len(c))
			}
		}
	}
	var appliers []applier
	var of [][]step
	for len(steps) > 0 { // steps of one device are adjacent
		on, n := steps[0].CUDA, 1
		for n < len(steps) && steps[n].CUDA == on {
			n++
		}
		var p applier = &host{steps: steps[:n], workers: workers}
		if on > 0 {
			d, err := cuda.Open(int(on - 1))
			if err != nil {
				return r, err
			}
			p = &gpu{d: d, on: stream.Order{Stream: steps[0].Stream}, steps: steps[:n]}
		}
		appliers, of, steps = append(appliers, p), append(of, steps[:n]), steps[n:]
	}
	stages.End("plan")
	if err := compareBase(ctx, stages, appliers, of, part); err != nil || part == Check {
		return r, err
	}
	err = applyChange(context.WithoutCancel(ctx), stages, appliers, of)
	r.Stages = stages.List()
	return r, err
}

// planSteps pairs targets with the chain and sorts them by device and address. Tied targets become one step.
func planSteps(chain []*File, targets []Target, missing bool) ([]step, error) {
	var steps []step
	names := map[string]bool{}
	for i := range targets {
		g := &targets[i]
		if names[g.Name] {
			return nil, errs.New(errs.ErrArgument, "two target tensors have the name %q", g.Name)
		}
		names[g.Name] = true
		all, err := findLinks(chain, g.Name)
		if err != nil {
			return nil, err
		}
		if len(all) == 0 {
			continue
		}
		t := all[0].tensor
		if t.DType != g.DType || !slices.Equal(t.Shape, g.Shape) {
			return nil, errs.Locate("delta", all[0].file.URI, g.Name, -1,
				errs.New(errs.ErrBase, "the delta is for %v %v, but the tensor is %v %v", t.DType, t.Shape, g.DType,
					g.Shape))
		}
		steps = append(steps, step{Target: g, bytes: t.Bytes, links: all})
	}
	if err := checkComplete(chain, names, missing); err != nil {
		return nil, err
	}
	return untieSteps(steps)
}

// checkComplete refuses a chain with names that have no target, unless missing is set.
func checkComplete(chain []*File, names map[string]bool, missing bool) error {
	var lost []string
	for _, f := range chain {
		for i := range f.Tensors {
			if name := f.Tensors[i].Name; !names[name] && !missing {
				names[name] = true
				lost = append(lost, name)
			}
		}
	}
	if len(lost) > 0 {
		return errs.New(errs.ErrArgument,
			"the delta contains %s, but the given tensors do not (missing=True skips them)", listSome(lost))
	}
	return nil
}

func listSome(names []string) string {
	const most = 3
	quotes := make([]string, 0, most)
	for _, n := range names[:min(most, len(names))] {
		quotes = append(quotes, fmt.Sprintf("%q", n))
	}
	text := strings.Join(quotes, ", ")
	if len(names) > most {
		text += fmt.Sprintf(" and %d more", len(names)-most)
	}
	return text
}

// untieSteps sorts steps, keeps one of each group of steps with the same memory, and refuses memory that partly
// overlaps.
func untieSteps(steps []step) ([]step, error) {
	order := make([]*step, len(steps))
	for i := range steps {
		order[i] = &steps[i]
	}
	slices.SortStableFunc(order, func(a, b *step) int {
		return cmp.Or(cmp.Compare(a.CUDA, b.CUDA), cmp.Compare(a.At, b.At))
	})
	var out []step
	var full *step // the last step with bytes
	for _, s := range order {
		if s.bytes > 0 && full != nil && full.CUDA == s.CUDA && s.At < full.At+uint64(full.bytes) {
			if s.At == full.At && s.bytes == full.bytes && s.first() == full.first() && s.last() == full.last() {
				continue
			}
			return nil, errs.New(errs.ErrArgument,
				"the tensors %q and %q share memory, but the delta changes them differently", full.Name, s.Name)
		}
		out = append(out, *s)
		if s.bytes > 0 {
			full = s
		}
	}
	return out, nil
}

// compareBase compares the tensors with the chain's base and prepares the appliers.
func compareBase(ctx context.Context, stages *Stages, appliers []applier, of [][]step, part Part) error {
	compares := part == Whole || part == Check
	var wrong []string
	uri, count := "", 0
	sums := make([][]digest.Sum, len(appliers))
	err := spawn.Each(ctx, "delta ready", 2*len(appliers), 2*len(appliers), func(n int) (err error) {
		switch p := appliers[n/2]; {
		case n%2 == 0 && compares:
			sums[n/2], err = p.digestSteps(ctx)
		case n%2 != 0 && part != Check:
			err = p.prepareSteps(ctx)
		}
		return err
	})
	if err != nil {
		return err
	}
	for i := range appliers {
		for k, sum := range sums[i] {
			s := &of[i][k]
			if sum == s.first() {
				continue
			}
			wrong, uri = append(wrong, s.Name), cmp.Or(uri, s.links[0].file.URI)
			if sum == s.last() {
				count++
			}
		}
	}
	if len(wrong) > 0 {
		what := "differ from the base of the delta"
		if count == len(wrong) {
			what = "already have the delta applied"
		}
		return errs.In("delta", uri, errs.New(errs.ErrBase, "no tensor was changed: %s %s", listSome(wrong), what))
	}
	stages.End("base digests")
	return nil
}

// applyChange applies the chain, compares the new digests, and undoes the change after an error.
func applyChange(ctx context.Context, stages *Stages, appliers []applier, of [][]step) error {
	for i, p := range appliers {
		if err := p.apply(); err != nil {
			return undoChange(ctx, appliers[:i+1], i, of, err)
		}
	}
	stages.End("change")
	var wrong []string
	uri := ""
	for i, p := range appliers {
		digests, err := p.digestSteps(ctx)
		if err != nil {
			return undoChange(ctx, appliers, len(appliers), of, err)
		}
		for k, sum := range digests {
			if s := &of[i][k]; sum != s.last() {
				wrong, uri = append(wrong, s.Name), cmp.Or(uri, s.links[0].file.URI)
			}
		}
	}
	if len(wrong) > 0 {
		return undoChange(ctx, appliers, len(appliers), of,
			errs.In("delta", uri, errs.New(errs.ErrCorrupt, "wrong digest after the change: %s", listSome(wrong))))
	}
	stages.End("new digests")
	return nil
}

// undoChange undoes the change in the first `again` appliers, and adds to err which state the tensors are in.
func undoChange(ctx context.Context, appliers []applier, again int, of [][]step, err error) error {
	var old, now, lost []string
	for i, p := range appliers {
		var failure error
		if i < again {
			failure = p.apply()
		}
		digests, e := p.digestSteps(ctx)
		if failure != nil || e != nil {
			digests = nil
		}
		for k := range of[i] {
			s := &of[i][k]
			switch {
			case digests != nil && digests[k] == s.first():
				old = append(old, s.Name)
			case digests != nil && digests[k] == s.last():
				now = append(now, s.Name)
			default:
				lost = append(lost, s.Name)
			}
		}
	}
	if len(now) == 0 && len(lost) == 0 {
		return fmt.Errorf("%w (undone: all tensors have their old values)", err)
	}
	sentences := []string{}
	for _, kind := range []struct {
		names []string
		what  string
	}{{old, "old"}, {now, "new"}, {lost, "in an undefined state: load them again"}} {
		if len(kind.names) > 0 {
			sentences = append(sentences, listSome(kind.names)+": "+kind.what)
		}
	}
	return fmt.Errorf("%w (%s)", err, strings.Join(sentences, "; "))
}

func viewsOf(steps []step) []digest.View {
	all := make([]digest.View, len(steps))
	for i := range steps {
		all[i] = digest.Contiguous(steps[i].At, steps[i].bytes)
	}
	return all
}

// host applies steps to tensors in host memory.
type host struct {
	steps   []step
	workers int
}

func (h *host) digestSteps(ctx context.Context) ([]digest.Sum, error) {
	return digest.All(ctx, viewsOf(h.steps), h.workers, nil)
}

func (h *host) prepareSteps(context.Context) error { return nil }

// apply divides the tensors into runs of many chunks and applies the runs concurrently.
func (h *host) apply() error {
	const run = 16 * ChunkBytes
	type task struct {
		s  *step
		at int64
	}
	var tasks []task
	for i := range h.steps {
		for at := int64(0); at < h.steps[i].bytes && h.steps[i].hasChanges(); at += run {
			tasks = append(tasks, task{&h.steps[i], at})
		}
	}
	return spawn.Each(context.Background(), "delta apply", max(1, min(h.workers, runtime.GOMAXPROCS(0))), len(tasks),
		func(n int) error {
			s, from := tasks[n].s, tasks[n].at
			dst := device.Bytes(s.At, s.bytes)
			for _, l := range s.links {
				f, t := l.file, l.tensor
				if len(t.Chunks) == 0 {
					continue
				}
				// A chunk belongs to the run that contains its first byte.
				end := min(int(sizes.CeilDiv(from+run, f.ChunkLen)), len(t.Chunks))
				for k := int(sizes.CeilDiv(from, f.ChunkLen)); k < end; k++ {
					if len(t.Chunks[k]) == 0 {
						continue
					}
					at := int64(k) * f.ChunkLen
					if err := delta.Apply(dst[at:at+int64(f.chunkLength(t, k))], t.Chunks[k],
						widthOf(t.DType)); err != nil {
						return errs.Locate("delta", f.URI, t.Name, int64(k), err)
					}
				}
			}
			return nil
		})
}

// gpu applies deltas to tensors on a GPU. It queues all work on the stream of the first tensor.
type gpu struct {
	d      *cuda.Device
	on     stream.Order
	steps  []step
	chunks [][]stream.DeltaChunk // for each file of the chain
}

func (g *gpu) digestSteps(context.Context) ([]digest.Sum, error) {
	return g.d.Digest(g.on, viewsOf(g.steps), nil)
}

func (g *gpu) prepareSteps(context.Context) error {
	at := map[*File]int{}
	for i := range g.steps {
		for _, l := range g.steps[i].links {
			k, ok := at[l.file]
			if !ok {
				k = len(g.chunks)
				at[l.file] = k
				most := 0
				for i := range l.file.Tensors {
					most += len(l.file.Tensors[i].Chunks)
				}
				g.chunks = append(g.chunks, make([]stream.DeltaChunk, 0, most))
			}
			for n, c := range l.tensor.Chunks {
				if len(c) > 0 {
					g.chunks[k] = append(g.chunks[k], stream.DeltaChunk{Now: g.steps[i].At +
						uint64(n)*uint64(l.file.ChunkLen),
						Bytes: l.file.chunkLength(l.tensor, n), Width: widthOf(l.tensor.DType), Stored: c})
				}
			}
		}
	}
	for _, chunks := range g.chunks {
		if err := g.d.ReserveApply(chunks); err != nil {
			return err
		}
	}
	return nil
}

// apply applies the files in sequence. Their order does not matter, because XOR is commutative.
func (g *gpu) apply() error {
	for i, chunks := range g.chunks {
		if err := g.d.ApplyDelta(g.on, chunks); err != nil {
			for _, chunk := range g.chunks[:i] {
				if g.d.ApplyDelta(g.on, chunk) != nil {
					break
				}
			}
			return err
		}
	}
	return nil
}

// encodeGPU encodes the tensors in list, which are on one GPU.
func encodeGPU(ctx context.Context, f *File, number int, list []int, pair func(i int) *Pair,
	progress func(n int64)) error {
	d, err := cuda.Open(number)
	if err != nil {
		return err
	}
	on := stream.Order{Stream: pair(list[0]).Stream}
	var chunks []stream.DeltaChunk
	views := make([]digest.View, 0, 2*len(list))
	for _, i := range list {
		t, p := &f.Tensors[i], pair(i)
		for k := range t.Chunks {
			at := uint64(k) * uint64(f.ChunkLen)
			chunks = append(chunks, stream.DeltaChunk{Now: p.New + at, Base: p.Base + at, Bytes: f.chunkLength(t, k),
				Width: widthOf(t.DType)})
		}
		views = append(views, digest.Contiguous(p.New, t.Bytes), digest.Contiguous(p.Base, t.Bytes))
	}
	sums, err := d.Digest(on, views, nil)
	if err != nil {
		return err
	}
	if err := d.EncodeDelta(ctx, on, chunks, progress); err != nil {
		return err
	}
	for n, i := range list {
		t := &f.Tensors[i]
		t.New, t.Base = sums[2*n], sums[2*n+1]
		for k := range t.Chunks {
			t.Chunks[k] = chunks[k].Stored
		}
		chunks = chunks[len(t.Chunks):]
	}
	return nil
}
