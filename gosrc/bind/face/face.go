// Package face is what Python can ask of the engine, in Go's terms: models and
// jobs under integer handles, every call guarded, every error in the one text
// that Python turns into its own exception. It decides nothing.
//
// Handles are numbers that are never used twice, so a stale one is an error
// and never another's object. Everything here is safe for concurrent use.
package face

import (
	"errors"
	"sync"

	"github.com/overwire/overwire/gosrc/fault"
	"github.com/overwire/overwire/gosrc/internal/rawjson"
	"github.com/overwire/overwire/gosrc/internal/spawn"
)

// Call runs one verb for Python. A panic in it, or an earlier one anywhere in
// the engine, is an error, and every error leaves in the text of faultText.
func Call[T any](name string, fn func() (T, error)) (T, error) {
	var out, zero T
	err := spawn.Poisoned()
	if err == nil {
		err = spawn.Guard(name, func() (err error) {
			out, err = fn()
			return err
		})
	}
	if err != nil {
		return zero, errors.New(Text(err))
	}
	return out, nil
}

// prefix begins the text of every error that crosses into Python.
const prefix = "overwire-fault:"

// Text puts an error into the form that Python reads: the prefix and a JSON
// object with the exception's name, the message for people, and where.
func Text(err error) string {
	f := struct {
		Class   string `json:"class"`
		Message string `json:"message"`
		Source  string `json:"source,omitempty"`
		Tensor  string `json:"tensor,omitempty"`
		Chunk   *int64 `json:"chunk,omitempty"`
		Offset  *int64 `json:"offset,omitempty"`
		Asked   *int64 `json:"asked,omitempty"` // these three: out of memory, where they are known
		Free    *int64 `json:"free,omitempty"`
		Total   *int64 `json:"total,omitempty"`
	}{Class: fault.Class(err), Message: "overwire: " + fault.Redact(err.Error())}
	var at *fault.At
	if errors.As(err, &at) {
		f.Source, f.Tensor = fault.Redact(at.Source), at.Tensor
		if at.Chunk >= 0 {
			f.Chunk = &at.Chunk
		}
		if at.Offset >= 0 {
			f.Offset = &at.Offset
		}
	}
	var mem *fault.Memory
	if errors.As(err, &mem) {
		for from, to := range map[*int64]**int64{&mem.Asked: &f.Asked, &mem.Free: &f.Free, &mem.Total: &f.Total} {
			if *from >= 0 {
				*to = from
			}
		}
	}
	b, jsonErr := rawjson.Marshal(f)
	if jsonErr != nil { // strings and integers always marshal
		b = []byte(`{"class":"EngineError","message":"overwire: an error without a text"}`)
	}
	return prefix + string(b)
}

// A table holds the objects of one kind that Python has handles to.
type table[T any] struct {
	kind string
	mu   sync.Mutex
	last uint64
	all  map[uint64]T
}

func newTable[T any](kind string) *table[T] { return &table[T]{kind: kind, all: map[uint64]T{}} }

func (t *table[T]) put(v T) uint64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.last++
	t.all[t.last] = v
	return t.last
}

func (t *table[T]) get(h uint64) (T, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	v, ok := t.all[h]
	if !ok {
		return v, fault.New(fault.ErrArgument, "handle %d is not that of an open %s", h, t.kind)
	}
	return v, nil
}

// take removes the object from the table; ok is false if it was not there.
func (t *table[T]) take(h uint64) (v T, ok bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	v, ok = t.all[h]
	delete(t.all, h)
	return v, ok
}
