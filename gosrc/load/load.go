package load

import (
	"context"
	"runtime"
	"sync"
	"time"
	"unsafe"

	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/device/cpu"
	"github.com/overwire/overwire/gosrc/fault"
	"github.com/overwire/overwire/gosrc/internal/spawn"
	"github.com/overwire/overwire/gosrc/job"
	"github.com/overwire/overwire/gosrc/knob"
	"github.com/overwire/overwire/gosrc/pipeline"
	"github.com/overwire/overwire/gosrc/plan"
	"github.com/overwire/overwire/gosrc/tensor"
)

// A Request asks for one tensor or a slice of it; see plan.Request.
type Request = plan.Request

// Options of one load. The zero value is the best default.
type Options struct {
	Device  string `json:"device"`   // "" or "cpu", "cuda", "cuda:1"
	Stream  uint64 `json:"stream"`   // CUDA: the caller's, whose queued work precedes the load; 0: none
	Cast    string `json:"cast"`     // CUDA: a dtype that floats become as they land, where there is a kernel; "": none
	Threads int    `json:"threads"`  // 0: one a core
	NoCheck bool   `json:"no_check"` // benchmarks only: no checksums
}

// A Report is what a load cost.
type Report struct {
	Bytes   int64           `json:"bytes"` // of tensors
	Tensors int64           `json:"tensors"`
	Mapped  int64           `json:"mapped"` // bytes that are mapped, not read
	Seconds float64         `json:"seconds"`
	Stages  pipeline.Stages `json:"stages"`
}

// A Loading is a load that runs or has ended. Tensors can be taken as soon as
// they are ready. It is safe for concurrent use.
type Loading struct {
	job    *job.Job
	model  *Model
	target target
	wants  []plan.Want
	casts  []device.Cast // by request; nil: none

	mu     sync.Mutex
	mem    []device.Memory // by request; zero once taken
	taken  []bool
	ready  []int         // landed, not yet given out by Ready
	wake   chan struct{} // closed and renewed when ready grows and someone is asleep
	asleep bool          // Ready waits on wake
	over   bool          // the job has ended: the memory is at rest
	shut   bool          // Close was called: nothing is given out any more
}

// whole asks for every tensor of the model.
func (m *Model) whole() []Request {
	reqs := make([]Request, len(m.ix.Tensors))
	for i := range reqs {
		reqs[i] = Request{Tensor: int64(i), Hi0: plan.Whole, Hi1: plan.Whole}
	}
	return reqs
}

// Start checks the requests, allocates what they need and begins to load; nil
// asks for every tensor. Destinations that a request names must stay valid
// until the job has ended.
func (m *Model) Start(reqs []Request, opt Options) (*Loading, error) {
	if reqs == nil {
		reqs = m.whole()
	}
	wants, err := plan.Check(m.ix, reqs)
	if err != nil {
		return nil, err
	}
	tgt, err := targetOf(opt.Device)
	if err != nil {
		return nil, m.where("open", err)
	}
	if err := m.hold(); err != nil {
		return nil, err
	}
	l := &Loading{target: tgt, job: job.New("load"), model: m, wants: wants, mem: make([]device.Memory, len(wants)), taken: make([]bool, len(wants)), wake: make(chan struct{})}
	if l.casts, err = castsOf(m.ix, wants, tgt, opt.Cast); err != nil {
		m.drop()
		return nil, err
	}
	mapped, err := l.allocate(reqs)
	if err != nil {
		cpu.Release(l.mem)
		m.drop()
		return nil, err
	}
	l.job.Go(func(ctx context.Context, j *job.Job) error {
		defer l.ended()
		return l.run(ctx, j, reqs, mapped, opt)
	})
	return l, nil
}

// allocate gives every request without a destination its memory: a part of a
// mapped file where that is possible, fresh memory otherwise. It returns which
// requests are mapped.
func (l *Loading) allocate(reqs []Request) ([]bool, error) {
	ix := l.model.ix
	mapped := make([]bool, len(reqs))
	sizes := make([]int64, len(reqs))
	holders := make([]int64, len(ix.Sources))
	for i := range reqs {
		if reqs[i].Dest != 0 || l.wants[i].Bytes == 0 {
			continue
		}
		t := &ix.Tensors[l.wants[i].Data]
		off, row := l.wants[i].Run(ix)
		if _, local := l.model.srcs[t.Source].(mappable); local && l.target.gpu == nil && l.model.mapp && row && !ix.Sources[t.Source].Overwire && off%int64(t.DType.Align()) == 0 {
			mapped[i] = true
			holders[t.Source]++
			continue
		}
		sizes[i] = l.landing(i)
	}
	mem, err := l.target.alloc(sizes)
	if err != nil {
		return nil, l.model.where("land", err)
	}
	copy(l.mem, mem)
	for s, n := range holders {
		if n == 0 {
			continue
		}
		base, block, err := l.mapSource(s, n)
		if err != nil {
			return nil, err
		}
		for i := range reqs {
			if t := &ix.Tensors[l.wants[i].Data]; mapped[i] && int(t.Source) == s {
				off, _ := l.wants[i].Run(ix)
				l.mem[i] = device.Memory{Ptr: unsafe.Add(base, off), Bytes: l.wants[i].Bytes, Block: block}
			}
		}
	}
	return mapped, nil
}

// A mappable source is a local file.
type mappable interface {
	WithFD(fn func(fd int) error) error
}

func (l *Loading) mapSource(s int, holders int64) (base unsafe.Pointer, block *device.Block, err error) {
	src := l.model.srcs[s]
	err = src.(mappable).WithFD(func(fd int) (err error) {
		base, block, err = cpu.MapFile(fd, src.Size(), holders)
		return err
	})
	if err != nil {
		err = &fault.At{Verb: "map", Source: src.URI(), Chunk: -1, Offset: -1, Err: err}
	}
	return base, block, err
}

// run is the job: it populates what is mapped and runs the pipeline for the
// rest.
func (l *Loading) run(ctx context.Context, j *job.Job, reqs []Request, mapped []bool, opt Options) error {
	start := time.Now()
	dest := make([]unsafe.Pointer, len(reqs))
	var total, mappedBytes int64
	var maps []int
	for i := range reqs {
		total += l.wants[i].Bytes
		switch {
		case mapped[i]:
			maps = append(maps, i)
			mappedBytes += l.wants[i].Bytes
		case reqs[i].Dest != 0:
			dest[i] = l.destination(reqs[i].Dest)
		default:
			dest[i] = l.mem[i].Ptr
		}
	}
	j.TotalBytes.Store(total)
	j.TotalTensors.Store(int64(len(reqs)))
	threads := opt.Threads
	if threads <= 0 {
		threads = knob.Threads.Get()
	}
	if threads <= 0 {
		threads = max(runtime.GOMAXPROCS(0), l.target.readers())
	}
	p := plan.Make(l.model.ix, l.wants, dest, l.target.limits())
	late, err := l.plantCasts(p, dest)
	if err != nil {
		return err
	}
	defer late.free()
	for i, n := range p.Left {
		if n == 0 && !mapped[i] {
			l.land(int32(i))
		}
	}
	l.prefault(maps)
	for _, i := range maps {
		j.Bytes.Add(l.mem[i].Bytes)
		l.land(int32(i))
	}
	if pin := l.model.pin; pin != nil && l.target.gpu != nil {
		if err := l.model.register(pin, l.target.gpu); err != nil {
			return err
		}
	}
	lane, err := l.target.lane(p.Slot)
	if err != nil {
		return l.model.where("stage", err)
	}
	if lane != nil {
		defer lane.Close()
		if opt.Stream != 0 {
			if err := lane.(gpuLane).WaitFor(uintptr(opt.Stream)); err != nil {
				return l.model.where("stage", err)
			}
		}
	}
	var trace *pipeline.Trace
	traceFile := knob.Trace.Get()
	if traceFile != "" {
		trace = pipeline.NewTrace()
	}
	st, err := pipeline.Run(ctx, &pipeline.Task{
		Index: l.model.ix, Sources: l.model.srcs, Wants: l.wants, Plan: p, Lane: lane, Workers: threads, NoCheck: opt.NoCheck, Trace: trace,
		Landed: late.or(l.land), Progress: func(n int64) { j.Bytes.Add(n) },
	})
	if err == nil {
		err = late.cast(ctx, lane, l.land)
	}
	seconds := time.Since(start).Seconds()
	j.SetReport(Report{Bytes: total, Tensors: int64(len(reqs)), Mapped: mappedBytes, Seconds: seconds, Stages: st})
	if trace != nil && err == nil {
		err = trace.WriteFile(traceFile)
	}
	return err
}

// destination turns an address from the caller into a pointer. The memory is
// the caller's, outside Go's heap.
func (l *Loading) destination(addr uintptr) unsafe.Pointer {
	return *(*unsafe.Pointer)(unsafe.Pointer(&addr))
}

// prefault brings the pages of mapped tensors in while their owner is already
// at work: the job does not wait for it. Neighbours in one mapping go with one
// call. What it works on is held until it is done.
func (l *Loading) prefault(maps []int) {
	const step = 32 << 20
	runs := make([]device.Memory, 0, len(maps))
	for _, i := range maps {
		m := l.mem[i]
		if k := len(runs) - 1; k >= 0 {
			r := &runs[k]
			at := int64(uintptr(m.Ptr)) - int64(uintptr(r.Ptr))
			if r.Block == m.Block && at >= 0 && at <= r.Bytes+step && at+m.Bytes <= step {
				r.Bytes = max(r.Bytes, at+m.Bytes)
				continue
			}
		}
		m.Block.Hold()
		runs = append(runs, m)
	}
	if len(runs) == 0 {
		return
	}
	spawn.Go("prefault", func() {
		for _, r := range runs {
			for at := int64(0); at < r.Bytes; at += step {
				// An error here shows when the page is touched, as it does in
				// any mapped file.
				_ = cpu.Populate(unsafe.Add(r.Ptr, at), min(step, r.Bytes-at))
			}
			r.Release()
		}
	})
}

// land marks a request as ready.
func (l *Loading) land(i int32) {
	l.job.Tensors.Add(1)
	l.mu.Lock()
	l.ready = append(l.ready, int(i))
	if l.asleep {
		close(l.wake)
		l.wake, l.asleep = make(chan struct{}), false
	}
	l.mu.Unlock()
}

// ended runs when the last worker has gone: nothing writes to the memory any
// more.
func (l *Loading) ended() {
	l.model.drop()
	l.mu.Lock()
	defer l.mu.Unlock()
	l.over = true
	if l.shut {
		cpu.Release(l.mem)
	}
}

// Job is the load as a job.
func (l *Loading) Job() *job.Job { return l.job }

// Len is the number of requests.
func (l *Loading) Len() int { return len(l.wants) }

// Ready returns the requests that have landed since the last call, in order of
// arrival, at most limit of them; it waits up to d for the first. more is
// false when the load has ended and everything was given out.
func (l *Loading) Ready(limit int, d time.Duration) (reqs []int, more bool) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	for {
		l.mu.Lock()
		n := min(limit, len(l.ready))
		reqs = append(reqs, l.ready[:n]...)
		l.ready = l.ready[n:]
		left, wake := len(l.ready), l.wake
		l.asleep = l.asleep || n == 0
		l.mu.Unlock()
		select {
		case <-l.job.Done():
			if n > 0 || left > 0 {
				return reqs, true
			}
			l.mu.Lock()
			left = len(l.ready)
			l.mu.Unlock()
			return nil, left > 0
		default:
		}
		if n > 0 {
			return reqs, true
		}
		select {
		case <-wake:
		case <-l.job.Done():
		case <-timer.C:
			return nil, true
		}
	}
}

// Take gives the memory, shape and dtype of a request to the caller, who owns
// it from now on. It is for requests that have landed; one that has not, or
// was taken, or had a destination of its own, gives ok false.
func (l *Loading) Take(i int) (mem device.Memory, shape []int64, dtype tensor.DType, ok bool) {
	if i < 0 || i >= len(l.wants) {
		return mem, nil, 0, false
	}
	w := &l.wants[i]
	dtype = l.model.ix.Tensors[w.Tensor].DType
	if l.casts != nil && l.casts[i].To != 0 {
		dtype = l.casts[i].To
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.taken[i] || l.shut || (w.Bytes > 0 && l.mem[i].Block == nil) {
		return mem, w.Shape, dtype, false
	}
	l.taken[i] = true
	mem, l.mem[i] = l.mem[i], device.Memory{}
	return mem, w.Shape, dtype, true
}

// Close cancels the load if it runs, and frees what was not taken as soon as
// nothing writes to it any more. It does not wait.
func (l *Loading) Close() {
	l.job.Cancel()
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.shut && l.over {
		cpu.Release(l.mem)
	}
	l.shut = true
}
