package binding

// This file defines handles, with which Python refers to the engine's objects.

import (
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
	"github.com/overwire/overwire/gosrc/internal/regular"
	"github.com/overwire/overwire/gosrc/job"
	"github.com/overwire/overwire/gosrc/load"
	"github.com/overwire/overwire/gosrc/preload"
	"github.com/overwire/overwire/gosrc/source/fed"
	"github.com/overwire/overwire/gosrc/tensorizer"
)

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
