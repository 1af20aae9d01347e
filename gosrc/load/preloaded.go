package load

// This file serves loads from preloaded tensors.

import (
	"context"
	"slices"
	"sync"
	"time"
	"unsafe"

	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/internal/spawn"
	"github.com/overwire/overwire/gosrc/job"
	"github.com/overwire/overwire/gosrc/plan"
	"github.com/overwire/overwire/gosrc/source"
)

// A Preloaded holds all tensors of a model that is loaded before the program requests it. Loads of other models with
// the same files (see Model.Attach) take tensors from it. Each tensor can be taken once. Loads read the tensors that
// they cannot take from the files. If preloading fails, loads that use it do not fail.
type Preloaded struct {
	model *Model
	l     *Loading // request k is the whole tensor k
	names []map[string]int32

	mu     sync.Mutex
	landed []bool
	over   bool          // no more tensors will land
	wake   chan struct{} // closed and renewed when landed or over changes
	files  []preloadedFile
	left   int  // the number of files that are not gone
	drop   bool // free files that no model uses
}

type preloadedFile struct {
	users int
	taken bool // a load has taken some of its tensors; the last user frees the rest
	gone  bool // its remaining tensors have been freed
}

// NewPreloaded starts to load all tensors of a model, and takes ownership of the model.
func NewPreloaded(m *Model, opt Options) (*Preloaded, error) {
	l, err := m.Start(nil, opt)
	if err != nil {
		return nil, err
	}
	s := &Preloaded{model: m, l: l, names: make([]map[string]int32, len(m.srcs)), landed: make([]bool, l.Len()),
		wake: make(chan struct{}), files: make([]preloadedFile, len(m.srcs)), left: len(m.srcs)}
	for i := range s.names {
		s.names[i] = map[string]int32{}
	}
	for k := range m.ix.Tensors {
		t := &m.ix.Tensors[k]
		s.names[t.Source][t.Name] = int32(k)
	}
	spawn.Go("preloaded", func() {
		for more := true; more; {
			var at []int
			at, more = l.Ready(1<<20, time.Hour)
			s.arrived(at, !more)
		}
	})
	return s, nil
}

// Job returns the job of the preloading load.
func (s *Preloaded) Job() *job.Job { return s.l.Job() }

// Model returns the model that s owns.
func (s *Preloaded) Model() *Model { return s.model }

// Spent reports whether the tensors of all files have been taken or freed.
func (s *Preloaded) Spent() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.left == 0
}

// Whole reports whether all tensors are still available to loads.
func (s *Preloaded) Whole() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return !slices.ContainsFunc(s.files, func(f preloadedFile) bool { return f.taken || f.gone })
}

// Gone reports whether the tensors of a file have been taken or freed.
func (s *Preloaded) Gone(file int) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.files[file].gone
}

// Drop frees each file as soon as no model uses it.
func (s *Preloaded) Drop() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.drop = true
	for i := range s.files {
		s.freeUnwanted(i)
	}
}

func (s *Preloaded) arrived(at []int, over bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, k := range at {
		s.landed[k] = true
		if s.files[s.model.ix.Tensors[k].Source].gone {
			s.freeTensor(k)
		}
	}
	s.over = s.over || over
	close(s.wake)
	s.wake = make(chan struct{})
}

func (s *Preloaded) freeTensor(k int) {
	if mem, _, _, ok := s.l.Take(k); ok {
		mem.Release()
	}
}

// useFile adds n (1 or -1) to a file's users. It returns false if the file's tensors have been freed.
func (s *Preloaded) useFile(file, n int) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	f := &s.files[file]
	if f.gone {
		return false
	}
	f.users += n
	s.freeUnwanted(file)
	return true
}

// freeUnwanted frees a file's tensors if no model can request them anymore. The caller holds mu.
func (s *Preloaded) freeUnwanted(file int) {
	f := &s.files[file]
	if f.gone || f.users > 0 || !f.taken && !s.drop {
		return
	}
	f.gone = true
	for _, k := range s.names[file] {
		if s.landed[k] {
			s.freeTensor(int(k))
		}
	}
	if s.left--; s.left == 0 {
		s.l.Close()
		s.model.Close()
	}
}

// findTensor returns the preloaded tensor that corresponds to a tensor of m.
func (s *Preloaded) findTensor(m *Model, tensor int32, file int) (k int32, ok bool) {
	t := &m.ix.Tensors[tensor]
	if k, ok = s.names[file][t.Name]; !ok {
		return 0, false
	}
	u := &s.model.ix.Tensors[k]
	return k, t.Off == u.Off && t.Bytes == u.Bytes && t.DType == u.DType && t.Count == u.Count &&
		slices.Equal(t.Shape, u.Shape)
}

// claimFile records that a tensor of a file will be taken.
func (s *Preloaded) claimFile(file int) {
	s.mu.Lock()
	s.files[file].taken = true
	s.mu.Unlock()
}

// takeTensor waits for a tensor and returns its memory. ok is false if it was taken
// before, if preloading failed, or if ctx has ended.
func (s *Preloaded) takeTensor(ctx context.Context, k int32) (mem device.Memory, ok bool) {
	for {
		s.mu.Lock()
		landed, over, wake := s.landed[k], s.over, s.wake
		s.mu.Unlock()
		if landed {
			mem, _, _, ok = s.l.Take(int(k))
			return mem, ok
		}
		if over {
			return mem, false
		}
		select {
		case <-wake:
		case <-ctx.Done():
			return mem, false
		}
	}
}

// An attached is the preloaded file that corresponds to a file of the model.
type attached struct {
	preloaded *Preloaded
	file      int
	id        source.Identity // the file's identity when preloading began
}

// Mapped reports whether plain tensors of the preloaded file are mapped.
func (s *Preloaded) Mapped(file int) bool {
	return slices.ContainsFunc(s.l.wants, func(w plan.Want) bool {
		return int(s.model.ix.Tensors[w.Tensor].Source) == file && s.l.files.mapped[w.Tensor]
	})
}

// A due is a request that a preloaded tensor serves.
type due struct {
	at   int // request
	from attached
	k    int32
	// reread means that the preloaded tensor is in a mapping but the request has a destination. A mapping is never
	// copied, because reading the mapping of a truncated file kills the process. Instead, the tensor is read again and
	// the preloaded tensor is freed.
	reread bool
}

// servedByPreloaded returns the requests that preloaded tensors serve, or nil if there are none.
func servedByPreloaded(m *Model, reqs []Request, wants []plan.Want, tgt Target, opt Options) []*due {
	m.mu.Lock()
	sources := slices.Clone(m.preloaded) // Attach may run at the same time
	m.mu.Unlock()
	if sources == nil || opt.Cast != "" {
		return nil
	}
	var all []*due
	same := make([]int8, len(sources)) // indexed by file: 1 if unchanged since Attach, -1 if changed, 0 if not checked
	for i, r := range reqs {
		if r.Dest == BindLater {
			return nil
		}
		n := m.ix.Tensors[wants[i].Tensor].Source
		from := sources[n]
		if from.preloaded != nil && same[n] == 0 {
			if same[n] = 1; !m.srcs[n].Facts().Unchanged(from.id) {
				same[n] = -1
				from.preloaded.Drop()
			}
		}
		if same[n] < 0 {
			continue
		}
		whole := r.Lo0 == 0 && r.Hi0 == plan.Whole && r.Lo1 == 0 && r.Hi1 == plan.Whole
		if from.preloaded == nil || !whole || from.preloaded.l.target != tgt || r.Dest != 0 && tgt.GPU != nil {
			continue
		}
		k, ok := from.preloaded.findTensor(m, wants[i].Tensor, from.file)
		if !ok {
			continue
		}
		all = append(all, &due{at: i, from: from, k: k, reread: r.Dest != 0 && from.preloaded.l.files.mapped[k]})
	}
	for _, d := range all {
		d.from.preloaded.claimFile(d.from.file)
	}
	// Take tensors in the order in which they were preloaded.
	slices.SortStableFunc(all, func(a, b *due) int { return int(a.k) - int(b.k) })
	return all
}

// startFromPreloaded starts a load with some requests served by preloaded tensors. A separate load reads the other
// requests. A third load reads preloaded tensors that turn out to be unavailable.
func startFromPreloaded(m *Model, reqs []Request, wants []plan.Want, tgt Target, opt Options,
	all []*due) (*Loading, error) {
	if err := m.Hold(); err != nil {
		return nil, err
	}
	l := newLoading(m, tgt, wants)
	all = slices.DeleteFunc(all, func(d *due) bool { return d.reread })
	given := make([]bool, len(reqs))
	for _, d := range all {
		given[d.at] = true
	}
	var rest []int
	for i := range reqs {
		if !given[i] {
			rest = append(rest, i)
		}
	}
	var other *Loading
	if len(rest) > 0 {
		var err error
		if other, err = m.startRequests(pickSome(reqs, rest), pickSome(wants, rest), tgt, opt); err != nil {
			m.Drop()
			return nil, err
		}
	}
	l.job.Go(func(ctx context.Context, j *job.Job) error {
		defer l.afterWorkers()
		start := time.Now()
		rep := Report{Tensors: int64(len(reqs))}
		for i := range wants {
			rep.Bytes += wants[i].Bytes
		}
		j.TotalBytes.Store(rep.Bytes)
		j.TotalTensors.Store(rep.Tensors)
		ended := make(chan error, 1)
		spawn.Go("load rest", func() {
			ended <- spawn.Guard("load rest", func() error { return forwardLanded(ctx, l, other, rest, &rep) })
		})
		missing := takePreloaded(ctx, l, reqs, all, &rep)
		err := <-ended
		if err == nil && ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		if err == nil && len(missing) > 0 {
			var more *Loading
			if more, err = m.startRequests(pickSome(reqs, missing), pickSome(wants, missing), tgt, opt); err == nil {
				err = forwardLanded(ctx, l, more, missing, &rep)
			}
		}
		rep.Seconds = time.Since(start).Seconds()
		j.SetReport(rep)
		return err
	})
	return l, nil
}

func pickSome[T any](all []T, at []int) []T {
	some := make([]T, len(at))
	for i, k := range at {
		some[i] = all[k]
	}
	return some
}

// takePreloaded takes the preloaded tensors, and returns the requests that they could not serve.
func takePreloaded(ctx context.Context, l *Loading, reqs []Request, all []*due, rep *Report) (missing []int) {
	var mapped int64
	for _, d := range all {
		mem, ok := d.from.preloaded.takeTensor(ctx, d.k)
		switch {
		case !ok:
			missing = append(missing, d.at)
			continue
		case reqs[d.at].Dest != 0:
			copy(unsafe.Slice((*byte)(device.Pointer(reqs[d.at].Dest)), mem.Bytes), mem.Slice())
			mem.Release()
			mem = device.Memory{}
		case d.from.preloaded.l.files.mapped[d.k]:
			mapped += mem.Bytes
		}
		l.landForeign(d.at, mem)
	}
	l.out.mu.Lock()
	rep.Mapped += mapped
	l.out.mu.Unlock()
	slices.Sort(missing)
	return missing
}

// forwardLanded forwards the requests that another load of the model lands to l. at maps request numbers of that load
// to those of l. It returns when the other load has ended. from may be nil.
func forwardLanded(ctx context.Context, l, from *Loading, at []int, rep *Report) error {
	if from == nil {
		return nil
	}
	defer from.Close()
	defer context.AfterFunc(ctx, from.job.Cancel)()
	for more := true; more; {
		var landed []int
		landed, more = from.Ready(1<<20, time.Hour)
		for _, i := range landed {
			mem, _, _, _ := from.Take(i)
			l.landForeign(at[i], mem)
		}
	}
	if err := from.job.Err(); err != nil {
		return err
	}
	if r, ok := from.job.Value().(Report); ok {
		l.out.mu.Lock()
		rep.Mapped, rep.DirectIO, rep.GDS = rep.Mapped+r.Mapped, rep.DirectIO+r.DirectIO, rep.GDS+r.GDS
		rep.NoGDS, rep.Stages, rep.Trace = r.NoGDS, r.Stages, r.Trace
		l.out.mu.Unlock()
	}
	return nil
}
