// Package peers connects processes of a host that load together. Each has GPU or host memory that the others
// read, and they tell each other their progress by flags in shared memory.
//
// New makes one process's part, and its Offer says how to reach it. The caller brings every process's offer to
// every other. Join connects the processes by their flags, and MapMemoryOf maps the memory of one. All waiting
// processes notice when another ends early, dies or hangs. End is the last step: it returns when no process uses
// another's memory any more. If this process has failed or is cancelled, End returns soon and finishes in the
// background. Nothing has a name in a file system, so a process that dies leaves nothing there.
//
// The methods are safe for concurrent use, with these exceptions: New, Join, End and Close must not run at the
// same time as another method; MapMemoryOf for the same process, and CheckOthers, may have one caller at a time.
package peers

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/device/cuda"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/spawn"
)

// An Offer says how the others reach a process's part.
type Offer struct {
	Rank    int    `json:"rank"`
	Process int    `json:"process"`
	Token   string `json:"token"` // first bytes of its files
	Flags   int    `json:"flags"` // descriptor of the flags; only rank 0 has them
	File    int    `json:"file"`  // descriptor of host memory; -1 if it is a GPU's
	Memory  string `json:"memory"`
	Bytes   int64  `json:"bytes"`
}

// ErrOther is the class of errors of CheckOthers and the Await methods when another process has failed. That
// process's own error says more.
var ErrOther = errors.New("another process of the group has failed")

// silence is how long a living process may send no heartbeat before the others give it up. beat is the interval
// of heartbeats. Tests make them shorter.
var silence, beat = 30 * time.Second, 200 * time.Millisecond

// grace is how long a process that has failed or is cancelled waits for the others.
const grace = 500 * time.Millisecond

// A Peers is one process's part.
type Peers struct {
	Board  Board
	gpu    *cuda.Device // nil: the host
	mine   Offer
	offers []Offer

	memory device.Memory    // of the GPU
	file   *sharedMemory    // memory of the host
	at     []unsafe.Pointer // by rank: address of its memory in this process; atomic
	files  []*sharedMemory
	ended  bool
	late   bool // End returned before the others had ended
}

// New makes this process's part with n bytes of memory, on a GPU, or on the host if gpu is nil.
func New(gpu *cuda.Device, n int64, rank, ranks int) (*Peers, error) {
	if rank < 0 || rank >= ranks || n <= 0 {
		return nil, errs.New(errs.ErrArgument, "invalid peer %d of %d with %d bytes", rank, ranks, n)
	}
	p := &Peers{gpu: gpu, mine: Offer{Rank: rank, Process: pid(), Flags: -1, File: -1, Bytes: n},
		at: make([]unsafe.Pointer, ranks), files: make([]*sharedMemory, ranks),
		Board: Board{rank: rank, ranks: ranks, stop: make(chan struct{}), processes: make([]*process, ranks),
			seen: make([]uint64, ranks), since: make([]time.Time, ranks)}}
	if err := p.makeOffer(n); err != nil {
		p.Close()
		return nil, err
	}
	return p, nil
}

// makeOffer makes the memory, and on rank 0 the flags.
func (p *Peers) makeOffer(n int64) (err error) {
	token := make([]byte, tokenBytes)
	_, _ = rand.Read(token) // never fails
	p.mine.Token = hex.EncodeToString(token)
	if p.mine.Rank == 0 {
		if p.Board.flags, err = newShared(flagBytes(p.Board.ranks), token); err != nil {
			return err
		}
		p.mine.Flags = p.Board.flags.fd
	}
	if p.gpu == nil {
		if p.file, err = newShared(n, token); err != nil {
			return err
		}
		p.mine.File, p.at[p.mine.Rank] = p.file.fd, p.file.base
		return nil
	}
	mem, err := p.gpu.Alloc([]int64{n})
	if err != nil {
		return err
	}
	p.memory, p.at[p.mine.Rank] = mem[0], mem[0].Ptr
	p.mine.Memory, err = p.gpu.ExportMemory(p.memory)
	return err
}

// Offer is this process's offer to the others.
func (p *Peers) Offer() Offer { return p.mine }

// Memory is the address of a process's memory in this process. The memory of other processes is only read.
func (p *Peers) Memory(rank int) unsafe.Pointer { return atomic.LoadPointer(&p.at[rank]) }

// Join connects this process with the processes that made these offers. From then on each sees what the others
// publish. An errs.ErrNotSupported says that they cannot reach each other.
func (p *Peers) Join(offers []Offer) error {
	if len(offers) != p.Board.ranks {
		return errs.New(errs.ErrArgument, "got %d offers for %d peers", len(offers), p.Board.ranks)
	}
	for rank, o := range offers {
		if o.Rank != rank || o.Bytes != p.mine.Bytes || (o.File < 0) != (p.gpu != nil) {
			return errs.New(errs.ErrArgument, "offer %d is of peer %d and has %d bytes, expected %d",
				rank, o.Rank, o.Bytes,
				p.mine.Bytes)
		}
	}
	if offers[p.mine.Rank] != p.mine {
		return errs.New(errs.ErrArgument, "the offer of peer %d is not its own", p.mine.Rank)
	}
	if err := p.Board.connect(offers); err != nil {
		return err
	}
	p.offers = offers
	return nil
}

// MapMemoryOf maps the memory of another process, after Join; Memory then returns its address. An
// errs.ErrNotSupported says that this process or its device cannot reach the memory. If the other process is
// gone, the error says so.
func (p *Peers) MapMemoryOf(rank int) (err error) {
	o, at := &p.offers[rank], unsafe.Pointer(nil)
	if p.gpu != nil {
		at, err = p.gpu.MapExported(o.Memory)
		if errors.Is(err, errs.ErrDevice) {
			err = errs.New(errs.ErrNotSupported, "the GPU's memory of another process cannot be mapped: %v", err)
		}
	} else if p.files[rank], err = openShared(o, o.File, o.Bytes); err == nil {
		at = p.files[rank].base
	}
	if err != nil {
		return cmp.Or(p.Board.checkLife(rank), err)
	}
	atomic.StorePointer(&p.at[rank], at)
	return nil
}

// End announces that this process no longer uses the others' memory, and waits until they have announced the same
// or are gone. The caller ends its work on that memory first. End returns the error of a process that is gone
// without having announced its end. good says that this process has succeeded. If it has not, or ctx ends, End
// waits no longer than grace, since others may be stopped or hang.
func (p *Peers) End(ctx context.Context, good bool) error {
	if p.Board.lines == nil || p.ended {
		return nil
	}
	p.ended = true
	own := p.Board.lines[p.mine.Rank]
	if !good {
		p.Board.ReportFailure()
	}
	p.unmapOthers()
	own.ended.Store(1)
	ringBell(&own.bell)
	soon, cancel := context.WithCancelCause(context.Background())
	defer cancel(nil)
	beginGrace := func() {
		time.AfterFunc(grace, func() {
			cancel(errs.New(errs.ErrIO, "the other ranks of this host have not finished"))
		})
	}
	if good {
		defer context.AfterFunc(ctx, beginGrace)()
	} else {
		beginGrace()
	}
	err := p.Board.awaitEnded(soon)
	p.late = soon.Err() != nil
	if p.late && ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return err
}

func (p *Peers) unmapOthers() {
	for rank := range p.at {
		if rank == p.mine.Rank || p.at[rank] == nil {
			continue
		}
		if p.gpu != nil {
			p.gpu.UnmapExported(p.at[rank])
		} else {
			p.files[rank].close()
		}
		atomic.StorePointer(&p.at[rank], nil)
	}
}

// Close frees everything. If End could not wait for the others, the memory is freed when they have ended. Unless
// all went well, Close first calls End with good false.
func (p *Peers) Close() {
	_ = p.End(context.Background(), false)
	if !p.late {
		p.free()
		return
	}
	spawn.Go("peers late", func() {
		_ = p.Board.awaitEnded(context.Background())
		p.free()
	})
}

func (p *Peers) free() {
	close(p.Board.stop)
	p.Board.beat.Wait()
	p.memory.Release()
	p.file.close()
	p.Board.flags.close()
	for _, other := range p.Board.processes {
		other.close()
	}
}
