package pinned

// This file makes memory ready before anyone uses it, in the background.

import (
	"context"
	"runtime"

	"github.com/overwire/overwire/gosrc/device/cuda"
	"github.com/overwire/overwire/gosrc/device/cuda/memory"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/idle"
	"github.com/overwire/overwire/gosrc/internal/sizes"
)

// Prepare begins to make n bytes ready for the next Take of a GPU, which may come before
// they are: it takes over what there is, and the rest grows on for it. Until then one
// thread works, while a core of the process is unused. room is what that Take may ask
// for. What is kept already counts, so the same call again does nothing.
func Prepare(room, n int64, gpu *cuda.Device) (*Memory, error) {
	if gpu == nil || n <= 0 || room < n || room > 1<<45 {
		return nil, errs.New(errs.ErrArgument, "%d bytes of pinned memory, %d of address space", n, room)
	}
	n = sizes.RoundUp(n, memory.RegisterAlignment()) // the next user takes no other
	kept.mu.Lock()
	m, old := kept.all[gpu], (*Memory)(nil)
	if m != nil && !m.extendTo(room, n) {
		m, old = nil, m
	}
	var err error
	if m == nil {
		if m, err = newMemory(max(room, n), n, gpu); err == nil {
			kept.all[gpu], m.gentle = m, true
		} else {
			delete(kept.all, gpu)
		}
	}
	if err == nil {
		m.Want(n)
	}
	kept.mu.Unlock()
	if old != nil {
		old.Free()
	}
	return m, err
}

// extendTo lets kept memory grow to n bytes, if it has room for them.
func (m *Memory) extendTo(room, n int64) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.room < room || m.err != nil || m.ready%memory.RegisterAlignment() != 0 {
		return false
	}
	m.limit = min(max(m.limit, m.ready, n), m.room)
	if !m.growing {
		m.want = m.ready
	}
	m.gentle, m.ended = true, false
	return true
}

// Prepared waits until n bytes are ready, or someone has taken or freed the memory, and
// returns how many are. If the context ends first it ends the growth: what is ready
// stays.
func (m *Memory) Prepared(ctx context.Context, n int64) (int64, error) {
	for {
		m.mu.Lock()
		ready, err, signal := m.ready, m.err, m.moved
		over := m.ended || !m.gentle || !m.growing
		m.mu.Unlock()
		switch {
		case n <= ready || err == nil && over:
			return ready, nil
		case err != nil:
			return ready, err
		}
		select {
		case <-signal:
		case <-ctx.Done():
			m.mu.Lock()
			if m.gentle { // no one has taken it
				m.want = m.ready
			}
			growing, signal := m.gentle && m.growing, m.moved
			m.mu.Unlock()
			if growing {
				<-signal
			}
		}
	}
}

// Drop gives back what is kept for a GPU.
func Drop(gpu *cuda.Device) {
	if m := takeKept(gpu); m != nil {
		m.Free()
	}
}

func (m *Memory) isGentle() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.gentle
}

// waitForIdleCore waits until a core is unused, but for no more than a second.
func (m *Memory) waitForIdleCore() {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	idle.New().Wait(func() bool {
		m.mu.Lock()
		defer m.mu.Unlock()
		return !m.gentle || m.ended
	})
}
