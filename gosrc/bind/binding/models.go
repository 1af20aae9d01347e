package binding

// This file defines the verbs that open, load, pin and preload models.

import (
	"context"
	"encoding/binary"
	"time"

	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/hoststore"
	"github.com/overwire/overwire/gosrc/job"
	"github.com/overwire/overwire/gosrc/load"
	"github.com/overwire/overwire/gosrc/nvcomp"
	"github.com/overwire/overwire/gosrc/preload"
	"github.com/overwire/overwire/gosrc/relay"
	"github.com/overwire/overwire/gosrc/tensor"
	"github.com/overwire/overwire/gosrc/tensorizer"
)

// opened is the result of opening a model, apart from its handle and its table.
type opened struct {
	Sources []openedSource `json:"sources"`
	Room    int64          `json:"room"` // see relay.RoomForChunk
	// Host is how many files are in the memory of the host store.
	Host int `json:"host"`
}

type openedSource struct {
	URI      string            `json:"uri"` // redacted
	Size     int64             `json:"size"`
	Metadata map[string]string `json:"metadata"`
	Overwire bool              `json:"overwire"`
	Remote   bool              `json:"remote"` // read over a network, including network file systems
}

// openRequest describes what to open. opened is 0 or the handle of a .tensors file that the verb `records` has
// opened. The model takes ownership of the file.
type openRequest struct {
	load.Spec
	Opened uint64 `json:"opened"`
}

func (q *openRequest) isBrief() bool { return q.Opened == 0 && load.IsBrief(&q.Spec) }

// preloadRequest describes what to preload: what to open, and how to load it.
type preloadRequest struct {
	load.Spec
	load.Options
}

type joinRequest struct {
	load.Options
	// Alone means that loads take no preloaded tensors, and preloads of these files are dropped.
	Alone bool `json:"alone"`
}

func modelVerbs() []*Verb {
	return []*Verb{
		started("open", "Open and index files. Return the model and its table.", openModel).awaited(),
		started("names", "Return the tensor names in a model's index.json files, or null if a file has no index.",
			func(ctx context.Context, _ *job.Job, q load.Spec, _ []int64) (*[]string, error) {
				names, ok, err := load.Names(ctx, q)
				if !ok {
					return nil, err
				}
				return &names, err
			}).awaited(),
		begun[loadRequest, load.Report]("load",
			"Load tensors of a model. `whole` loads every tensor completely. Destinations must stay valid until the "+
				"job has ended.", startLoad).
			ints("model", "whole").tail("for each request the tensor, the destination (0 allocates it, 1 means " +
			"that `settle` binds it), and the ranges lo0, hi0, lo1, hi1 of the first two dimensions (hi -1 means to " +
			"the end)"),
		answered("outlook",
			"Estimate the memory that a load of tensors needs. Raises OutOfMemoryError if it exceeds max_memory.",
			ofNumbered(modelOf, func(m *load.Model, q load.Prospect, n []int64) (load.Estimate, error) {
				parts, err := partsOf(n)
				if err != nil {
					return load.Estimate{}, err
				}
				return load.EstimateMemory(m, parts, q)
			})).ints("model").
			tail("pairs of a tensor and its number of elements (-1 means all), or nothing for all tensors"),
		answered("kept_blocks", "Return the numbers of the blocks that an offload keeps on the device.",
			func(_ none, n []int64) ([]int64, error) { return load.KeptBlocks(n[1:], n[0]), nil }).
			ints("keep").tail("the size of each block"),
		started("states", "Return the identities of a model's files. `samples` reads samples of plain files.",
			fileStates).awaited().ints("model", "samples"),
		answered("streams",
			"Return a copy of a model with its stored chunks as native X16 streams, its table, and the chunk sizes.",
			ofNumbered(modelOf, streamModel)).ints("model"),
		answered("settle", "Bind destinations for a load's requests that had destination 1. The load writes there "+
			"after the work that is now queued on the stream.", ofNumbered(jobOf,
			func(e *entry, _ none, n []int64) (none, error) {
				if e.load == nil {
					return none{}, errs.New(errs.ErrArgument, "settle: the job is not a load")
				}
				return none{}, e.load.Bind(n[1:], uint64(n[0]))
			})).ints("job", "stream").tail("pairs of request and address"),
		begun[load.Options, load.PinReport]("pin",
			"Read a model's files into memory for later loads. Fails while loads of the model are running.",
			func(_ *Verb, q load.Options, n []int64) (*entry, error) {
				m, err := modelOf(n[0])
				if err != nil {
					return nil, err
				}
				j, err := m.Pin(q)
				return &entry{job: j}, err
			}).ints("model"),
		answered("device",
			"Return the number of a device with a torch name: -1 for a GPU without a number, -2 for the host.",
			func(name string, _ []int64) (int64, error) { return device.Number(name) }),
		answered("prepare", "Start to prepare a GPU for a load, without waiting.",
			func(device Text, n []int64) (none, error) {
				load.Prepare(string(device), n[0] != 0)
				return none{}, nil
			}).ints("exchange"),
		begun[preloadRequest, none]("preload", "Preload files. A load can take their tensors after `join`.",
			func(_ *Verb, q preloadRequest, _ []int64) (*entry, error) {
				return &entry{pre: preload.Start(q.Spec, q.Options)}, nil
			}),
		started("join", "Allow loads of a model to take preloaded tensors of its files.", joinPreload).awaited().
			ints("model"),
		answered("host_counts", "Return this process's counters of the host store.",
			func(none, []int64) (hoststore.Counted, error) { return hoststore.CountedFiles(), nil }).afterPanics(),
		answered("sweep", "Drop the preloads of a file or object that has just been replaced.",
			func(uri string, _ []int64) (preload.Answer, error) {
				preload.Sweep(uri)
				return preload.Answer{Notes: preload.Said()}, nil
			}),
	}
}

func truth(yes bool) int64 { return map[bool]int64{true: 1}[yes] }

func openModel(ctx context.Context, _ *job.Job, q openRequest, _ []int64) (*Result, error) {
	if q.Opened != 0 {
		file, err := get[*tensorizer.Opened](q.Opened)
		if err != nil {
			return nil, err
		}
		drop(q.Opened)
		q.Spec.Opened = file
	}
	m, err := load.Open(ctx, q.Spec)
	if err != nil {
		return nil, err
	}
	ix := m.Index()
	o := opened{make([]openedSource, len(ix.Sources)), relay.RoomForChunk(m), m.FromHost()}
	for i, s := range ix.Sources {
		o.Sources[i] = openedSource{errs.RedactURI(s.URI), s.Size, s.Metadata, s.Overwire(),
			m.Sources()[i].Facts().Remote}
	}
	r, err := encode(o)
	if err != nil {
		m.Close()
		return nil, err
	}
	r.Model, r.Table = keep(m), ix
	return r, nil
}

func fileStates(ctx context.Context, _ *job.Job, _ none, n []int64) ([]load.State, error) {
	m, err := modelOf(n[0])
	if err != nil {
		return nil, err
	}
	return m.FileStates(ctx, n[1] != 0)
}

func streamModel(m *load.Model, _ none, _ []int64) (*Result, error) {
	ix, srcs, contents := nvcomp.ViewStreams(m.Index(), m.Sources())
	view, err := load.ViewOf(m, ix, srcs)
	if err != nil {
		return nil, err
	}
	return &Result{Model: keep(view), Table: ix, Numbers: contents}, nil
}

// requestWords is how many numbers encode a load request, in the order of load.Request's fields.
const requestWords = 6

// requests converts numbers from Python to load requests.
func requests(n []int64) ([]load.Request, error) {
	if len(n)%requestWords != 0 {
		return nil, errs.New(errs.ErrArgument, "expected a multiple of 6 numbers, got %d", len(n))
	}
	reqs := make([]load.Request, len(n)/requestWords)
	for i := range reqs {
		w := n[requestWords*i:]
		reqs[i] = load.Request{Tensor: w[0], Dest: uintptr(w[1]), Lo0: w[2], Hi0: w[3], Lo1: w[4], Hi1: w[5]}
	}
	return reqs, nil
}

// partsOf converts numbers from Python to parts, or returns nil if there are none.
func partsOf(n []int64) ([]load.Part, error) {
	if len(n)%2 != 0 {
		return nil, errs.New(errs.ErrArgument, "expected pairs of numbers, got %d", len(n))
	}
	var parts []load.Part
	for i := 0; i < len(n); i += 2 {
		parts = append(parts, load.Part{Tensor: n[i], Elements: n[i+1]})
	}
	return parts, nil
}

// A loadRequest has the options of a load. after is the job of an earlier load (see load.Options), or 0.
type loadRequest struct {
	load.Options
	After int64 `json:"after"`
}

func startLoad(_ *Verb, q loadRequest, n []int64) (*entry, error) {
	m, err := modelOf(n[0])
	if err != nil {
		return nil, err
	}
	if q.After != 0 {
		first, err := jobOf(q.After)
		if err != nil {
			return nil, err
		}
		if q.Options.After = first.load; first.load == nil {
			return nil, errs.New(errs.ErrArgument, "job %d is not a load, so no other load can follow it", q.After)
		}
	}
	var reqs []load.Request // nil means every tensor, completely
	if n[1] == 0 {
		if reqs, err = requests(n[2:]); err != nil {
			return nil, err
		}
	}
	l, err := m.Start(reqs, q.Options)
	if err != nil {
		return nil, err
	}
	return &entry{job: l.Job(), load: l}, nil
}

// joinSlice is how long a cancelled call may keep waiting for a preload that is opening its files.
const joinSlice = 50 * time.Millisecond

func joinPreload(ctx context.Context, _ *job.Job, q joinRequest, n []int64) (preload.Answer, error) {
	m, err := modelOf(n[0])
	if err != nil {
		return preload.Answer{}, err
	}
	for {
		a, hasJoined := preload.Join(m, q.Options, q.Alone, joinSlice)
		if hasJoined || ctx.Err() != nil {
			return a, ctx.Err()
		}
	}
}

// PackTable writes the tensors of a model to one buffer, which C converts to Python tuples.
// All integers are little-endian:
//
//	u64 tensors, u64 dtype names
//	each dtype name, by code:  u64 length, bytes
//	each tensor:               u64 name length, u64 dtype code, u64 rank,
//	                           i64 dims[rank], i64 bytes, stored, source, alias, name bytes
//
// bind/core/table.c reads it.
func PackTable(ix *tensor.Index) []byte {
	n := 16 + 16*(tensor.NumDTypes+1)
	for i := range ix.Tensors {
		n += 7*8 + 8*len(ix.Tensors[i].Shape) + len(ix.Tensors[i].Name)
	}
	b := make([]byte, 0, n)
	put := func(v int64) { b = binary.LittleEndian.AppendUint64(b, uint64(v)) }
	put(int64(len(ix.Tensors)))
	put(int64(tensor.NumDTypes + 1))
	for d := range tensor.NumDTypes + 1 {
		name := tensor.DType(d).String()
		put(int64(len(name)))
		b = append(b, name...)
	}
	for i := range ix.Tensors {
		t := &ix.Tensors[i]
		put(int64(len(t.Name)))
		put(int64(t.DType))
		put(int64(len(t.Shape)))
		for _, d := range t.Shape {
			put(d)
		}
		put(t.Bytes)
		put(t.Stored)
		put(int64(t.Source))
		put(int64(t.Alias))
		b = append(b, t.Name...)
	}
	return b
}
