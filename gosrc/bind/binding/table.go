package binding

// This file defines the table of verbs, and reads their requests and the tensors that Python describes in columns.

import (
	"context"
	"reflect"
	"slices"
	"strings"
	"sync"

	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/spawn"
	"github.com/overwire/overwire/gosrc/job"
	"github.com/overwire/overwire/gosrc/tensor"
)

// A Kind is the way in which Python calls a verb.
type Kind int

const (
	Answered Kind = iota // runs in Call and does not wait
	Awaited              // a job: the caller waits from its start to its end
	Started              // a job that the caller watches
)

// A Verb is a row of the table: the types of its request and result, and its function. `make gen`
// writes the Python functions to overwire/_verbs.py.
type Verb struct {
	Name string
	Kind Kind
	Doc  string // sentences for the docstring
	Ints []string
	// Tail explains the numbers after Ints. "" means that there are none.
	Tail string
	// Types of the JSON, or nil. A Text request is a word, not JSON. A Dumped[T] is the JSON of
	// a T that Python caches and sends repeatedly.
	Request, Result reflect.Type

	// usesMemory means that the verb uses the caller's memory, which must stay valid until the verb has ended.
	// ends means that the verb starts nothing, so it also works after a panic.
	usesMemory, ends bool

	// Each function gets a pointer to the request. An answered verb has call; every other verb has start. run is the
	// job of a verb without a special start function.
	asks  reflect.Type // type of the request, even if it is none
	call  func(q any, numbers []int64) (any, error)
	start func(v *Verb, q any, numbers []int64) (*entry, error)
	run   func(ctx context.Context, j *job.Job, q any, numbers []int64) (any, error)
}

type (
	none struct{} // no request, or no result
	// A Text is a request of one word.
	Text string
	// A Dumped is a request that is parsed once and cached by its text, because programs send the same text repeatedly.
	Dumped[T any] struct{ Value T }
)

// dumped caches parsed requests by type and text.
var dumped struct {
	mu  sync.Mutex
	all map[any]any
}

const maxDumped = 64

func (d *Dumped[T]) read(text string) error {
	type key struct{ text string } // a distinct type for each T
	dumped.mu.Lock()
	defer dumped.mu.Unlock()
	if v, ok := dumped.all[key{text}]; ok {
		d.Value = v.(T)
		return nil
	}
	var v T
	if err := parse(text, &v); err != nil {
		return err
	}
	if len(dumped.all) >= maxDumped || dumped.all == nil {
		dumped.all = map[any]any{}
	}
	dumped.all[key{text}] = v
	d.Value = v
	return nil
}

// reader is a request that is not plain JSON.
type reader interface{ read(text string) error }

func (t *Text) read(text string) error { *t = Text(text); return nil }

func (*none) read(string) error { return nil }

// read decodes a request and returns a pointer to it.
func (v *Verb) read(text string) (any, error) {
	q := reflect.New(v.asks).Interface()
	if r, ok := q.(reader); ok {
		return q, r.read(text)
	}
	if text == "" { // all fields have their zero values
		return q, nil
	}
	return q, parse(text, q)
}

// given converts a verb's return value to a Result.
func given(v any) (*Result, error) {
	switch v := v.(type) {
	case none:
		return &Result{}, nil
	case *Result:
		return v, nil
	case int64:
		return &Result{Numbers: []int64{v}}, nil
	}
	return encode(v)
}

// row makes a verb with the types that q and r point to. The generic functions below do little more, because they are
// compiled for each of about seventy verbs.
func row(name, doc string, kind Kind, q, r any) *Verb {
	v := &Verb{Name: name, Kind: kind, Doc: doc, asks: reflect.TypeOf(q).Elem()}
	if _, ok := q.(*none); !ok {
		v.Request = v.asks
	}
	if _, ok := r.(*none); !ok {
		v.Result = reflect.TypeOf(r).Elem()
	}
	return v
}

func (v *Verb) counted(numbers []int64) error {
	if len(numbers) < len(v.Ints) || v.Tail == "" && len(numbers) > len(v.Ints) {
		return errs.New(errs.ErrArgument, "%s: expected %d numbers, got %d", v.Name, len(v.Ints), len(numbers))
	}
	return nil
}

// ints names the numbers of a row. tail describes the numbers after them.
func (v *Verb) ints(names ...string) *Verb { v.Ints = names; return v }

func (v *Verb) tail(doc string) *Verb { v.Tail = doc; return v }

// answered makes a verb that does not wait.
func answered[Q, R any](name, doc string, run func(q Q, n []int64) (R, error)) *Verb {
	v := row(name, doc, Answered, (*Q)(nil), (*R)(nil))
	v.call = func(q any, n []int64) (any, error) { return run(*q.(*Q), n) }
	return v
}

// ofNumbered makes the function of a verb. The verb's first number identifies an object. run gets the object and the
// remaining numbers.
func ofNumbered[T, Q, R any](find func(number int64) (T, error),
	run func(thing T, q Q, n []int64) (R, error)) func(q Q, n []int64) (R, error) {
	return func(q Q, n []int64) (r R, err error) {
		thing, err := find(n[0])
		if err != nil {
			return r, err
		}
		return run(thing, q, n[1:])
	}
}

// started makes a verb that starts a job for the caller to watch.
func started[Q, R any](name, doc string, run func(ctx context.Context, j *job.Job, q Q, n []int64) (R, error)) *Verb {
	v := row(name, doc, Started, (*Q)(nil), (*R)(nil))
	v.start = (*Verb).startRun
	v.run = func(ctx context.Context, j *job.Job, q any, n []int64) (any, error) { return run(ctx, j, *q.(*Q), n) }
	return v
}

// startRun starts the job of a verb made by started.
func (v *Verb) startRun(q any, n []int64) (*entry, error) {
	n = slices.Clone(n)
	return v.background(q, func(ctx context.Context, j *job.Job) (any, error) { return v.run(ctx, j, q, n) }), nil
}

// awaited marks a verb that the caller waits for, because it uses a server or a disk or derives a key.
func (v *Verb) awaited() *Verb { v.Kind = Awaited; return v }

// begun makes a verb with its own start function.
func begun[Q, R any](name, doc string, start func(v *Verb, q Q, n []int64) (*entry, error)) *Verb {
	v := row(name, doc, Started, (*Q)(nil), (*R)(nil))
	v.start = func(v *Verb, q any, n []int64) (*entry, error) { return start(v, *q.(*Q), n) }
	return v
}

func (v *Verb) onCallersMemory() *Verb { v.usesMemory = true; return v }

func (v *Verb) afterPanics() *Verb { v.ends = true; return v }

// Table returns the verbs.
func Table() []*Verb {
	return slices.Concat(modelVerbs(), relayVerbs(), jobVerbs(), fileVerbs(), programVerbs(), nameVerbs(),
		tensorsVerbs(), deltaVerbs(), codecVerbs(), gpuVerbs(), digestVerbs(), feedVerbs(), gatherVerbs())
}

// verbs contains the verbs of the table, and a verb that panics, which tests use to check Guard. Python has no function
// for that verb.
var verbs = func() map[string]*Verb {
	all := map[string]*Verb{"panic": answered("panic", "", func(none, []int64) (none, error) { panic("asked for") })}
	for _, v := range Table() {
		all[v.Name] = v
	}
	return all
}()

// asked finds a verb by name and kind, and reads its request.
func asked(name, request string, numbers []int64, job bool) (v *Verb, q any, err error) {
	switch v = verbs[name]; {
	case v == nil:
		err = errs.New(errs.ErrArgument, "there is no verb %q", name)
	case !job && v.call == nil:
		err = errs.New(errs.ErrArgument, "the verb %q must be started as a job", name)
	case job && v.start == nil:
		err = errs.New(errs.ErrArgument, "the verb %q cannot be started as a job", name)
	default:
		err = v.counted(numbers)
	}
	if p := spawn.Poisoned(); p != nil && (v == nil || !v.ends) {
		err = p
	}
	if err == nil {
		q, err = v.read(request)
	}
	return v, q, err
}

// columns describes tensors. Their addresses are among the verb's numbers.
type columns struct {
	Names  []string  `json:"names"`
	DTypes []string  `json:"dtypes"`
	Shapes [][]int64 `json:"shapes"`
}

// types returns the dtypes of the tensors. It checks that there are `each` numbers per tensor.
func (c *columns) types(numbers, each int) ([]tensor.DType, error) {
	if len(c.DTypes) != len(c.Names) || len(c.Shapes) != len(c.Names) || numbers != each*len(c.Names) {
		return nil, errs.New(errs.ErrArgument, "the columns do not match: %d names, %d dtypes, %d shapes, %d numbers",
			len(c.Names), len(c.DTypes), len(c.Shapes), numbers)
	}
	types := make([]tensor.DType, len(c.Names))
	for i, name := range c.Names {
		d, ok := tensor.ParseDType(c.DTypes[i])
		if !ok {
			return nil, errs.New(errs.ErrArgument, "tensor %q: unknown dtype %q", name, c.DTypes[i])
		}
		types[i] = d
	}
	return types, nil
}

// named calls types and also refuses names that a header cannot contain.
func (c *columns) named(numbers, each int) ([]tensor.DType, error) {
	types, err := c.types(numbers, each)
	if i := slices.IndexFunc(c.Names, func(name string) bool {
		return strings.ContainsRune(name, 0)
	}); err == nil && i >= 0 {
		err = errs.New(errs.ErrArgument, "tensor %q: the name contains a NUL character", c.Names[i])
	}
	return types, err
}

// dataAt returns the caller's memory at an address.
func dataAt(addr uint64, n int64) ([]byte, error) {
	if n < 0 || n > 0 && addr == 0 {
		return nil, errs.New(errs.ErrArgument, "invalid memory: %d bytes at address %#x", n, addr)
	}
	return device.Bytes(addr, n), nil
}
