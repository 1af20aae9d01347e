package save

// This file holds a save's stored bytes in host memory, so that the tensors may change
// before their files are written.

import (
	"context"
	"sync"
	"time"

	"github.com/overwire/overwire/gosrc/device/cuda"
	"github.com/overwire/overwire/gosrc/device/pinned"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/hostmem"
	"github.com/overwire/overwire/gosrc/internal/spawn"
)

// A stagingMemory is the memory of a save that is staged.
type stagingMemory struct {
	mem  *pinned.Memory
	most int64

	mu  sync.Mutex
	pos int64
}

// openStage takes the memory, or refuses a save that may need more than there is: as
// many bytes as if nothing were compressed.
func (w *writer) openStage(parts []outputFile) error {
	most, expected := int64(0), 0.0
	for i := range parts {
		most += parts[i].bytes() + 1<<20
		for _, t := range parts[i].items {
			pad := 4096 + 256*(t.bytes/w.spec.ChunkBytes+1)
			most += pad
			expected += float64(pad)
			if t.form != alias {
				most += t.bytes
				expected += float64(t.bytes) * t.expect
			}
		}
	}
	var on *cuda.Device
	if len(w.gpus) > 0 {
		on = w.gpus[0].on
	}
	refuse := func(left int64, why string) error {
		return errs.In("save", w.spec.Path, &errs.Memory{Where: "host", Asked: most, Free: left, Total: left,
			For: "a save that the caller does not wait for", Err: why})
	}
	if limit := w.spec.MaxMemory; limit > 0 && most > limit {
		return refuse(limit, "max_memory")
	}
	if left := hostmem.Available() + pinned.Ready(on); most > left {
		return refuse(left, "available")
	}
	mem, err := pinned.Take(most, max(most, pinned.Ready(on)), on)
	if err != nil {
		return errs.In("save", w.spec.Path, err)
	}
	mem.Want(int64(expected * 1.01))
	w.stage = &stagingMemory{mem: mem, most: most}
	return nil
}

// freeStage gives the memory back. No one uses it any more.
func (s *stagingMemory) freeStage() {
	if s != nil {
		s.mem.Keep()
	}
}

// takeMemory is memory for n bytes, until the save ends.
func (s *stagingMemory) takeMemory(ctx context.Context, n int64) ([]byte, error) {
	s.mu.Lock()
	off := s.pos
	s.pos += n
	s.mu.Unlock()
	if off+n > s.most {
		return nil, errs.New(errs.ErrEngine, "%d bytes of stored bytes, %d were expected at most", off+n, s.most)
	}
	if err := s.mem.Await(ctx, off+n); err != nil {
		return nil, err
	}
	return s.mem.Bytes(off, n), nil
}

// A staged is a file whose bytes wait in a stage.
type staged struct {
	draft
	ctx   context.Context
	stage *stagingMemory
	clock *clock

	mu   sync.Mutex
	todo []later
}

// A later is what is to be written: bytes of a file, or, without any, zeros up to end.
type later struct {
	p       []byte
	at, end int64
}

// Write keeps a copy.
func (s *staged) Write(p []byte, at int64) error {
	defer addLap(&s.clock.write, time.Now())
	b, err := s.stage.takeMemory(s.ctx, int64(len(p)))
	if err != nil {
		return err
	}
	copy(b, p)
	s.holdBytes(b, at)
	return nil
}

// WriteView keeps a copy, too: the caller's bytes may change before the save ends.
func (s *staged) WriteView(p []byte, at int64) error { return s.Write(p, at) }

// holdBytes is Write of bytes that stay until the save ends.
func (s *staged) holdBytes(p []byte, at int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.todo = append(s.todo, later{p: p, at: at})
}

func (s *staged) Skip(lo, hi int64) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.todo = append(s.todo, later{at: lo, end: hi})
	return nil
}

// write writes what was staged to the file. passed learns of each write.
func (s *staged) write(ctx context.Context, threads int, passed func(n int64)) error {
	return spawn.Each(ctx, "save.write", threads, len(s.todo), func(i int) error {
		x := &s.todo[i]
		if x.p == nil {
			return s.draft.Skip(x.at, x.end)
		}
		if err := s.draft.WriteView(x.p, x.at); err != nil {
			return err
		}
		passed(int64(len(x.p)))
		return nil
	})
}
