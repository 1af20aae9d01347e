package load

// This file plans a load, runs it and reports its cost.

import (
	"cmp"
	"context"
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

// An execution holds the plan of a load and the destinations of its requests.
type execution struct {
	l              *Loading
	opt            Options
	dest           []unsafe.Pointer // indexed by request
	maps           []int            // requests that are mapped
	bytes, mapped  int64
	plan           *plan.Plan
	begun, planned time.Time
}

// newExecution sets the destination of every request and plans the reads of requests that are not mapped. It reads
// nothing.
func newExecution(l *Loading, reqs []Request, opt Options) *execution {
	s := &execution{l: l, opt: opt, dest: make([]unsafe.Pointer, len(reqs))}
	for i := range reqs {
		n := l.wants[i].Bytes
		s.bytes += n
		switch {
		case l.files.mapped[i]:
			s.maps = append(s.maps, i)
			s.mapped += n
		case l.dests.isPending(i):
			s.dest[i] = device.Pointer(pending)
		case reqs[i].Dest != 0:
			s.dest[i] = device.Pointer(reqs[i].Dest)
		default:
			s.dest[i] = l.out.mem[i].Ptr
		}
	}
	for _, r := range l.files.copies {
		s.dest[r.request] = nil
	}
	s.begun = time.Now()
	s.plan = plan.Make(l.model.ix, l.wants, s.dest, l.machine.Limits())
	s.planned = time.Now()
	return s
}

// runLoad is the load's job: it plans, runs and reports.
func runLoad(ctx context.Context, j *job.Job, l *Loading, reqs []Request, opt Options) error {
	start := time.Now()
	if l.dests != nil && l.dests.later != nil {
		ctx, cancel := context.WithCancel(ctx)
		provided := allocatePostponed(ctx, l)
		defer func() {
			cancel()
			<-provided
		}()
	}
	s := newExecution(l, reqs, opt)
	j.TotalBytes.Store(s.bytes)
	j.TotalTensors.Store(int64(len(reqs)))
	how := cmp.Or(opt.Read, knob.Read.Get())
	files, depth := AnnouncePlan(l.model.srcs, s.plan, l.target.GPU == nil, how)
	late, err := plantCasts(l, s.plan, s.dest)
	if err != nil {
		return err
	}
	defer cpu.Release(late.mem) // frees the memory of casts that did not run
	if err := l.files.copyLittle(ctx, l); err != nil {
		return err
	}
	if err := s.landMapped(j); err != nil {
		return err
	}
	tracing := traceFile(opt) != ""
	if opt.After != nil {
		if err := followLoad(ctx, l, opt.After, s.plan, how, tracing); err != nil {
			return err
		}
	}
	queue, err := s.prepareQueue()
	if err != nil {
		return err
	}
	task := s.pipelineTask(queue, depth)
	var ways *gdsReads
	if queue != nil && how == "gds" {
		if ways, err = openGDS(l, queue); err != nil {
			return l.model.LocateError("stage", err)
		}
		task.GDS = ways.by
	}
	task.Landed = late.wrapLand(l.landRequest)
	if handsOffQueue(l, s.plan, how, tracing) {
		task.Submitted = func() { close(l.queue.submitted) }
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

// landMapped lands the requests that the pipeline does not read: empty, mapped and copied requests. Any other request
// without a decode task is a bug in the plan.
func (s *execution) landMapped(j *job.Job) error {
	l := s.l
	apart := slices.Clone(l.files.mapped)
	for _, r := range l.files.copies {
		apart[r.request] = true
	}
	for i, n := range s.plan.Left {
		if n == 0 && !apart[i] && l.wants[i].Bytes > 0 {
			t := &l.model.ix.Tensors[l.wants[i].Tensor]
			return errs.Place("plan", l.model.ix.Sources[t.Source].URI, t.Name, t.Off,
				errs.New(errs.ErrEngine, "no task of the plan reads its %d bytes", l.wants[i].Bytes))
		}
	}
	for i := range l.wants {
		if l.wants[i].Bytes == 0 {
			l.landRequest(int32(i))
		}
	}
	for _, r := range l.files.copies {
		l.landRequest(int32(r.request))
	}
	if s.mapped > plan.StepPiece {
		prefaultPages(l.out.mem, s.maps)
	}
	for _, i := range s.maps {
		j.Bytes.Add(l.out.mem[i].Bytes)
		l.landRequest(int32(i))
	}
	return nil
}

// prepareQueue returns a GPU queue that fits the plan and waits for the work on the caller's stream. For the host it
// returns nil.
func (s *execution) prepareQueue() (*queue.Queue, error) {
	l := s.l
	if l.target.GPU == nil {
		return nil, nil
	}
	if pin := l.model.pin; pin != nil {
		if err := pin.register(l.model, l.target.GPU); err != nil {
			return nil, err
		}
	}
	queue, err := s.chooseQueue()
	if err == nil && s.opt.Stream != 0 {
		err = queue.FollowStream(uintptr(s.opt.Stream))
	}
	if err != nil {
		return nil, l.model.LocateError("stage", err)
	}
	return queue, nil
}

// chooseQueue returns the load's queue. If the queue's slots are too small for the largest piece of the plan,
// chooseQueue makes a new queue. Meanwhile it does not hold the lock of l.queue, so Bind does not wait.
func (s *execution) chooseQueue() (*queue.Queue, error) {
	l := s.l
	queue, room := l.queue.give(), int64(0)
	if s.plan.Slot > l.machine.SlotBytes {
		if queue != nil {
			queue.Close()
		}
		queue, room = nil, s.plan.Slot
	}
	if queue == nil {
		var err error
		if queue, err = l.target.Queue(room, l.machine); err != nil {
			return nil, err
		}
	}
	l.queue.set(queue)
	return queue, nil
}

func (s *execution) pipelineTask(queue *queue.Queue, depth int) *pipeline.Task {
	l := s.l
	t := &pipeline.Task{Index: l.model.ix, Sources: l.model.srcs, Wants: l.wants, Plan: s.plan,
		Workers: l.machine.Workers(depth)}
	if queue != nil {
		t.Queue, t.Near = queue, l.target.GPU.NearNode()
	}
	if l.dests != nil {
		t.Destination = l.dests.resolveTask
	}
	if traceFile(s.opt) != "" {
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

// AnnouncePlan announces the plan to the files that it reads, and returns these files and the best number of reads in
// flight. host means that the destination is host memory.
func AnnouncePlan(srcs []source.Source, p *plan.Plan, host bool, how string) (files []source.File, depth int) {
	asked := make([]bool, len(srcs)) // a group load of several files returns to each file repeatedly
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
