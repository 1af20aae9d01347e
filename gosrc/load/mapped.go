package load

// This file maps plain files, and faults in their pages before they are accessed.
//
// A process can only have about 65,000 mappings. A model may have more tensors than that, or be loaded row by row. So
// all loads of a model share one mapping of each file, and each byte of the mapping is given out only once. If a load
// requests bytes that were given out before, it copies them. If there are many such bytes, it maps the file again. The
// number of these private mappings is limited.

import (
	"context"
	"errors"
	"runtime"
	"slices"
	"sort"
	"sync"
	"unsafe"

	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/device/cpu"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/idle"
	"github.com/overwire/overwire/gosrc/internal/spawn"
	"github.com/overwire/overwire/gosrc/source"
)

const (
	// little is the size in bytes below which copying is faster than mapping a file. After littleLoads such loads the
	// file is mapped anyway, so more loads cost nothing.
	little, littleLoads = 64 << 10, 16
	// ownMappings is the maximum number of private mappings of a file.
	ownMappings = 1000
	mostSpans   = 1 << 18
)

type mapped struct {
	base  unsafe.Pointer
	block *device.Block
}

// A fileMapping is the state of one source that the loads of a model share.
type fileMapping struct {
	mu            sync.Mutex
	mapped              // held by the model; its block is nil before the file is mapped
	owned         spans // bytes that were given out, even if they have been released
	littles, owns int   // numbers of small loads that were copied, and of private mappings
}

// spans are ascending, non-adjacent byte ranges [from, to).
type spans [][2]int64

// addRange adds a range. It returns false, without adding it, if it overlaps an earlier one or there are too many
// ranges.
func (s *spans) addRange(from, to int64) bool {
	all := *s
	i := sort.Search(len(all), func(i int) bool { return all[i][1] > from })
	if i < len(all) && all[i][0] < to {
		return false
	}
	left, right := i > 0 && all[i-1][1] == from, i < len(all) && all[i][0] == to
	switch {
	case left && right:
		all[i-1][1] = all[i][1]
		*s = slices.Delete(all, i, i+1)
	case left:
		all[i-1][1] = to
	case right:
		all[i][0] = from
	case len(all) >= mostSpans:
		return false
	default:
		*s = slices.Insert(all, i, [2]int64{from, to})
	}
	return true
}

// A run is the byte range of a request in its file.
type run struct {
	request int
	off, n  int64
}

func totalBytes(runs []run) (n int64) {
	for _, r := range runs {
		n += r.n
	}
	return n
}

// divideRuns divides the requests of one source into views of the shared mapping, views of a private mapping, and
// copies. The caller must hold the model.
func (f *fileMapping) divideRuns(runs []run) (shared, own, copies []run) {
	slices.SortFunc(runs, func(a, b run) int { return int(min(1, max(-1, a.off-b.off))) })
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.block == nil && f.littles < littleLoads && totalBytes(runs) < little {
		f.littles++
		return nil, nil, runs
	}
	var rest []run
	for _, r := range runs {
		if f.owned.addRange(r.off, r.off+r.n) {
			shared = append(shared, r)
		} else {
			rest = append(rest, r)
		}
	}
	if f.owns >= ownMappings || totalBytes(rest) < little {
		return shared, nil, rest
	}
	var mine spans
	for _, r := range rest {
		if mine.addRange(r.off, r.off+r.n) {
			own = append(own, r)
		} else {
			copies = append(copies, r)
		}
	}
	f.owns++
	return shared, own, copies
}

// fileViews holds the requests of a load that the pipeline does not read.
type fileViews struct {
	mapped []bool // indexed by request: whether it is in a mapped file
	copies []run  // requests that the job copies before the pipeline starts
}

// mapFile gives requests of one source memory in mappings, and returns the requests that must be copied.
func (v *fileViews) mapFile(m *Model, source int, runs []run, mem []device.Memory) (copies []run, err error) {
	shared, own, copies := m.mappings[source].divideRuns(runs)
	if err := v.view(shared, mem, func(holders int64) (mapped, error) {
		return m.mappings[source].share(m.srcs[source], holders)
	}); err != nil {
		return nil, err
	}
	return copies, v.view(own, mem, func(holders int64) (mapped, error) {
		return mapSource(m.srcs[source], holders, false)
	})
}

// view gives requests memory in one mapping.
func (v *fileViews) view(runs []run, mem []device.Memory, mapping func(holders int64) (mapped, error)) error {
	if len(runs) == 0 {
		return nil
	}
	mp, err := mapping(int64(len(runs)))
	if err != nil {
		return err
	}
	for _, r := range runs {
		v.mapped[r.request] = true
		mem[r.request] = device.Memory{Ptr: unsafe.Add(mp.base, r.off), Bytes: r.n, Block: mp.block}
	}
	return nil
}

// copyLittle reads the requests in v.copies.
func (v *fileViews) copyLittle(ctx context.Context, l *Loading) error {
	for _, r := range v.copies {
		t := &l.model.ix.Tensors[l.wants[r.request].Data]
		if err := l.model.srcs[t.Source].ReadAt(ctx, l.out.mem[r.request].Slice(), r.off); err != nil {
			if at, ok := errors.AsType[*errs.At](err); ok && at.Tensor == "" {
				at.Tensor = t.Name
			}
			return err
		}
		l.job.Bytes.Add(r.n)
	}
	return nil
}

// share returns the shared mapping of its source, after adding n holders to it.
func (f *fileMapping) share(src source.Source, n int64) (mapped, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.block == nil {
		got, err := mapSource(src, 1, true)
		if err != nil {
			return mapped{}, err
		}
		f.mapped = got
	} else if err := withFD(src, func(fd int) error { return cpu.StillHas(fd, src.Size()) }); err != nil {
		return mapped{}, err
	}
	for range n {
		f.block.Hold()
	}
	return f.mapped, nil
}

func mapSource(src source.Source, holders int64, alone bool) (mp mapped, err error) {
	err = withFD(src, func(fd int) (err error) {
		mp.base, mp.block, err = cpu.MapFile(fd, src.Size(), holders, alone)
		return err
	})
	return mp, err
}

// withFD calls fn with the file descriptor of a source. The source must be a local file.
func withFD(src source.Source, fn func(fd int) error) error {
	err := src.Facts().File.WithFD(fn)
	var at *errs.At
	switch {
	case errors.As(err, &at) && at.Source == "":
		at.Source = src.URI()
		return at
	case err != nil:
		return &errs.At{Verb: "map", Source: src.URI(), Chunk: -1, Offset: -1, Err: err}
	}
	return nil
}

const populateStep = 32 << 20 // bytes that one call populates

// prefaultPages populates the pages of mapped tensors in the background; the job does not wait for it. One call
// populates neighbours in the same mapping. It uses only cores that the process leaves idle, because a caller that
// immediately reads on all cores is faster without it. It holds a mapping until its pages are populated, the caller
// has released the mapping, or no core was free for a second.
func prefaultPages(mem []device.Memory, maps []int) {
	runs := make([]device.Memory, 0, len(maps))
	for _, i := range maps {
		m := mem[i]
		if k := len(runs) - 1; k >= 0 && runs[k].Block == m.Block {
			r := &runs[k]
			at := int64(uintptr(m.Ptr)) - int64(uintptr(r.Ptr))
			if at >= 0 && at <= r.Bytes+populateStep && at+m.Bytes <= populateStep {
				r.Bytes = max(r.Bytes, at+m.Bytes)
				continue
			}
		} else {
			m.Block.Hold() // once for consecutive runs of one block
		}
		runs = append(runs, m)
	}
	spawn.Go("prefault", func() {
		runtime.LockOSThread() // for idle.Cores
		defer runtime.UnlockOSThread()
		cores := idle.New()
		for i, r := range runs {
			for at := int64(0); at < r.Bytes; at += populateStep {
				// The disk reads the next step while this step is populated.
				switch next := at + populateStep; {
				case next < r.Bytes:
					cpu.Announce(unsafe.Add(r.Ptr, next), min(populateStep, r.Bytes-next))
				case i+1 < len(runs):
					cpu.Announce(runs[i+1].Ptr, min(populateStep, runs[i+1].Bytes))
				}
				if !cores.Wait(r.Block.Alone) {
					break
				}
				// An error here occurs again when the page is accessed.
				_ = cpu.Populate(unsafe.Add(r.Ptr, at), min(populateStep, r.Bytes-at))
			}
			if i+1 == len(runs) || runs[i+1].Block != r.Block {
				device.Memory{Block: r.Block}.Release() // undoes the Hold above
			}
		}
	})
}
