// Package binding implements the engine's functions for Python: a few functions, a table of verbs (Table), and handles.
// It contains no logic of the engine.
//
// A verb has a request and a result, both in JSON. Addresses and large sets of numbers are passed separately as int64.
// Tensors are returned as memory that the receiver owns. Every call is guarded against panics. All functions are safe
// for concurrent use.
package binding

import (
	"cmp"
	"encoding/json"
	"errors"
	"io"
	"runtime"
	"runtime/debug"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/overwire/overwire/gosrc/codec"
	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/avx"
	"github.com/overwire/overwire/gosrc/internal/rawjson"
	"github.com/overwire/overwire/gosrc/internal/spawn"
	"github.com/overwire/overwire/gosrc/knob"
	"github.com/overwire/overwire/gosrc/tensor"
)

// Guard runs fn for Python. It converts a panic to an error, and every error to the text of errs.Text. On return the
// vector registers are in the state that C expects. fn must check spawn.Poisoned: after a panic the engine starts
// nothing new, but running jobs can still be waited for, cancelled and freed.
func Guard[T any](name string, fn func() (T, error)) (T, error) {
	defer avx.Clear()
	var out, zero T
	err := spawn.Guard(name, func() (err error) {
		out, err = fn()
		return err
	})
	if err != nil {
		return zero, errors.New(errs.Text(err))
	}
	return out, nil
}

// A Result is the result of a verb. The receiver owns the memory of Tensors and the handle Model.
type Result struct {
	Text    string  // JSON, or ""
	Numbers []int64 // explained in the verb's row of the table
	Tensors []Exported
	Raw     bool          // export Tensors as unsigned integers of their width
	Table   *tensor.Index // index of an opened model
	Model   uint64        // handle of the opened model
	owned   uint64        // handle in Text that the receiver owns, or 0
}

// An Exported is a tensor for Python. OK is false if there is nothing to export, because the tensor was loaded into the
// caller's memory or has already been exported.
type Exported struct {
	Mem   device.Memory
	Shape []int64
	DType tensor.DType
	OK    bool
}

// Drop frees a result that has no receiver.
func (r *Result) Drop() {
	for _, t := range r.Tensors {
		if t.OK {
			t.Mem.Release()
		}
	}
	for _, handle := range []uint64{r.Model, r.owned} {
		if handle != 0 {
			Free(handle, FreeNow)
		}
	}
	*r = Result{}
}

type setup struct {
	// Warnings are messages about ignored values and unknown names.
	Warnings []string `json:"warnings"`
	// Log is the value of OVERWIRE_LOG, or "" if it is not set.
	Log string `json:"log"`
}

// Setup applies the environment that Python passes as a JSON object.
func Setup(env string) (*Result, error) {
	if err := spawn.Poisoned(); err != nil {
		return nil, err
	}
	var vars map[string]string
	if err := parse(env, &vars); err != nil {
		return nil, err
	}
	if err := startPoller(); err != nil {
		return nil, err
	}
	putOffCollections()
	s := setup{Warnings: knob.Load(vars)}
	codec.Use(knob.CPU.Get())
	for _, row := range knob.Table() {
		if row.Name == "OVERWIRE_LOG" && row.From != "" {
			s.Log = row.Value
		}
	}
	return encode(s)
}

// Call runs a verb on the caller's thread. numbers are the caller's memory.
func Call(name, request string, numbers []int64) (*Result, error) {
	v, q, err := asked(name, request, numbers, false)
	if err != nil {
		return nil, err
	}
	r, err := v.call(q, numbers)
	if err != nil {
		return nil, err
	}
	return given(r)
}

// Start starts a verb and returns its job. It copies numbers. The memory at the addresses among them must stay
// unchanged until the job has ended.
func Start(name, request string, numbers []int64) (uint64, error) {
	v, q, err := asked(name, request, numbers, true)
	if err != nil {
		return 0, err
	}
	e, err := v.start(v, q, numbers)
	if err != nil {
		return 0, err
	}
	return keep(e), nil
}

// Wait waits up to d for the end of a job. If the job has ended, it returns the job's error.
// After any panic it returns the panic's error instead.
func Wait(job uint64, d time.Duration) (done bool, err error) {
	e, err := get[*entry](job)
	if err == nil {
		done, err = e.wait(d)
	}
	if done || err != nil {
		err = cmp.Or(spawn.Poisoned(), err)
	}
	return done && err == nil, err
}

// The values of `how` for Take.
const (
	TakeAll  = 0      // takes everything after the job has ended
	TakeNext = 1 << 0 // takes the tensors that a load has landed since the last call
	TakeRaw  = 1 << 1 // takes tensors as unsigned integers of the same width
	TakeLast = 1 << 2 // takes everything and the report, and frees the job
)

// Take waits up to d for a job's result, and returns nil if there is none. For a load, the first number counts the
// tensors without memory or bytes. The address of each tensor follows; it is 0 for a tensor without memory or bytes.
// With TakeNext, the tensor's position precedes each address. A result without tensors is the last one. After a
// panic, Take waits for the job's end and returns nothing.
func Take(job uint64, d time.Duration, how int) (*Result, error) {
	if spawn.Poisoned() != nil {
		_, err := Wait(job, d)
		return nil, err
	}
	e, err := get[*entry](job)
	if err != nil {
		return nil, err
	}
	if how&TakeNext != 0 {
		return e.next(d, how&TakeRaw != 0)
	}
	if e.pre != nil {
		return nil, errs.New(errs.ErrArgument, "job %d is a preload: only loads can take its tensors", job)
	}
	if hasEnded, err := e.wait(d); err != nil || !hasEnded {
		return nil, err
	}
	r, err := e.all(how&TakeRaw != 0)
	if err == nil && how&TakeLast != 0 {
		if r.Text == "" {
			r.Text, err = e.report()
		}
		drop(job)
		e.close()
	}
	return r, err
}

// The values of `how` for Free.
const (
	FreeNow    = 0 // cancels a running job
	FreeEnded  = 1 // also waits until the caller's memory is no longer in use
	FreeCalled = 2 // like FreeEnded, for a verb that the caller waited for; see abandonWait
)

// Free frees the handle of a job, a model or a batch. Preloads, batches and loads of the model continue. Freeing a
// handle that does not exist is not an error.
func Free(handle uint64, how int) {
	object, _ := handles.Load(handle)
	if e, ok := object.(*entry); ok && how != FreeNow {
		e.rest(how)
	}
	switch v := drop(handle).(type) {
	case *entry:
		v.close()
	case interface{ Close() }:
		v.Close()
	case io.Closer:
		_ = v.Close()
	}
}

// parse decodes JSON from Python into *v.
func parse(text string, v any) error {
	if err := rawjson.Unmarshal(text, v); err != nil {
		return unfit(err)
	}
	return nil
}

// inPython maps JSON and Go types to their Python names.
var inPython = map[string]string{
	"string": "str", "object": "dict", "array": "list", "struct": "dict", "map": "dict", "slice": "list",
	"float64": "float", "bool": "bool",
}

// unfit returns the error for an argument of the wrong type, with the names of the Python types.
func unfit(err error) error {
	var of *json.UnmarshalTypeError
	if !errors.As(err, &of) {
		return errs.New(errs.ErrArgument, "request: %v", err)
	}
	want := cmp.Or(inPython[of.Type.Kind().String()], "int")
	value, _, _ := strings.Cut(of.Value, " ")
	return errs.New(errs.ErrArgument, "%s: expected %s, got %s", of.Field[strings.LastIndexByte(of.Field, '.')+1:],
		want, cmp.Or(inPython[value], "a "+value))
}

// encode returns v as a JSON result.
func encode(v any) (*Result, error) {
	b, err := rawjson.Marshal(v)
	if err != nil {
		return nil, errs.New(errs.ErrEngine, "result: %v", err)
	}
	return &Result{Text: string(b)}, nil
}

// The garbage collector does not run while the engine starts, and it rarely runs while the heap is small. By default,
// Go collects when the heap has doubled since the last collection, but not before it reaches 4 MiB. This happened two
// or three times while a group load was planned, and took half of that time.
const (
	usualPercent = 100
	firstPercent = 4 * usualPercent // the first collection is at 16 MiB
	ballastBytes = 8 << 20
)

// ballast counts as heap for the collector. It is never touched, so it takes no host memory.
var ballast atomic.Pointer[[ballastBytes]byte]

// putOffCollections is called once, at the start. Allocating the ballast so early would trigger a collection, so it
// sets a high percentage instead. The first collection allocates the ballast and restores the usual percentage, which a
// large heap needs. If the process sets GOGC, nothing is changed.
var putOffCollections = sync.OnceFunc(func() {
	if usual := debug.SetGCPercent(firstPercent); usual != usualPercent {
		debug.SetGCPercent(usual)
		return
	}
	garbage := new([64]byte) // the first collection frees it
	runtime.AddCleanup(garbage, func(percent int) {
		ballast.Store(new([ballastBytes]byte))
		debug.SetGCPercent(percent)
	}, usualPercent)
})

// startPoller makes Go's runtime start its poller, which waits for files, sockets and timers. If the process has no
// descriptors left, the runtime would end the process, so startPoller first tries the same calls. Another thread may
// still take the last descriptors in between.
func startPoller() error {
	err := tryPoller()
	if errors.Is(err, unix.EMFILE) {
		err = errs.New(errs.ErrIO, "%v: the engine needs two file descriptors: close files, or raise `ulimit -n`", err)
	}
	if err != nil {
		return errs.Place("start", "the engine", "", -1, errs.FromOS(err))
	}
	time.AfterFunc(time.Hour, func() {}).Stop() // the first timer starts the poller
	return nil
}

// tryPoller makes the calls that would end the process if they failed in the runtime.
func tryPoller() error {
	poller, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return err
	}
	defer unix.Close(poller)
	event, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		return err
	}
	defer unix.Close(event)
	return unix.EpollCtl(poller, unix.EPOLL_CTL_ADD, event, &unix.EpollEvent{Events: unix.EPOLLIN, Fd: int32(event)})
}
