package peers

// This file defines the flags with which processes announce their progress and wait for each other, and paces polls.

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/overwire/overwire/gosrc/device/cuda/queue"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/spawn"
	"golang.org/x/sys/unix"
)

// lineBytes is the space for a process's flags. It keeps the flags of different processes in different cache lines.
const lineBytes = 128

// processFlags are the flags of one process. Only that process writes them, and the numbers only rise. Others sleep
// while they wait for joined, trouble, ended or announcements, so the process rings the bell after changing one of
// these.
type processFlags struct {
	bell      atomic.Uint32
	joined    atomic.Uint64 // 1: has joined; 2: has mapped the memory of the others
	published atomic.Uint64 // number of complete pieces in its memory
	trouble   atomic.Uint64 // 1: has failed
	ended     atomic.Uint64 // 1: no longer uses memory of the others
	alive     atomic.Uint64 // heartbeat

	// announcements has the values of MeetAt for the last even and odd steps, with the step in the upper half. A
	// process cannot be two steps ahead of another one.
	announcements [2]atomic.Uint64
}

// A Board has the flags of all processes in shared memory and watches the other processes.
type Board struct {
	rank, ranks int
	flags       *sharedMemory
	lines       []*processFlags // nil before joining
	processes   []*process      // indexed by rank; nil for this process, and before joining

	stop chan struct{} // ends the heartbeat
	beat sync.WaitGroup

	mu     sync.Mutex
	seen   []uint64 // last heartbeat of each process
	since  []time.Time
	lost   []int
	looked time.Time // last check for life in CheckOthers; not guarded by mu
}

// lifeEvery is how often waiting processes check whether others are alive, and check flags that change without
// a bell. A test makes it longer.
var lifeEvery = 20 * time.Millisecond

// Operations of futex(2) for memory that processes share.
const (
	futexWait = 0 // FUTEX_WAIT
	futexWake = 1 // FUTEX_WAKE
)

// connect connects this process with the processes that made these offers.
func (b *Board) connect(offers []Offer) error {
	if b.flags == nil {
		f, err := openShared(&offers[0], offers[0].Flags, flagBytes(b.ranks))
		if err != nil {
			return err
		}
		b.flags = f
	}
	for rank := range offers {
		b.lines = append(b.lines, (*processFlags)(unsafe.Add(b.flags.base, rank*lineBytes)))
		b.since[rank] = time.Now()
	}
	for rank := range offers {
		if rank == b.rank {
			continue
		}
		var err error
		if b.processes[rank], err = watchProcess(offers[rank].Process); err != nil {
			b.lines = nil // this process must not signal anything
			return err
		}
	}
	own := b.lines[b.rank]
	own.joined.Store(1)
	ringBell(&own.bell)
	b.showLife(own)
	return nil
}

// ringBell wakes every process that waits for this bell.
func ringBell(bell *atomic.Uint32) {
	bell.Add(1)
	_, _, _ = unix.Syscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(bell)), futexWake, math.MaxInt32, 0, 0, 0)
}

// waitForBell waits until a bell's value differs from heard, but at most lifeEvery. It does not use time.Sleep,
// which could be a millisecond late: if all goroutines of a process wait, Go's timers have the resolution of
// epoll_wait.
func waitForBell(bell *atomic.Uint32, heard uint32) {
	most := unix.NsecToTimespec(lifeEvery.Nanoseconds())
	_, _, _ = unix.Syscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(bell)), futexWait, uintptr(heard),
		uintptr(unsafe.Pointer(&most)), 0, 0)
}

// showLife sends heartbeats until Close.
func (b *Board) showLife(own *processFlags) {
	spawn.GoFor(&b.beat, "peers", func() {
		tick := time.NewTicker(beat)
		defer tick.Stop()
		for {
			own.alive.Add(1)
			select {
			case <-tick.C:
			case <-b.stop:
				return
			}
		}
	})
}

// Publish announces that the first pieces of this process's memory are complete. It does not ring the bell,
// because the others poll.
func (b *Board) Publish(pieces int) { b.lines[b.rank].published.Store(uint64(pieces)) }

// CountPublished returns how many pieces of a process's memory are complete.
func (b *Board) CountPublished(rank int) int { return int(b.lines[rank].published.Load()) }

// takenBytes is the space for one process's counts of taken pieces, one for each owner. A piece is taken when the
// process no longer needs it.
func takenBytes(ranks int) int { return (8*ranks + lineBytes - 1) / lineBytes * lineBytes }

// flagBytes is the space for all flags: first the lines, then each process's counts of taken pieces.
func flagBytes(ranks int) int64 { return int64(ranks) * int64(lineBytes+takenBytes(ranks)) }

// takenOf returns how many pieces of an owner's memory a process no longer needs. Only that process writes the number.
func (b *Board) takenOf(owner, by int) *atomic.Uint64 {
	return (*atomic.Uint64)(unsafe.Add(b.flags.base, b.ranks*lineBytes+by*takenBytes(b.ranks)+8*owner))
}

// ReleasePieces announces that this process no longer needs the first pieces of another process's memory.
func (b *Board) ReleasePieces(owner, pieces int) { b.takenOf(owner, b.rank).Store(uint64(pieces)) }

// CountTaken returns how many pieces of this process's memory no other process needs.
func (b *Board) CountTaken() int {
	least := uint64(math.MaxInt)
	for rank := range b.lines {
		if rank != b.rank {
			least = min(least, b.takenOf(b.rank, rank).Load())
		}
	}
	return int(least)
}

// CheckOthers returns an error if another process has failed or is gone. It looks for processes that are gone
// at most once per lifeEvery.
func (b *Board) CheckOthers() error {
	now := time.Now()
	if now.Sub(b.looked) < lifeEvery {
		return b.findTrouble()
	}
	b.looked = now
	return b.checkAll()
}

// checkAll returns an error if another process has failed or is gone.
func (b *Board) checkAll() error {
	err := b.findTrouble()
	for rank := 0; rank < b.ranks && err == nil; rank++ {
		err = b.checkLife(rank)
	}
	return err
}

// findTrouble returns an error if a process has failed.
func (b *Board) findTrouble() error {
	for rank, l := range b.lines {
		if l.trouble.Load() != 0 {
			return fmt.Errorf("%w: %w", errs.New(errs.ErrIO, "rank %d of this host", rank), ErrOther)
		}
	}
	return nil
}

// ReportFailure announces that this process has failed, so that processes waiting for it stop.
func (b *Board) ReportFailure() {
	if b.lines != nil {
		own := b.lines[b.rank]
		own.trouble.Store(1)
		ringBell(&own.bell)
	}
}

// AwaitJoined waits until every process has joined. From then on, another process's End waits for this one.
func (b *Board) AwaitJoined(ctx context.Context) error {
	for _, l := range b.lines {
		if err := l.awaitReady(ctx, func() bool { return l.joined.Load() > 0 }, b.checkAll); err != nil {
			return err
		}
	}
	return nil
}

// AwaitMapTurn waits until the process with the previous rank has mapped the memory of the others. The driver
// maps for one process at a time, and also delays the copies of processes that wait.
func (b *Board) AwaitMapTurn(ctx context.Context) error {
	if b.rank == 0 {
		return nil
	}
	l := b.lines[b.rank-1]
	return l.awaitReady(ctx, func() bool { return l.joined.Load() > 1 }, b.checkAll)
}

// EndMapTurn announces that this process has mapped the memory of the others.
func (b *Board) EndMapTurn() {
	own := b.lines[b.rank]
	own.joined.Store(2)
	ringBell(&own.bell)
}

// MeetAt announces a value for a step, and returns the values that all processes have announced for it. Steps count
// from 1. If ctx ends before that, it returns fewer values, and the call may be repeated. It returns an error if
// another process has failed, is gone, or has ended before this step.
func (b *Board) MeetAt(ctx context.Context, step, value uint32) ([]uint32, error) {
	own := b.lines[b.rank]
	own.announcements[step%2].Store(uint64(step)<<32 | uint64(value))
	ringBell(&own.bell)
	var values []uint32
	for _, l := range b.lines {
		var word uint64
		err := l.awaitReady(ctx, func() bool {
			word = l.announcements[step%2].Load()
			return word>>32 == uint64(step)
		}, b.CheckPresent)
		if err != nil && err == context.Cause(ctx) {
			return values, nil
		}
		if err != nil {
			return nil, err
		}
		values = append(values, uint32(word))
	}
	return values, nil
}

// CheckPresent is like CheckOthers, and also returns an error if another process has ended. It prefers the error of a
// process that has failed or is gone, because the others end after that.
func (b *Board) CheckPresent() error {
	for rank, l := range b.lines {
		if rank != b.rank && l.ended.Load() != 0 {
			return cmp.Or(b.checkAll(), errs.New(errs.ErrIO, "rank %d of this host has closed", rank))
		}
	}
	return b.CheckOthers()
}

// awaitReady waits until ready returns true, ctx ends, or check returns an error. The process rings its bell
// when it becomes ready. check is called at least once per lifeEvery.
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
			if ready() { // became ready before it failed
				return nil
			}
			return err
		}
		waitForBell(&l.bell, heard)
	}
}

// checkLife returns an error if a process is gone or has sent no heartbeat for too long. It ignores processes
// that have not joined or have ended.
func (b *Board) checkLife(rank int) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	l, now, why := b.lines[rank], time.Now(), ""
	if rank == b.rank || l.joined.Load() == 0 {
		return nil
	}
	if n := l.alive.Load(); n != b.seen[rank] {
		b.seen[rank], b.since[rank] = n, now
	}
	switch {
	case !b.processes[rank].isAlive():
		why = "its process has ended"
	case now.Sub(b.since[rank]) > silence:
		why = fmt.Sprintf("it sent no heartbeat for %v", silence)
	}
	if why == "" || l.ended.Load() != 0 {
		return nil
	}
	if !slices.Contains(b.lost, rank) {
		b.lost = append(b.lost, rank)
	}
	return errs.New(errs.ErrIO, "rank %d of this host is gone: %s", rank, why)
}

// awaitEnded waits until all others have ended. It returns the error of the first process that is gone.
func (b *Board) awaitEnded(ctx context.Context) (first error) {
	for rank, l := range b.lines {
		hasEnded := func() bool { return l.joined.Load() == 0 || l.ended.Load() != 0 }
		err := l.awaitReady(ctx, hasEnded, func() error { return b.checkLife(rank) })
		first = cmp.Or(first, err)
	}
	return first
}

// Lost returns the ranks of processes that are gone without having ended.
func (b *Board) Lost() []int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.lost
}

// A Pacer rests between two polls for events of the device and other processes, which occur every few microseconds. In
// a virtual machine, a sleeping goroutine wakes up a few hundred microseconds late, and waking one takes about as long.
// The longer there is no work, the longer it rests. The zero value is ready to use.
type Pacer struct{ idle time.Time } // when the work ran out, or zero while there is work

const (
	// spinTime is how long a Pacer spins without work before it sleeps.
	spinTime = 200 * time.Microsecond
	// longestRest is the maximum sleep between two polls.
	longestRest = time.Millisecond
)

// RestUnless is called after each poll. worked means that there was work.
func (p *Pacer) RestUnless(worked bool) {
	if worked {
		p.idle = time.Time{}
		return
	}
	now := time.Now()
	if p.idle.IsZero() {
		p.idle = now
	}
	idle := now.Sub(p.idle)
	if idle < spinTime {
		queue.PauseBriefly()
		return
	}
	nap := unix.NsecToTimespec(min(idle/8, longestRest).Nanoseconds())
	_ = unix.ClockNanosleep(unix.CLOCK_MONOTONIC, 0, &nap, nil) // time.Sleep may be a millisecond late
}
