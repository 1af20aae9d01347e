package load

// This file plans a load and runs its job.

import (
	"cmp"
	"context"
	"runtime"
	"slices"
	"time"
	"unsafe"

	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/device/cpu"
	"github.com/overwire/overwire/gosrc/device/cuda/queue"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/job"
	"github.com/overwire/overwire/gosrc/knob"
	"github.com/overwire/overwire/gosrc/pipeline"
	"github.com/overwire/overwire/gosrc/plan"
	"github.com/overwire/overwire/gosrc/source"
)

// Machine describes, for the planner, what a load of the model to the host, or to a GPU,
// runs on and reads from; stepped says whether ranges may be read in steps.
func (m *Model) Machine(gpu bool, threads int, stepped bool) plan.Machine {
	mc := plan.Machine{Cores: runtime.GOMAXPROCS(0), Threads: cmp.Or(max(0, threads), max(0, knob.Threads.Get()))}
	for _, s := range m.srcs {
		f := s.Facts()
		mc.Concurrency = max(mc.Concurrency, f.Concurrency)
		mc.DirectIO = mc.DirectIO || f.File != nil
		stepped = stepped && f.Ranges != nil
		mc.RangeBytes = max(mc.RangeBytes, f.RangeBytes)
	}
	if !stepped {
		mc.RangeBytes = 0
	}
	if gpu {
		_, mc.SlotBytes = Ring(mc)
	}
	return mc
}

// A shape is what a load will do: which bytes are read, and where they go.
type shape struct {
	dest           []unsafe.Pointer // by request
	maps           []int            // requests that are mapped
	bytes, mapped  int64
	plan           *plan.Plan
	begun, planned time.Time
}

// planLoad gives every request its destination and plans the reads of what is not
// mapped. It reads nothing.
func (l *Loading) planLoad(reqs []Request) *shape {
	s := &shape{dest: make([]unsafe.Pointer, len(reqs))}
	for i := range reqs {
		n := l.wants[i].Bytes
		s.bytes += n
		switch {
		case l.mapped[i]:
			s.maps = append(s.maps, i)
			s.mapped += n
		case l.settles != nil && l.settles[i], l.later != nil && l.later[i] > 0:
			s.dest[i] = device.Pointer(pending)
		case reqs[i].Dest != 0:
			s.dest[i] = device.Pointer(reqs[i].Dest)
		default:
			s.dest[i] = l.mem[i].Ptr
		}
	}
	for _, r := range l.copies {
		s.dest[r.request] = nil
	}
	s.begun = time.Now()
	s.plan = plan.Make(l.model.ix, l.wants, s.dest, l.machine.Limits())
	s.planned = time.Now()
	return s
}

// runLoad is the job: plan, run, report.
func (l *Loading) runLoad(ctx context.Context, j *job.Job, reqs []Request, opt Options) error {
	start := time.Now()
	if l.later != nil {
		ctx, cancel := context.WithCancel(ctx)
		provided := l.allocatePostponed(ctx)
		defer func() {
			cancel()
			<-provided
		}()
	}
	s := l.planLoad(reqs)
	j.TotalBytes.Store(s.bytes)
	j.TotalTensors.Store(int64(len(reqs)))
	how := cmp.Or(opt.Read, knob.Read.Get())
	files, depth := AnnouncePlan(l.model.srcs, s.plan, l.target.GPU == nil, how)
	late, err := l.plantCasts(s.plan, s.dest)
	if err != nil {
		return err
	}
	defer cpu.Release(late.mem) // what is never cast
	if err := l.copyLittle(ctx); err != nil {
		return err
	}
	if err := l.landMapped(j, s); err != nil {
		return err
	}
	tracing := traceFile(opt) != ""
	if opt.After != nil {
		if err := l.followLoad(ctx, opt.After, s.plan, how, tracing); err != nil {
			return err
		}
	}
	queue, err := l.prepareQueue(s.plan, opt.Stream)
	if err != nil {
		return err
	}
	task := l.pipelineTask(s, queue, depth, opt)
	var ways *gdsReads
	if queue != nil && how == "gds" {
		if ways, err = l.byGDS(queue); err != nil {
			return l.model.PlaceError("stage", err)
		}
		task.GDS = ways.by
	}
	task.Landed = late.wrapLand(l.landRequest)
	if l.passesQueue(s.plan, how, tracing) {
		task.Submitted = func() { close(l.submitted) }
	}
	task.Progress = func(n int64) { j.Bytes.Add(n) }
	rep := Report{Bytes: s.bytes, Tensors: int64(len(reqs)), Mapped: s.mapped}
	rep.Stages, err = pipeline.Run(ctx, task)
	ways.closeReads()
	if err == nil {
		err = late.castLanded(ctx, queue, l.landRequest)
	}
	if err == nil {
		err = l.model.Uncut()
	}
	rep.Seconds = time.Since(start).Seconds()
	if err == nil && task.Trace != nil {
		sum := task.Trace.Summary()
		rep.Trace = &sum
		err = task.Trace.WriteFile(traceFile(opt))
	}
	for _, f := range files {
		rep.DirectIO += f.DirectBytes()
	}
	if ways != nil {
		rep.GDS, rep.NoGDS = ways.bytes.Load(), ways.why
	}
	j.SetReport(rep)
	return err
}

func traceFile(opt Options) string { return cmp.Or(opt.Trace, knob.Trace.Get()) }

// landMapped lands the requests that the pipeline does not read: those without bytes, and
// those that are mapped or were copied. That another one has no decode task is a mistake of
// the plan.
func (l *Loading) landMapped(j *job.Job, s *shape) error {
	apart := slices.Clone(l.mapped)
	for _, r := range l.copies {
		apart[r.request] = true
	}
	for i, n := range s.plan.Left {
		if n == 0 && !apart[i] && l.wants[i].Bytes > 0 {
			t := &l.model.ix.Tensors[l.wants[i].Tensor]
			return errs.Place("plan", l.model.ix.Sources[t.Source].URI, t.Name, t.Off,
				errs.New(errs.ErrEngine, "nothing reads its %d bytes", l.wants[i].Bytes))
		}
	}
	for i := range l.wants {
		if l.wants[i].Bytes == 0 {
			l.landRequest(int32(i))
		}
	}
	for _, r := range l.copies {
		l.landRequest(int32(r.request))
	}
	if s.mapped > plan.StepPiece {
		l.prefaultPages(s.maps)
	}
	for _, i := range s.maps {
		j.Bytes.Add(l.mem[i].Bytes)
		l.landRequest(int32(i))
	}
	return nil
}

// prepareQueue makes the GPU's queue fit the plan, after the work of the caller's
// stream; nil: the host.
func (l *Loading) prepareQueue(p *plan.Plan, stream uint64) (*queue.Queue, error) {
	if l.target.GPU == nil {
		return nil, nil
	}
	if pin := l.model.pin; pin != nil {
		if err := l.model.registerPinned(pin, l.target.GPU); err != nil {
			return nil, err
		}
	}
	queue, err := l.queueFor(p)
	if err == nil && stream != 0 {
		err = queue.FollowStream(uintptr(stream))
	}
	if err != nil {
		return nil, l.model.PlaceError("stage", err)
	}
	return queue, nil
}

// queueFor is the load's queue: one whose slots have room for the largest piece of the
// plan takes the place of another. Settle need not wait while it is made.
func (l *Loading) queueFor(p *plan.Plan) (*queue.Queue, error) {
	queue, room := l.giveQueue(), int64(0)
	if p.Slot > l.machine.SlotBytes {
		if queue != nil {
			queue.Close()
		}
		queue, room = nil, p.Slot
	}
	if queue == nil {
		var err error
		if queue, err = l.target.Queue(room, l.machine); err != nil {
			return nil, err
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.queue = queue
	return queue, nil
}

// pipelineTask is the pipeline's task of a shape.
func (l *Loading) pipelineTask(s *shape, queue *queue.Queue, depth int, opt Options) *pipeline.Task {
	t := &pipeline.Task{Index: l.model.ix, Sources: l.model.srcs, Wants: l.wants, Plan: s.plan,
		Workers: l.machine.Workers(depth)}
	if queue != nil {
		t.Queue, t.Near = queue, l.target.GPU.NearNode()
	}
	if l.dests != nil {
		t.Destination = l.dests.resolveTask
	}
	if traceFile(opt) != "" {
		t.Trace = pipeline.NewTrace()
		t.Trace.Verb("open", l.model.opened[0], l.model.opened[1], 0)
		t.Trace.Verb("plan", s.begun, s.planned, s.bytes)
	}
	if l.machine.RangeBytes > 0 {
		ranges := make([]source.Ranges, len(l.model.srcs))
		for i, src := range l.model.srcs {
			ranges[i] = src.Facts().Ranges
		}
		t.Range = func() int64 {
			atOnce := 0
			for _, r := range ranges {
				atOnce = max(atOnce, r.AtOnce())
			}
			return l.machine.Range(s.plan.Read, min(t.Workers, atOnce))
		}
	}
	return t
}

// AnnouncePlan announces the plan to its files; host says that it fills the host's memory.
// It returns them, and how many reads in flight suit them best.
func AnnouncePlan(srcs []source.Source, p *plan.Plan, host bool, how string) (files []source.File, depth int) {
	asked := make([]bool, len(srcs)) // a relay of several files comes to each again and again
	for i := range p.Pieces {
		s := p.Pieces[i].Source
		if asked[s] {
			continue
		}
		asked[s] = true
		if f := srcs[s].Facts().File; f != nil {
			files = append(files, f)
			depth = max(depth, f.Expect(p.Read, host, how))
		}
	}
	return files, depth
}
