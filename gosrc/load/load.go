package load

// This file defines loads of tensors and slices, and collects the landed requests.

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/device/cpu"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/job"
	"github.com/overwire/overwire/gosrc/pipeline"
	"github.com/overwire/overwire/gosrc/plan"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/tensor"
)

// A Request asks for one tensor or a slice of it; see plan.Request.
type Request = plan.Request

// Options are the options of one load. The zero value is the best default.
type Options struct {
	Device string `json:"device"` // "" or "cpu", "cuda", "cuda:1"
	Stream uint64 `json:"stream"` // CUDA: a stream of the caller; the load waits for its queued work; 0 means none
	// CUDA: the dtype that floats are cast to as they land, if there is a kernel for the cast; "" means none
	Cast    string `json:"cast"`
	Threads int    `json:"threads"`  // 0 means one per core
	InPlace bool   `json:"coherent"` // tests only: a GPU reads slots as it would over a coherent link
	Read    string `json:"read"`     // a value of OVERWIRE_READ; "" uses the setting
	Trace   string `json:"trace"`    // path for a Chrome trace; "" uses the setting OVERWIRE_TRACE

	// After is an earlier load, or nil. This load reads nothing until the earlier load has submitted everything to its
	// GPU or has ended, successfully or not.
	After *Loading `json:"-"`
}

// A Report describes what a load did and what it cost.
type Report struct {
	Bytes   int64 `json:"bytes"` // of tensors
	Tensors int64 `json:"tensors"`
	Mapped  int64 `json:"mapped"` // bytes that were mapped, not read
	// DirectIO counts bytes read with direct I/O (O_DIRECT). GDS counts bytes read with GPUDirect Storage.
	DirectIO int64 `json:"direct"`
	GDS      int64 `json:"gds"`
	// NoGDS explains why files were not read with GPUDirect Storage although it was requested; otherwise it is "".
	NoGDS   string          `json:"no_gds,omitempty"`
	Seconds float64         `json:"seconds"`
	Stages  pipeline.Stages `json:"stages"`
	// Trace summarizes the trace, if one was requested.
	Trace *pipeline.Summary `json:"trace,omitempty"`
}

// A Loading is a running or finished load. Each tensor can be taken as soon as it has landed. A Loading is safe for
// concurrent use.
type Loading struct {
	job     *job.Job
	model   *Model
	target  Target
	wants   []plan.Want
	casts   []device.Cast // indexed by request; nil means none
	machine plan.Machine
	queue   queueHandoff
	files   fileViews
	dests   *destinations // nil if all destinations are known before the load
	arrived *job.Landings
	out     results
}

// results holds the memory of the requests.
type results struct {
	mu    sync.Mutex
	mem   []device.Memory // indexed by request; zero once taken
	taken []bool
	over  bool // the job has ended; nothing writes to the memory anymore
	shut  bool // Close was called; Take returns nothing anymore
}

func newLoading(m *Model, tgt Target, wants []plan.Want) *Loading {
	return &Loading{target: tgt, job: job.New("load"), model: m, wants: wants,
		queue: queueHandoff{submitted: make(chan struct{})}, arrived: job.NewLandings(len(wants)),
		files: fileViews{mapped: make([]bool, len(wants))},
		out:   results{mem: make([]device.Memory, len(wants)), taken: make([]bool, len(wants))}}
}

// allocateRequests gives every request without a destination its memory: a view of a mapped file if possible,
// otherwise new memory.
func (l *Loading) allocateRequests(reqs []Request) error {
	ix := l.model.ix
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
		copies, err := l.files.mapFile(l.model, s, runs, l.out.mem)
		if err != nil {
			return err
		}
		for _, r := range copies {
			sizes[r.request] = r.n
		}
		if totalBytes(copies) < little { // larger copies are read by the pipeline
			l.files.copies = append(l.files.copies, copies...)
		}
	}
	if isPostponed(l.target.GPU, sizes) {
		if l.dests == nil {
			l.dests = newDestinations(len(reqs))
		}
		l.dests.later = sizes
		return nil
	}
	mem, err := l.target.allocateFor(sizes)
	if err != nil {
		return l.model.LocateError("land", err)
	}
	for i := range mem {
		if sizes[i] > 0 {
			l.out.mem[i] = mem[i]
		}
	}
	return nil
}

// isShort reports whether the load runs on the calling thread. The load must be small enough for one worker, and all
// files must be quick to read, because the caller cannot be interrupted during a read. A slice counts as its whole
// tensor unless it is contiguous in a plain file: a column may need all bytes of its tensor, and a row may need a
// whole chunk.
func (l *Loading) isShort() bool {
	if l.target.GPU != nil {
		return false
	}
	ix, total := l.model.held, int64(0) // as stored: m.ix shows some tensors as plain that are stored in chunks
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

// noteWaiting records the requests with destinations that the caller binds later.
func (l *Loading) noteWaiting(reqs []Request) error {
	for i := range reqs {
		if reqs[i].Dest != BindLater || l.wants[i].Bytes == 0 {
			continue
		}
		if l.target.GPU == nil {
			return errs.New(errs.ErrArgument, "request %d: a destination on the host must be known when a load begins",
				i)
		}
		if l.dests == nil {
			l.dests = newDestinations(len(reqs))
			l.dests.bound = make([]bool, len(reqs))
		}
		l.dests.bound[i] = true
	}
	return nil
}

// landForeign lands a request in memory that another load has filled.
func (l *Loading) landForeign(i int, mem device.Memory) {
	l.out.mu.Lock()
	l.out.mem[i] = mem
	l.out.mu.Unlock()
	l.job.Bytes.Add(l.wants[i].Bytes)
	l.landRequest(int32(i))
}

// landingBytes returns the number of bytes that a request occupies at its destination.
func (l *Loading) landingBytes(i int) int64 {
	n := l.wants[i].Bytes
	if l.casts != nil && l.casts[i].To != 0 {
		n = castBytes(n, l.casts[i])
	}
	return n
}

// bindsMeanwhile reports whether the job, and not Start, waits for the load's queue. That is the case if a queue is
// being made, the caller can bind destinations in the meantime, and enough memory is free for the queue.
func (l *Loading) bindsMeanwhile() bool {
	if l.dests == nil || l.dests.bound == nil || !l.target.GPU.IsMakingQueue() {
		return false
	}
	room, _, err := l.target.GPU.MemoryInfo()
	return err == nil && room >= spare
}

// Bind sets the destinations of requests with BindLater. pairs alternates request numbers and addresses. Requests land
// there only after the work that is now queued on the stream; stream 0 means none. Bind may be called while the load
// runs and after it has ended.
func (l *Loading) Bind(pairs []int64, stream uint64) error {
	l.out.mu.Lock()
	defer l.out.mu.Unlock()
	if l.out.over {
		return nil
	}
	if l.dests == nil || len(pairs)%2 != 0 {
		return errs.New(errs.ErrArgument, "bind: no request waits for a destination, or pairs has odd length")
	}
	if stream != 0 {
		if err := l.queue.follow(uintptr(stream)); err != nil {
			return l.model.LocateError("stage", err)
		}
	}
	for i := 0; i < len(pairs); i += 2 {
		at, dst := pairs[i], uintptr(pairs[i+1])
		if at < 0 || at >= int64(len(l.wants)) || !l.dests.isBound(int(at)) || dst == 0 ||
			!l.dests.known[at].CompareAndSwap(0, dst) {
			return errs.New(errs.ErrArgument,
				"bind: request %d does not wait for a destination, or %#x is not a valid address", at, dst)
		}
	}
	l.dests.wake(nil)
	return nil
}

func (l *Loading) landRequest(i int32) {
	l.job.Tensors.Add(1)
	l.arrived.Add(int(i))
}

// afterWorkers runs after the last worker has ended, when nothing writes to the memory anymore.
func (l *Loading) afterWorkers() {
	l.out.mu.Lock()
	l.out.over = true // the queue must not be used after this
	if l.out.shut {
		cpu.Release(l.out.mem)
	}
	l.out.mu.Unlock()
	if q := l.queue.give(); q != nil {
		q.Close()
	}
	l.model.Drop()
}

// Job returns the load's job.
func (l *Loading) Job() *job.Job { return l.job }

// Len returns the number of requests.
func (l *Loading) Len() int { return len(l.wants) }

// Ready returns at most limit requests that have landed since the last call, in order of arrival. It waits up to
// d for the first one. more is false when the load has ended and everything was returned.
func (l *Loading) Ready(limit int, d time.Duration) (reqs []int, more bool) {
	return l.arrived.Next(l.job.Done(), limit, d)
}

// Take returns the memory of a request, with its shape and dtype. The caller then owns the memory. ok is false if the
// request has not landed, was taken before, or was loaded to a destination of the caller.
func (l *Loading) Take(i int) (mem device.Memory, shape []int64, dtype tensor.DType, ok bool) {
	if i < 0 || i >= len(l.wants) {
		return mem, nil, 0, false
	}
	w := &l.wants[i]
	dtype = l.model.ix.Tensors[w.Tensor].DType
	if l.casts != nil && l.casts[i].To != 0 {
		dtype = l.casts[i].To
	}
	l.out.mu.Lock()
	defer l.out.mu.Unlock()
	if l.out.taken[i] || l.out.shut || (w.Bytes > 0 && l.out.mem[i].Block == nil) {
		return mem, w.Shape, dtype, false
	}
	l.out.taken[i] = true
	mem, l.out.mem[i] = l.out.mem[i], device.Memory{}
	return mem, w.Shape, dtype, true
}

// AwaitEnd waits for the end of the load. It cancels the load when ctx ends.
func (l *Loading) AwaitEnd(ctx context.Context) error {
	defer context.AfterFunc(ctx, l.job.Cancel)()
	<-l.job.Done()
	if err := l.job.Err(); err == nil || ctx.Err() == nil {
		return err
	}
	return errs.Cause(ctx)
}

// Close cancels a running load and frees untaken memory as soon as nothing writes to it. It does not wait.
func (l *Loading) Close() {
	l.job.Cancel()
	l.out.mu.Lock()
	defer l.out.mu.Unlock()
	if !l.out.shut && l.out.over {
		cpu.Release(l.out.mem)
	}
	l.out.shut = true
}
