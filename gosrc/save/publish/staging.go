package publish

// This file keeps stored bytes in host memory, so the tensors may change before their files are written.

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/overwire/overwire/gosrc/device/cuda"
	"github.com/overwire/overwire/gosrc/device/pinned"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/hostmem"
	"github.com/overwire/overwire/gosrc/internal/spawn"
	"github.com/overwire/overwire/gosrc/source"
)

// StagedMemory holds the stored bytes of one save.
type StagedMemory struct {
	mem  *pinned.Memory
	most int64

	mu  sync.Mutex
	pos int64
}

// TakeStaged takes memory for at most `most` bytes. The save is expected to need `expected` bytes. TakeStaged refuses a
// save that may need more than limit (0 means no limit) or more memory than is available. on is the GPU that copies to
// the memory, or nil. path is for messages.
func TakeStaged(path string, most, expected, limit int64, on *cuda.Device) (*StagedMemory, error) {
	refuse := func(left int64, why string) error {
		return errs.In("save", path, &errs.Memory{Where: "host", Asked: most, Free: left, Total: left,
			For: "a save that the caller does not wait for", Err: why})
	}
	if limit > 0 && most > limit {
		return nil, refuse(limit, "max_memory")
	}
	if left := hostmem.Available() + pinned.Ready(on); most > left {
		return nil, refuse(left, "available")
	}
	mem, err := pinned.Take(most, max(most, pinned.Ready(on)), on)
	if err != nil {
		return nil, errs.In("save", path, err)
	}
	mem.Want(expected)
	return &StagedMemory{mem: mem, most: most}, nil
}

// Free releases the memory, which must not be in use anymore. s may be nil.
func (s *StagedMemory) Free() {
	if s != nil {
		s.mem.Keep()
	}
}

// Take returns memory for n bytes, which is valid until Free.
func (s *StagedMemory) Take(ctx context.Context, n int64) ([]byte, error) {
	s.mu.Lock()
	off := s.pos
	s.pos += n
	s.mu.Unlock()
	if off+n > s.most {
		return nil, errs.New(errs.ErrEngine, "a staged save has %d stored bytes, expected at most %d", off+n, s.most)
	}
	if err := s.mem.Await(ctx, off+n); err != nil {
		return nil, err
	}
	return s.mem.Bytes(off, n), nil
}

// Taken returns how many bytes were taken.
func (s *StagedMemory) Taken() int64 { return s.pos }

// A StagedDraft keeps its bytes in staged memory until Flush writes them.
type StagedDraft struct {
	source.Output
	ctx   context.Context
	stage *StagedMemory
	time  *atomic.Int64 // copy time in nanoseconds is added to it

	mu   sync.Mutex
	todo []stagedWrite
}

// A stagedWrite writes p at the offset at. If p is nil, it writes zeros up to end.
type stagedWrite struct {
	p       []byte
	at, end int64
}

// Stage returns a draft that keeps the bytes of d until Flush.
func (s *StagedMemory) Stage(ctx context.Context, d source.Output, time *atomic.Int64) *StagedDraft {
	return &StagedDraft{Output: d, ctx: ctx, stage: s, time: time}
}

// Write stages a copy of p.
func (d *StagedDraft) Write(p []byte, at int64) error {
	start := time.Now()
	defer func() { d.time.Add(int64(time.Since(start))) }()
	b, err := d.stage.Take(d.ctx, int64(len(p)))
	if err != nil {
		return err
	}
	copy(b, p)
	d.Hold(b, at)
	return nil
}

// WriteView calls Write, because the caller's bytes may change before the save ends.
func (d *StagedDraft) WriteView(p []byte, at int64) error { return d.Write(p, at) }

// Hold is Write for bytes that are already in the staged memory.
func (d *StagedDraft) Hold(p []byte, at int64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.todo = append(d.todo, stagedWrite{p: p, at: at})
}

// Skip records that [lo, hi) is zero.
func (d *StagedDraft) Skip(lo, hi int64) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.todo = append(d.todo, stagedWrite{at: lo, end: hi})
	return nil
}

// Flush writes the staged bytes to the file. It calls passed with the number of bytes of each write.
func (d *StagedDraft) Flush(ctx context.Context, threads int, passed func(n int64)) error {
	return spawn.Each(ctx, "save.write", threads, len(d.todo), func(i int) error {
		x := &d.todo[i]
		if x.p == nil {
			return d.Output.Skip(x.at, x.end)
		}
		if err := d.Output.WriteView(x.p, x.at); err != nil {
			return err
		}
		passed(int64(len(x.p)))
		return nil
	})
}
