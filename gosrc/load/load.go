package load

// This file runs a load of tensors and slices, and gives out what has landed.

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/device/cpu"
	"github.com/overwire/overwire/gosrc/device/cuda/queue"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/job"
	"github.com/overwire/overwire/gosrc/knob"
	"github.com/overwire/overwire/gosrc/pipeline"
	"github.com/overwire/overwire/gosrc/plan"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/tensor"
)

// A Request asks for one tensor or a slice of it; see plan.Request.
type Request = plan.Request

// Options of one load. The zero value is the best default.
type Options struct {
	Device string `json:"device"` // "" or "cpu", "cuda", "cuda:1"
	Stream uint64 `json:"stream"` // CUDA: the caller's, whose queued work precedes the load; 0: none
	// CUDA: the dtype that floats become as they land, where there is a kernel for it; "": none
	Cast    string `json:"cast"`
	Threads int    `json:"threads"`  // 0: one per core
	InPlace bool   `json:"coherent"` // tests only: a GPU reads slots as over a coherent link
	Read    string `json:"read"`     // a value of OVERWIRE_READ; "": the setting's own
	Trace   string `json:"trace"`    // path for a Chrome trace; "": the setting's own

	// After is a load that this one follows: it reads nothing before that one has
	// submitted everything to its GPU, or has ended, however it ends. nil: none.
	After *Loading `json:"-"`
}

// A Report says what a load did and what it cost.
type Report struct {
	Bytes   int64 `json:"bytes"` // of tensors
	Tensors int64 `json:"tensors"`
	Mapped  int64 `json:"mapped"` // bytes that are mapped, not read
	// DirectIO is the bytes read by direct I/O (O_DIRECT), GDS those read by
	// GPUDirect Storage.
	DirectIO int64 `json:"direct"`
	GDS      int64 `json:"gds"`
	// NoGDS says why files were not read by GPUDirect Storage although it was asked
	// for; else "".
	NoGDS   string          `json:"no_gds,omitempty"`
	Seconds float64         `json:"seconds"`
	Stages  pipeline.Stages `json:"stages"`
	// Trace summarizes the trace, if one was asked for.
	Trace *pipeline.Summary `json:"trace,omitempty"`
}

// A Loading is a load that runs or has ended. Tensors can be taken as soon as
// they are ready. It is safe for concurrent use.
type Loading struct {
	job     *job.Job
	model   *Model
	target  Target
	wants   []plan.Want
	casts   []device.Cast // by request; nil: none
	machine plan.Machine
	queue   *queue.Queue // nil: the host, not there yet, or the following load's; mu guards it while the job runs
	mapped  []bool       // by request: it lies in a mapped file
	copies  []run        // requests that the job copies out of their files, before all else

	// Of requests whose destination becomes known during the load; nil: none.
	dests   *destinations
	later   []int64 // by request: bytes that provide allocates for it
	settles []bool  // by request: the caller settles it

	arrived *job.Landings

	submitted chan struct{} // closed when the load that follows may take the queue

	mu    sync.Mutex
	mem   []device.Memory // by request; zero once taken
	taken []bool
	over  bool // the job has ended: nothing writes to the memory
	shut  bool // Close was called: nothing is exported any more
}

// Start checks the requests, allocates their memory and begins to load; nil asks
// for every tensor. Destinations named by a request must stay valid until the job
// has ended.
func (m *Model) Start(reqs []Request, opt Options) (*Loading, error) {
	if reqs == nil {
		reqs = make([]Request, len(m.ix.Tensors))
		for i := range reqs {
			reqs[i] = Request{Tensor: int64(i), Hi0: plan.Whole, Hi1: plan.Whole}
		}
	}
	wants, err := plan.Check(m.ix, reqs)
	if err != nil {
		return nil, err
	}
	tgt, err := TargetOf(opt.Device)
	if err != nil {
		return nil, m.PlaceError("open", err)
	}
	tgt.inPlace = opt.InPlace
	if err := knob.Read.Check(opt.Read); err != nil {
		return nil, errs.New(errs.ErrArgument, "read %q: %v", opt.Read, err)
	}
	if all := m.servedByStocks(reqs, wants, tgt, opt); all != nil {
		return m.fromStocks(reqs, wants, tgt, opt, all)
	}
	return m.startRequests(reqs, wants, tgt, opt)
}

func newLoading(m *Model, tgt Target, wants []plan.Want) *Loading {
	return &Loading{target: tgt, job: job.New("load"), model: m, wants: wants, mem: make([]device.Memory, len(wants)),
		taken:   make([]bool, len(wants)),
		arrived: job.NewLandings(len(wants)), submitted: make(chan struct{})}
}

// startRequests is Start without the requests that a stock serves.
func (m *Model) startRequests(reqs []Request, wants []plan.Want, tgt Target, opt Options) (_ *Loading, err error) {
	if err := m.Hold(); err != nil {
		return nil, err
	}
	l := newLoading(m, tgt, wants)
	defer func() {
		if err != nil {
			cpu.Release(l.mem)
			m.Drop()
		}
	}()
	if l.casts, err = castsOf(m.ix, wants, tgt, opt.Cast); err != nil {
		return nil, err
	}
	if err = l.allocateRequests(reqs); err != nil {
		return nil, err
	}
	// Allocate here and not in the job: a caller that is out of memory may be able
	// to free some and try again.
	l.machine = m.Machine(tgt.GPU != nil, opt.Threads, true)
	if opt.After == nil && !l.settlesMeanwhile() {
		if l.queue, err = tgt.Queue(0, l.machine); err != nil {
			return nil, m.PlaceError("stage", err)
		}
	}
	begin := l.job.Go
	if opt.After == nil && l.isShort() {
		begin = l.job.RunHere
	}
	begin(func(ctx context.Context, j *job.Job) error {
		defer l.afterWorkers()
		return l.runLoad(ctx, j, reqs, opt)
	})
	return l, nil
}

// allocateRequests gives every request without a destination its memory: a view of a mapped
// file where that is possible, fresh memory otherwise.
func (l *Loading) allocateRequests(reqs []Request) error {
	ix := l.model.ix
	l.mapped = make([]bool, len(reqs))
	sizes := make([]int64, len(reqs))
	maps := l.model.mapped()
	inFile := make([][]run, len(ix.Sources))
	for i := range reqs {
		if reqs[i].Dest != 0 || l.wants[i].Bytes == 0 {
			continue
		}
		if l.target.GPU == nil && l.model.inFile(&l.wants[i], maps) {
			s := ix.Tensors[l.wants[i].Data].Source
			off, _ := l.wants[i].SourceRange(ix)
			inFile[s] = append(inFile[s], run{i, off, l.wants[i].Bytes})
			continue
		}
		sizes[i] = l.landingBytes(i)
	}
	if err := l.noteWaiting(reqs); err != nil {
		return err
	}
	for s, runs := range inFile {
		if len(runs) == 0 {
			continue
		}
		copies, err := l.mapFile(s, runs)
		if err != nil {
			return err
		}
		for _, r := range copies {
			sizes[r.request] = r.n
		}
		if totalBytes(copies) < little { // else as what is not mapped
			l.copies = append(l.copies, copies...)
		}
	}
	if isPostponed(l.target.GPU, sizes) {
		l.later = sizes
		if l.dests == nil {
			l.dests = newDestinations(len(reqs))
		}
		return nil
	}
	mem, err := l.target.allocateFor(sizes)
	if err != nil {
		return l.model.PlaceError("land", err)
	}
	for i := range mem {
		if sizes[i] > 0 {
			l.mem[i] = mem[i]
		}
	}
	return nil
}

// isShort reports whether the caller reads what it asks for: it has the work of one worker, and no file
// lies where a read may take long, which must not keep the caller from being interrupted. Slices count as
// the tensors that have them, but for those that are contiguous in a plain file: a column of a tensor may
// take all of its bytes, and a row a whole chunk.
func (l *Loading) isShort() bool {
	if l.target.GPU != nil {
		return false
	}
	ix, total := l.model.held, int64(0) // as it is stored: what ix presents as plain may be chunks
	for i := range l.wants {
		n := l.wants[i].Bytes
		if _, isContiguous := l.wants[i].SourceRange(ix); !isContiguous && n > 0 {
			n = ix.Tensors[l.wants[i].Data].Bytes
		}
		if total += n; total > plan.StepPiece {
			return false
		}
	}
	return !slices.ContainsFunc(l.model.srcs, func(s source.Source) bool {
		f := s.Facts()
		return f.View == nil && (f.File == nil || !f.Quick)
	})
}

// noteWaiting notes the requests whose destination the caller settles later.
func (l *Loading) noteWaiting(reqs []Request) error {
	for i := range reqs {
		if reqs[i].Dest != SettleLater || l.wants[i].Bytes == 0 {
			continue
		}
		if l.target.GPU == nil {
			return errs.New(errs.ErrArgument, "request %d: a destination on the host must be known when a load begins",
				i)
		}
		if l.settles == nil {
			l.settles, l.dests = make([]bool, len(reqs)), newDestinations(len(reqs))
		}
		l.settles[i] = true
	}
	return nil
}

func (l *Loading) landRequest(i int32) {
	l.job.Tensors.Add(1)
	l.arrived.Add(int(i))
}

// afterWorkers runs after the last worker: nothing writes to the memory any more.
func (l *Loading) afterWorkers() {
	l.mu.Lock()
	l.over = true // no one may use the queue after this
	if l.shut {
		cpu.Release(l.mem)
	}
	l.mu.Unlock()
	if queue := l.giveQueue(); queue != nil {
		queue.Close()
	}
	l.model.Drop()
}

// Job is the load's job.
func (l *Loading) Job() *job.Job { return l.job }

// Len is the number of requests.
func (l *Loading) Len() int { return len(l.wants) }

// Ready returns the requests that have landed since the last call, in order of
// arrival, at most limit of them; it waits up to d for the first. more is false
// when the load has ended and everything was returned.
func (l *Loading) Ready(limit int, d time.Duration) (reqs []int, more bool) {
	return l.arrived.Next(l.job.Done(), limit, d)
}

// Take passes the memory of a request, with its shape and dtype, to the caller, who
// owns it from then on. ok is false if the request has not landed, was taken
// before, or had a destination of its own.
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

// AwaitEnd waits for the end of the load, which the end of ctx cancels.
func (l *Loading) AwaitEnd(ctx context.Context) error {
	defer context.AfterFunc(ctx, l.job.Cancel)()
	<-l.job.Done()
	if err := l.job.Err(); err == nil || ctx.Err() == nil {
		return err
	}
	return errs.Cause(ctx)
}

// LoadWhole loads whole tensors, by their numbers, nil: all, and returns the memory of each, which is
// the caller's to release.
func (m *Model) LoadWhole(ctx context.Context, tensors []int, opt Options) ([]device.Memory, error) {
	var reqs []Request
	for _, i := range tensors {
		reqs = append(reqs, Request{Tensor: int64(i), Hi0: plan.Whole, Hi1: plan.Whole})
	}
	l, err := m.Start(reqs, opt)
	if err != nil {
		return nil, err
	}
	defer l.Close()
	if err := l.AwaitEnd(ctx); err != nil {
		return nil, err
	}
	mem := make([]device.Memory, l.Len())
	for k := range mem {
		var ok bool
		if mem[k], _, _, ok = l.Take(k); !ok {
			cpu.Release(mem)
			return nil, errs.New(errs.ErrEngine, "request %d of %d did not land", k, l.Len())
		}
	}
	return mem, nil
}

// Close cancels a running load, and frees what was not taken as soon as nothing
// writes to it. It does not wait.
func (l *Loading) Close() {
	l.job.Cancel()
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.shut && l.over {
		cpu.Release(l.mem)
	}
	l.shut = true
}
