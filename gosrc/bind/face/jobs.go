package face

import (
	"fmt"
	"time"
	"unsafe"

	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/device/cuda"
	"github.com/overwire/overwire/gosrc/fault"
	"github.com/overwire/overwire/gosrc/job"
	"github.com/overwire/overwire/gosrc/load"
	"github.com/overwire/overwire/gosrc/preload"
	"github.com/overwire/overwire/gosrc/tensor"
)

// An entry is a job that Python has a handle to: one of any verb, a load, or a
// preload, whose tensors are no handle's.
type entry struct {
	job     *job.Job         // nil: a preload
	load    *load.Loading    // nil: not a load
	pre     *preload.Preload // nil: not a preload
	coding  *coding          // nil: not a codec job
	calling *calling         // nil: not a call
	relay   *load.Relay      // nil: not a relay
}

var jobs = newTable[*entry]("job")

// start runs a verb as a job and gives it a handle.
func start(j *job.Job) uint64 { return jobs.put(&entry{job: j}) }

// running returns the job, waiting at most for d while a preload still opens its
// files; then it is nil.
func (e *entry) running(d time.Duration) (*job.Job, error) {
	if e.pre == nil {
		return e.job, nil
	}
	s, opened, err := e.pre.Opened(d)
	if err != nil || !opened {
		return nil, err
	}
	return s.Job(), nil
}

// Wait waits for the end of a job, at most for d, and returns the job's error
// once it has ended.
func Wait(h uint64, d time.Duration) (done bool, err error) {
	e, err := jobs.get(h)
	if err != nil {
		return false, err
	}
	j, err := e.running(d)
	if err != nil || j == nil {
		return false, err
	}
	return j.Wait(d)
}

func ended(j *job.Job) bool {
	select {
	case <-j.Done():
		return true
	default:
		return false
	}
}

// Progress returns a job's four counters, as text: bytes and tensors done,
// each with its total.
func Progress(h uint64) (string, error) {
	e, err := jobs.get(h)
	if err != nil {
		return "", err
	}
	j, err := e.running(0)
	if err != nil || j == nil {
		return "0 0 0 0", nil // its error is Wait's to tell
	}
	b, tb, t, tt := j.Progress()
	return fmt.Sprint(b, tb, t, tt), nil
}

// Report returns what a job had to say, as JSON.
func Report(h uint64) (string, error) {
	e, err := jobs.get(h)
	if err != nil {
		return "", err
	}
	j, err := e.running(0)
	if err != nil || j == nil {
		return "null", err
	}
	b, err := j.Report()
	return string(b), err
}

// Cancel asks a job to stop, and does not wait for it.
func Cancel(h uint64) error {
	e, err := jobs.get(h)
	if err != nil {
		return err
	}
	if e.pre != nil {
		e.pre.Drop()
		return nil
	}
	if j, err := e.running(0); err == nil && j != nil {
		j.Cancel()
	}
	return nil
}

// Free forgets a job. One that runs is cancelled, and tensors that nobody has
// taken are freed once nothing writes to them; a preload goes on. It does nothing for a handle that is not there: to free twice
// is no mistake worth an exception.
func Free(h uint64) {
	e, ok := jobs.take(h)
	switch {
	case !ok:
	case e.load != nil:
		e.load.Close()
	case e.coding != nil:
		e.job.Cancel()
		e.coding.drop()
	case e.calling != nil:
		e.job.Cancel()
		e.calling.drop()
	case e.job != nil:
		e.job.Cancel()
	}
}

// End cancels a job, waits until nothing of the caller's is in use any more, and
// forgets it. A preload is forgotten as Free does, without a wait.
func End(h uint64) {
	if e, err := jobs.get(h); err == nil && e.job != nil {
		e.job.Cancel()
		_, _ = e.job.Wait(-1)
	}
	Free(h)
}

// A Landed is one request of a load that is ready, and its tensor, which is
// the receiver's from now on.
type Landed struct {
	At    int64 // position of the request
	OK    bool  // there is a tensor: false if it landed in memory of the caller's, or was handed out before
	Mem   device.Memory
	Shape []int64
	DType tensor.DType
}

// Next waits for requests that have landed since the last call, at most for d,
// and returns up to most of them in order of arrival. over: none will follow;
// the error is then the job's.
func Next(h uint64, most int, d time.Duration) (landed []Landed, over bool, err error) {
	j, l, err := loading(h)
	if err != nil {
		return nil, false, err
	}
	at, more := l.Ready(most, d)
	for _, i := range at {
		landed = append(landed, taken(l, i))
	}
	if len(landed) == 0 && !more {
		_, err = j.Wait(-1) // has ended
		return nil, true, err
	}
	return landed, false, nil
}

// TakeAll hands out every tensor of a load that has ended, by request.
func TakeAll(h uint64) ([]Landed, error) {
	j, l, err := loading(h)
	if err != nil {
		return nil, err
	}
	if !ended(j) {
		return nil, fault.New(fault.ErrArgument, "job %d has not ended: wait for it first", h)
	}
	if err := j.Err(); err != nil {
		return nil, err
	}
	landed := make([]Landed, l.Len())
	for i := range landed {
		landed[i] = taken(l, i)
	}
	return landed, nil
}

func taken(l *load.Loading, i int) Landed {
	t := Landed{At: int64(i)}
	t.Mem, t.Shape, t.DType, t.OK = l.Take(i)
	return t
}

// loading returns the load behind a handle.
func loading(h uint64) (*job.Job, *load.Loading, error) {
	e, err := jobs.get(h)
	if err != nil {
		return nil, nil, err
	}
	if e.load == nil {
		return nil, nil, fault.New(fault.ErrArgument, "job %d does not load tensors for this caller", h)
	}
	return e.job, e.load, nil
}

// Prepare makes a device ready for a load; see load.Prepare.
func Prepare(device string) { load.Prepare(device) }

// Settle tells a load where requests land that were to learn it later: n pairs
// of numbers at an address, request and place; see load.Loading.Settle.
func Settle(h, pairs uint64, n int, stream uint64) error {
	_, l, err := loading(h)
	if err != nil {
		return err
	}
	if n < 0 || n > 0 && pairs == 0 {
		return fault.New(fault.ErrArgument, "settle: %d pairs at %#x for job %d", n, pairs, h)
	}
	at := uintptr(pairs)
	return l.Settle(unsafe.Slice(*(**int64)(unsafe.Pointer(&at)), 2*n), stream)
}

// Shutdown cancels everything that runs and waits for its end, at most for d.
// It is what a process does before it exits.
func Shutdown(d time.Duration) bool {
	ended := job.CancelAll(d)
	if ended {
		load.Prepared()
		cuda.Shutdown()
	}
	return ended
}

// EmptyCache gives back the device and pinned memory that is only kept for the
// next load. It starts no driver.
func EmptyCache() error { return cuda.Trim() }
