package binding

// This file defines handles, with which Python refers to the engine's objects.

import (
	"sync"
	"sync/atomic"

	"github.com/overwire/overwire/gosrc/delta"
	"github.com/overwire/overwire/gosrc/device/cuda/stream"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/load"
	"github.com/overwire/overwire/gosrc/source/fed"
	"github.com/overwire/overwire/gosrc/tensorizer"
)

// handles maps numbers to the objects that Python holds: *load.Model, *entry (a job), *stream.Batch, *delta.File,
// *tensorizer.Opened and *fed.Feed. A number is never reused, so a stale handle is an error and never refers to another
// object.
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

// drop removes a handle and returns its object, or nil if there was none.
func drop(h uint64) any {
	v, _ := handles.LoadAndDelete(h)
	return v
}
