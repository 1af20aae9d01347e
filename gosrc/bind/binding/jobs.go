package binding

// This file runs verbs as jobs, returns their results to Python, and defines handles, with which Python refers to the
// engine's objects.

import (
	"context"
	"reflect"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/overwire/overwire/gosrc/delta"
	"github.com/overwire/overwire/gosrc/device/cuda"
	"github.com/overwire/overwire/gosrc/device/cuda/stream"
	"github.com/overwire/overwire/gosrc/device/pinned"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/gather"
	"github.com/overwire/overwire/gosrc/hoststore"
	"github.com/overwire/overwire/gosrc/internal/rawjson"
	"github.com/overwire/overwire/gosrc/internal/regular"
	"github.com/overwire/overwire/gosrc/job"
	"github.com/overwire/overwire/gosrc/load"
	"github.com/overwire/overwire/gosrc/preload"
	"github.com/overwire/overwire/gosrc/relay"
	"github.com/overwire/overwire/gosrc/source/fed"
	"github.com/overwire/overwire/gosrc/tensorizer"
)

// An owner is a result with a handle in its JSON. The handle is freed if the result is not taken.
type owner interface{ owns() uint64 }

// An entry is a job with a handle, for either a verb or a preload. Freeing a preload's handle does not
// free its tensors.
type entry struct {
	job   *job.Job         // nil for a preload
	load  *load.Loading    // nil if it is not a load
	relay *relay.Relay     // nil if it is not a group load
	pre   *preload.Preload // nil if it is not a preload
	// staged is closed when a background save no longer needs the caller's memory. It is nil for other jobs.
	staged <-chan struct{}
	// usesMemory means that the job uses the caller's memory, which must stay valid until the job has ended.
	usesMemory bool

	mu     sync.Mutex
	result *Result // for verbs that return more than a report; nil if not set yet or already taken
	gone   bool    // the handle was freed, so the result will not be taken
}

// A replacer is a request that replaces the file at a path or URI.
type replacer interface{ replacedPath() string }

// WritesPath reports whether the verb's request is a replacer. If so, Python waits for background saves to
// the path before it starts the verb.
func (v *Verb) WritesPath() bool {
	_, ok := reflect.New(v.asks).Interface().(replacer)
	return ok
}

// A brief is a request that may be run on the caller's thread, because it takes less time than waking another thread.
type brief interface{ isBrief() bool }

// background runs a verb as a job. If the job replaced a file, it drops the file's preloads when it ends. run returns
// the job's report, even with an error, or a *Result that can be taken.
func (v *Verb) background(q any, run func(ctx context.Context, j *job.Job) (any, error)) *entry {
	e := &entry{usesMemory: v.usesMemory}
	e.job = job.New(v.Name)
	begin := e.job.Go
	if b, ok := q.(brief); ok && b.isBrief() {
		begin = e.job.RunHere
	}
	begin(func(ctx context.Context, j *job.Job) error {
		if r, ok := q.(replacer); ok {
			defer preload.Sweep(r.replacedPath())
		}
		answer, err := run(ctx, j)
		switch r := answer.(type) {
		case *Result:
			if err == nil {
				e.give(r)
			}
		case none:
		case owner:
			if text, err := rawjson.Marshal(r); err == nil {
				e.give(&Result{Text: string(text), owned: r.owns()})
			}
		default:
			j.SetReport(r)
		}
		return err
	})
	return e
}

func (e *entry) give(r *Result) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.gone {
		r.Drop()
		return
	}
	e.result = r
}

// running returns the job. For a preload it waits up to d until the files are open, and returns nil if they are not.
func (e *entry) running(d time.Duration) (*job.Job, error) {
	if e.pre == nil {
		return e.job, nil
	}
	s, isOpen, err := e.pre.Opened(d)
	if err != nil || !isOpen {
		return nil, err
	}
	return s.Job(), nil
}

func (e *entry) wait(d time.Duration) (bool, error) {
	j, err := e.running(d)
	if err != nil || j == nil {
		return false, err
	}
	return j.Wait(d)
}

// batch is the maximum number of tensors of one TakeNext: enough to make calls cheap, and few enough that the caller
// can process them while the next ones are loaded.
const batch = 1024

func (e *entry) next(d time.Duration, raw bool) (*Result, error) {
	var from interface {
		Ready(limit int, d time.Duration) (reqs []int, more bool)
	}
	switch {
	case e.staged != nil:
		return e.nextStaged(d)
	case e.load != nil:
		from = e.load
	case e.relay != nil:
		from = e.relay
	default:
		return nil, errs.New(errs.ErrArgument, "the job does not load tensors for this caller")
	}
	at, more := from.Ready(batch, d)
	if len(at) == 0 {
		if more {
			return nil, nil
		}
		_, err := e.job.Wait(-1) // the job has ended
		return &Result{Numbers: []int64{0}}, err
	}
	numbers := make([]int64, 1, 1+2*len(at))
	for _, i := range at {
		numbers = append(numbers, int64(i))
	}
	if e.relay != nil { // all requests have destinations
		numbers[0] = int64(len(at))
		return &Result{Numbers: append(numbers, make([]int64, len(at))...), Tensors: make([]Exported, len(at))}, nil
	}
	return export(e.load, at, numbers, raw), nil
}

// nextStaged waits up to d until the caller's memory is no longer needed. A negative d means no limit.
func (e *entry) nextStaged(d time.Duration) (*Result, error) {
	var late <-chan time.Time
	if d >= 0 {
		late = time.After(d)
	}
	select {
	case <-e.staged:
	case <-e.job.Done():
		select {
		case <-e.staged: // callers that wait for the job's end get later errors
		default:
			_, err := e.job.Wait(-1)
			return &Result{Numbers: []int64{0}}, err
		}
	case <-late:
		return nil, nil
	}
	return &Result{Numbers: []int64{0}}, nil
}

// all returns all results of a job that has ended.
func (e *entry) all(raw bool) (*Result, error) {
	if e.load != nil {
		at := make([]int, e.load.Len())
		for i := range at {
			at[i] = i
		}
		return export(e.load, at, make([]int64, 1, 1+len(at)), raw), nil
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	r := e.result
	e.result = nil
	if r == nil {
		r = &Result{}
	}
	return r, nil
}

// export takes the tensors of loaded requests from a load. It sets the first number to how many have no memory, and
// appends their addresses.
func export(l *load.Loading, at []int, numbers []int64, raw bool) *Result {
	r := &Result{Tensors: make([]Exported, len(at)), Raw: raw}
	for n, i := range at {
		t := &r.Tensors[n]
		t.Mem, t.Shape, t.DType, t.OK = l.Take(i)
		if t.Mem.Ptr == nil {
			numbers[0]++
		}
		numbers = append(numbers, int64(uintptr(t.Mem.Ptr)))
	}
	r.Numbers = numbers
	return r
}

// report returns the job's report as JSON, or "null" if there is none yet.
func (e *entry) report() (string, error) {
	j, err := e.running(0)
	if err != nil || j == nil {
		return "null", err
	}
	b, err := j.Report()
	return string(b), err
}

// progress returns the processed bytes and tensors, each with its total.
func (e *entry) progress() []int64 {
	j, err := e.running(0)
	if err != nil || j == nil {
		return make([]int64, 4) // Wait reports the error
	}
	b, tb, t, tt := j.Progress()
	return []int64{b, tb, t, tt}
}

// cancel cancels the job without waiting for it.
func (e *entry) cancel() {
	if e.pre != nil {
		e.pre.Drop()
		return
	}
	e.job.Cancel()
}

// abandonWait is how long to wait for a cancelled verb that does not use the caller's memory. Most verbs end within
// this time. A verb that hangs in a system call, for example on an unresponsive file system, ends when the system call
// returns.
const abandonWait = 50 * time.Millisecond

// rest cancels the job and waits until the caller's memory is no longer in use. A preload does not use the caller's
// memory, and continues.
func (e *entry) rest(how int) {
	if e.pre != nil {
		return
	}
	e.job.Cancel()
	wait := time.Duration(-1)
	if how == FreeCalled && !e.usesMemory {
		wait = abandonWait
	}
	_, _ = e.job.Wait(wait)
}

// close cancels a running job. Tensors that were not taken are freed when nothing writes to them. A preload continues.
func (e *entry) close() {
	switch {
	case e.pre != nil:
		return
	case e.load != nil:
		e.load.Close()
		return
	}
	e.job.Cancel()
	e.mu.Lock()
	defer e.mu.Unlock()
	e.gone = true
	if e.result != nil {
		e.result.Drop()
		e.result = nil
	}
}

// handles maps numbers to the objects that Python holds: *load.Model, *entry (a job), *stream.Batch, *delta.File,
// *tensorizer.Opened, *fed.Feed and *gather.Gather. A number is never reused, so a stale handle gives an error and
// never refers to another object.
var (
	handles    sync.Map
	lastHandle atomic.Uint64
)

func keep(v any) uint64 {
	h := lastHandle.Add(1)
	handles.Store(h, v)
	return h
}

func get[T any](h uint64) (T, error) {
	object, _ := handles.Load(h)
	v, ok := object.(T)
	if ok {
		return v, nil
	}
	kind := "object"
	switch any(v).(type) {
	case *load.Model:
		kind = "open model"
	case *entry:
		kind = "job"
	case *stream.Batch:
		kind = "batch"
	case *delta.File:
		kind = "delta"
	case *tensorizer.Opened:
		kind = "open .tensors file"
	case *fed.Feed:
		kind = "feed"
	case *gather.Gather:
		kind = "gather"
	}
	return v, errs.New(errs.ErrArgument, "handle %d is not an existing %s: it was closed or never opened", h, kind)
}

func getAll[T any](handles []uint64) ([]T, error) {
	all := make([]T, len(handles))
	for i, h := range handles {
		var err error
		if all[i], err = get[T](h); err != nil {
			return nil, err
		}
	}
	return all, nil
}

func modelOf(h int64) (*load.Model, error) { return get[*load.Model](uint64(h)) }

func jobOf(h int64) (*entry, error) { return get[*entry](uint64(h)) }

// A quiesced is the result of the verb quiesce: the names of running jobs, and what callers still hold.
type quiesced struct {
	Running []string `json:"running"`
	Held    []string `json:"held"`
}

// quiesceEngine implements the verb quiesce. It drops preloads and cached host memory, and frees the rest only if no
// job is running.
func quiesceEngine(_ none, n []int64) (q quiesced, err error) {
	pinned.Trim() // also ends its growth in the background
	preload.DropAll()
	wait := time.Duration(n[0]) * time.Millisecond
	if q.Running = job.AwaitAll(wait); len(q.Running) == 0 && !hoststore.AwaitPuts(wait) {
		q.Running = []string{"host put"}
	}
	if len(q.Running) > 0 {
		return q, nil
	}
	load.AwaitPreparations()
	pinned.Trim()
	err = cuda.Trim()
	regular.CloseMounts()
	for _, object := range handles.Range {
		switch v := object.(type) {
		case *load.Model:
			for _, s := range v.Index().Sources {
				q.Held = append(q.Held, "an open model: "+errs.RedactURI(s.URI))
			}
		case *stream.Batch:
			q.Held = append(q.Held, "a batch of bitstreams")
		case *delta.File:
			q.Held = append(q.Held, "a delta")
		case *tensorizer.Opened:
			q.Held = append(q.Held, "a .tensors file")
		case *gather.Gather:
			q.Held = append(q.Held, "a model that a group has offloaded")
		}
	}
	slices.Sort(q.Held)
	return q, err
}

// drop removes a handle and returns its object, or nil if there was none.
func drop(h uint64) any {
	v, _ := handles.LoadAndDelete(h)
	return v
}
