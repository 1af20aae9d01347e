package peers

// This file has the flags, and what waits for them.

import (
	"context"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/spawn"
)

// lineBytes is the space of a process's flags: no two share a line of a cache.
const lineBytes = 128

// A line is a process's flags. It alone writes them, and its numbers only rise.
type line struct {
	joined    atomic.Uint64
	published atomic.Uint64 // how many pieces of its memory are complete
	taken     atomic.Uint64 // how many pieces it needs no more, in any memory
	trouble   atomic.Uint64 // it has failed
	ended     atomic.Uint64 // it uses no memory of the others any more
	alive     atomic.Uint64 // a sign of life
}

// Pauses between two looks at a flag, and how often a process's life is asked for. A
// piece is on its way for some milliseconds: with a last pause of 500 microseconds ranks
// loaded a fifth slower than with 100 or less.
const (
	firstPause = 20 * time.Microsecond
	lastPause  = 50 * time.Microsecond
	lifeEvery  = 20 * time.Millisecond
)

// show gives signs of life until Close.
func (p *Peers) show(own *line) {
	p.beat.Add(1)
	spawn.Go("peers", func() {
		defer p.beat.Done()
		tick := time.NewTicker(beat)
		defer tick.Stop()
		for {
			own.alive.Add(1)
			select {
			case <-tick.C:
			case <-p.stop:
				return
			}
		}
	})
}

// Publish says that the first pieces of this process's memory are complete.
func (p *Peers) Publish(pieces int) { p.lines[p.mine.Rank].published.Store(uint64(pieces)) }

// Taken says that this process needs the first pieces no more, in any memory.
func (p *Peers) Taken(pieces int) { p.lines[p.mine.Rank].taken.Store(uint64(pieces)) }

// Trouble says that this process has failed: those that wait for it stop.
func (p *Peers) Trouble() {
	if p.lines != nil {
		p.lines[p.mine.Rank].trouble.Store(1)
	}
}

// AwaitJoined waits until every process has begun to map the others: from then on End of
// one waits for it.
func (p *Peers) AwaitJoined(ctx context.Context) error {
	return p.poll(ctx, func() bool { return !slices.ContainsFunc(p.lines, func(l *line) bool { return l.joined.Load() == 0 }) }, nil, true)
}

// AwaitPiece waits until the first pieces of a process's memory are complete.
func (p *Peers) AwaitPiece(ctx context.Context, rank, pieces int) error {
	return p.poll(ctx, func() bool { return p.lines[rank].published.Load() >= uint64(pieces) }, nil, true)
}

// AwaitTaken waits until no other process needs the first pieces.
func (p *Peers) AwaitTaken(ctx context.Context, pieces int) error {
	return p.poll(ctx, func() bool {
		return !slices.ContainsFunc(p.lines, func(l *line) bool { return l != p.lines[p.mine.Rank] && l.taken.Load() < uint64(pieces) })
	}, nil, true)
}

// poll waits until ready, for the end of ctx, or for the loss of one of these
// processes; nil is all of them. careful: also for trouble of one.
func (p *Peers) poll(ctx context.Context, ready func() bool, whose []int, careful bool) error {
	pause, asked := firstPause, time.Now()
	for !ready() {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if careful {
			for rank, l := range p.lines {
				if l.trouble.Load() != 0 {
					return fmt.Errorf("%w: %w", errs.New(errs.ErrIO, "rank %d of this host", rank), ErrOther)
				}
			}
		}
		if now := time.Now(); now.Sub(asked) >= lifeEvery {
			asked = now
			if err := p.living(whose, now); err != nil {
				if ready() { // as its last act
					return nil
				}
				return err
			}
		}
		time.Sleep(pause)
		pause = min(2*pause, lastPause)
	}
	return nil
}

// living returns an error if one of these processes is gone, or has shown no sign of
// life for too long. One that has not joined, or has ended, is not missed.
func (p *Peers) living(whose []int, now time.Time) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	for rank, l := range p.lines {
		if rank == p.mine.Rank || whose != nil && !slices.Contains(whose, rank) || l.joined.Load() == 0 {
			continue
		}
		if n := l.alive.Load(); n != p.seen[rank] {
			p.seen[rank], p.since[rank] = n, now
		}
		why := ""
		switch {
		case !p.flags.locked(rank):
			why = "its process has ended"
		case now.Sub(p.since[rank]) > silence:
			why = fmt.Sprintf("it gave no sign of life for %v", silence)
		}
		if why == "" || l.ended.Load() != 0 {
			continue
		}
		if !slices.Contains(p.lost, rank) {
			p.lost = append(p.lost, rank)
		}
		return errs.New(errs.ErrIO, "rank %d of this host is gone: %s", rank, why)
	}
	return nil
}
