package peers

// This file has the flags, and what waits for them.

import (
	"context"
	"fmt"
	"math"
	"slices"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/spawn"
)

// lineBytes is the space of a process's flags: no two share a line of a cache.
const lineBytes = 128

// A processFlags is a process's flags. It alone writes them, and its numbers only rise. It rings
// the bell after those that others sleep for: joined, trouble, ended.
type processFlags struct {
	bell      atomic.Uint32
	joined    atomic.Uint64 // 1: it has joined; 2: it has mapped the memory of the others
	published atomic.Uint64 // how many pieces of its memory are complete
	trouble   atomic.Uint64 // it has failed
	ended     atomic.Uint64 // it uses no memory of the others any more
	alive     atomic.Uint64 // a sign of life
}

// lifeEvery is how often those that wait ask for a process's life, and look for what rings
// no bell of theirs. A test makes it longer.
var lifeEvery = 20 * time.Millisecond

// The operations of futex(2). The memory is that of several processes.
const (
	futexWait = 0 // FUTEX_WAIT
	futexWake = 1 // FUTEX_WAKE
)

// ringBell wakes those that wait for a bell.
func ringBell(bell *atomic.Uint32) {
	bell.Add(1)
	_, _, _ = unix.Syscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(bell)), futexWake, math.MaxInt32, 0, 0, 0)
}

// waitForBell waits until a bell is not `heard`, or for lifeEvery. time.Sleep would be
// late by up to a millisecond: in a process whose goroutines all wait, Go's timers are as
// coarse as epoll_wait's.
func waitForBell(bell *atomic.Uint32, heard uint32) {
	most := unix.NsecToTimespec(lifeEvery.Nanoseconds())
	_, _, _ = unix.Syscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(bell)), futexWait, uintptr(heard),
		uintptr(unsafe.Pointer(&most)), 0, 0)
}

// showLife gives signs of life until Close.
func (p *Peers) showLife(own *processFlags) {
	spawn.GoFor(&p.beat, "peers", func() {
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

// Publish says that the first pieces of this process's memory are complete. It rings no bell: the
// others ask again and again.
func (p *Peers) Publish(pieces int) { p.lines[p.mine.Rank].published.Store(uint64(pieces)) }

// CountPublished is how many pieces of a process's memory are complete.
func (p *Peers) CountPublished(rank int) int { return int(p.lines[rank].published.Load()) }

// takenBytes is the space for what one process has taken of each.
func takenBytes(ranks int) int { return (8*ranks + lineBytes - 1) / lineBytes * lineBytes }

// flagBytes is the space of all flags: the lines, and behind them what each takes of each.
func flagBytes(ranks int) int64 { return int64(ranks) * int64(lineBytes+takenBytes(ranks)) }

// takenOf is how many pieces of an owner's memory a process needs no more. That process alone writes it.
func (p *Peers) takenOf(owner, by int) *atomic.Uint64 {
	return (*atomic.Uint64)(unsafe.Add(p.flags.base, p.ranks*lineBytes+by*takenBytes(p.ranks)+8*owner))
}

// ReleasePieces says that this process needs the first pieces of another's memory no more.
func (p *Peers) ReleasePieces(owner, pieces int) { p.takenOf(owner, p.mine.Rank).Store(uint64(pieces)) }

// CountTaken is how many pieces of this process's memory no other needs.
func (p *Peers) CountTaken() int {
	least := uint64(math.MaxInt)
	for rank := range p.lines {
		if rank != p.mine.Rank {
			least = min(least, p.takenOf(p.mine.Rank, rank).Load())
		}
	}
	return int(least)
}

// CheckOthers returns an error if another process has failed, or is gone, for which it looks every
// lifeEvery.
func (p *Peers) CheckOthers() error {
	now := time.Now()
	if now.Sub(p.looked) < lifeEvery {
		return p.findTrouble()
	}
	p.looked = now
	return p.checkAll()
}

// checkAll returns an error if another process has failed or is gone.
func (p *Peers) checkAll() error {
	err := p.findTrouble()
	for rank := 0; rank < p.ranks && err == nil; rank++ {
		err = p.checkLife(rank)
	}
	return err
}

// findTrouble returns the error of a process that has failed.
func (p *Peers) findTrouble() error {
	for rank, l := range p.lines {
		if l.trouble.Load() != 0 {
			return fmt.Errorf("%w: %w", errs.New(errs.ErrIO, "rank %d of this host", rank), ErrOther)
		}
	}
	return nil
}

// ReportFailure says that this process has failed: those that wait for it stop.
func (p *Peers) ReportFailure() {
	if p.lines != nil {
		own := p.lines[p.mine.Rank]
		own.trouble.Store(1)
		ringBell(&own.bell)
	}
}

// AwaitJoined waits until every process has begun to map the others: from then on End of
// one waits for it.
func (p *Peers) AwaitJoined(ctx context.Context) error {
	for _, l := range p.lines {
		if err := l.awaitReady(ctx, func() bool { return l.joined.Load() > 0 }, p.checkAll); err != nil {
			return err
		}
	}
	return nil
}

// AwaitMapTurn waits until the process before this one has ended its turn to map the memory of others.
// The driver lets one process map at a time, and while another waits for that, its copies wait, too.
func (p *Peers) AwaitMapTurn(ctx context.Context) error {
	if p.mine.Rank == 0 {
		return nil
	}
	l := p.lines[p.mine.Rank-1]
	return l.awaitReady(ctx, func() bool { return l.joined.Load() > 1 }, p.checkAll)
}

// EndMapTurn says that this process has mapped the memory of the others.
func (p *Peers) EndMapTurn() {
	own := p.lines[p.mine.Rank]
	own.joined.Store(2)
	ringBell(&own.bell)
}

// awaitReady waits until the process is ready, which rings its bell then, for the end of ctx, or for an error of
// check, which it calls at least every lifeEvery.
func (l *processFlags) awaitReady(ctx context.Context, ready func() bool, check func() error) error {
	for {
		heard := l.bell.Load()
		if ready() {
			return nil
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if err := check(); err != nil {
			if ready() { // as its last act
				return nil
			}
			return err
		}
		waitForBell(&l.bell, heard)
	}
}

// checkLife returns an error if a process is gone, or has shown no sign of life for too long. One that has
// not joined, or has ended, is not missed.
func (p *Peers) checkLife(rank int) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	l, now, why := p.lines[rank], time.Now(), ""
	if rank == p.mine.Rank || l.joined.Load() == 0 {
		return nil
	}
	if n := l.alive.Load(); n != p.seen[rank] {
		p.seen[rank], p.since[rank] = n, now
	}
	switch {
	case !p.processes[rank].isAlive():
		why = "its process has ended"
	case now.Sub(p.since[rank]) > silence:
		why = fmt.Sprintf("it gave no sign of life for %v", silence)
	}
	if why == "" || l.ended.Load() != 0 {
		return nil
	}
	if !slices.Contains(p.lost, rank) {
		p.lost = append(p.lost, rank)
	}
	return errs.New(errs.ErrIO, "rank %d of this host is gone: %s", rank, why)
}
