// Package peers connects processes of one host that load together. Each provides GPU or host memory that the
// others read. They announce their progress through flags in shared memory.
//
// New creates one process's Peers, and its Offer describes how to reach it. The caller distributes every
// process's offer to the others. Join connects the processes through their flags, and MapMemoryOf maps the
// memory of another process. All waiting processes detect when another one ends early, dies or hangs. End is
// the last step: it returns when no process uses another's memory any more. If this process has failed or is
// cancelled, End returns soon and finishes in the background. The shared memory has no name in a file system,
// so a process that dies leaves no files.
//
// The methods are safe for concurrent use, with these exceptions: New, Join, End and Close must not run in parallel
// with another method. MapMemoryOf may have only one caller at a time for each process. CheckOthers, CheckPresent and
// MeetAt together may have only one caller at a time.
package peers

import (
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/device/cuda"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/spawn"
	"golang.org/x/sys/unix"
)

// An Offer describes how other processes reach this one.
type Offer struct {
	Rank    int    `json:"rank"`
	Process int    `json:"process"`
	Token   string `json:"token"` // first bytes of its shared memory
	Flags   int    `json:"flags"` // descriptor of the flags; only rank 0 has them
	File    int    `json:"file"`  // descriptor of host memory; -1 for GPU memory
	Memory  string `json:"memory"`
	Bytes   int64  `json:"bytes"`
}

// ErrOther is the error of CheckOthers and the Await methods if another process has failed. That process's own
// error has the details.
var ErrOther = errors.New("another process of the group has failed")

// silence is how long a living process may send no heartbeat before the others consider it gone. beat is the
// interval of heartbeats. Tests make both shorter.
var silence, beat = 30 * time.Second, 200 * time.Millisecond

// grace is how long a process that has failed or is cancelled waits for the others.
const grace = 500 * time.Millisecond

// A Peers is this process's membership in the group.
type Peers struct {
	Board  Board
	GPU    *cuda.Device // nil means the host
	mine   Offer
	offers []Offer

	memory device.Memory    // on the GPU
	file   *sharedMemory    // on the host
	at     []unsafe.Pointer // indexed by rank: address of its memory in this process; accessed atomically
	files  []*sharedMemory
	ended  bool
	late   bool // End returned before the others had ended
}

// New creates this process's Peers with n bytes of memory, on a GPU, or on the host if gpu is nil.
func New(gpu *cuda.Device, n int64, rank, ranks int) (*Peers, error) {
	if rank < 0 || rank >= ranks || n <= 0 {
		return nil, errs.New(errs.ErrArgument, "invalid peer: rank %d of %d with %d bytes: expected a rank below "+
			"the number of ranks, and at least 1 byte", rank, ranks, n)
	}
	p := &Peers{GPU: gpu, mine: Offer{Rank: rank, Process: pid(), Flags: -1, File: -1, Bytes: n},
		at: make([]unsafe.Pointer, ranks), files: make([]*sharedMemory, ranks),
		Board: Board{rank: rank, ranks: ranks, stop: make(chan struct{}), processes: make([]*process, ranks),
			seen: make([]uint64, ranks), since: make([]time.Time, ranks)}}
	if err := p.makeOffer(n); err != nil {
		p.Close()
		return nil, err
	}
	return p, nil
}

// makeOffer allocates the memory and, on rank 0, the flags.
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
	if p.GPU == nil {
		if p.file, err = newShared(n, token); err != nil {
			return err
		}
		p.mine.File, p.at[p.mine.Rank] = p.file.fd, p.file.base
		return nil
	}
	mem, err := p.GPU.Alloc([]int64{n})
	if err != nil {
		return err
	}
	p.memory, p.at[p.mine.Rank] = mem[0], mem[0].Ptr
	p.mine.Memory, err = p.GPU.ExportMemory(p.memory)
	return err
}

// Offer returns this process's offer to the others.
func (p *Peers) Offer() Offer { return p.mine }

// Memory returns the address of a process's memory in this process. GPU memory of other processes must not be
// written, and host memory only where its owner does not write.
func (p *Peers) Memory(rank int) unsafe.Pointer { return atomic.LoadPointer(&p.at[rank]) }

// Join connects this process with the processes that made these offers. From then on, each sees what the others
// publish. errs.ErrNotSupported means that they cannot reach each other.
func (p *Peers) Join(offers []Offer) error {
	if len(offers) != p.Board.ranks {
		return errs.New(errs.ErrArgument, "got %d offers, expected %d, one per rank", len(offers), p.Board.ranks)
	}
	for rank, o := range offers {
		if o.Rank != rank || o.Bytes != p.mine.Bytes || (o.File < 0) != (p.GPU != nil) {
			return errs.New(errs.ErrArgument, "offer %d has rank %d and %d bytes: expected its own rank, %d bytes, "+
				"and the same kind of memory", rank, o.Rank, o.Bytes, p.mine.Bytes)
		}
	}
	if offers[p.mine.Rank] != p.mine {
		return errs.New(errs.ErrArgument, "the offer of rank %d is not this process's offer", p.mine.Rank)
	}
	if err := p.Board.connect(offers); err != nil {
		return err
	}
	p.offers = offers
	return nil
}

// MapMemoryOf maps the memory of another process, after Join. Memory then returns its address. errs.ErrNotSupported
// means that this process or its device cannot reach the memory. If the other process is gone, the error says so.
func (p *Peers) MapMemoryOf(rank int) (err error) {
	o, at := &p.offers[rank], unsafe.Pointer(nil)
	if p.GPU != nil {
		at, err = p.GPU.MapExported(o.Memory)
		if errors.Is(err, errs.ErrDevice) {
			err = errs.New(errs.ErrNotSupported, "the GPU memory of another process cannot be mapped: %v", err)
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

// MapOthers waits for this process's turn, maps the memory of all other processes (see MapMemoryOf), and waits until
// all processes have joined.
func (p *Peers) MapOthers(ctx context.Context) error {
	if err := p.Board.AwaitMapTurn(ctx); err != nil {
		return err
	}
	rank, ranks := p.mine.Rank, p.Board.ranks
	for n := range ranks - 1 {
		if err := p.MapMemoryOf((rank + 1 + n) % ranks); err != nil {
			return err
		}
	}
	p.Board.EndMapTurn()
	return p.Board.AwaitJoined(ctx) // a process that needs nothing must also stay until the others have joined
}

// End announces that this process no longer uses the memory of the others, and waits until they have announced the same
// or are gone. The caller must have ended its work on that memory. End returns the error of a process that is gone
// without having announced its end. good means that this process has succeeded. If it has not, or ctx ends, End waits
// at most grace, because others may be stopped or hang.
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
		if p.GPU != nil {
			p.GPU.UnmapExported(p.at[rank])
		} else {
			p.files[rank].close()
		}
		atomic.StorePointer(&p.at[rank], nil)
	}
}

// Close frees everything. If End could not wait for the other processes, the memory is freed once they have ended. If
// End was not called, Close first calls End(ctx, false).
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

// A process watches another process. Watching uses no locks or sockets, because a forked child shares them with its
// parent and may outlive the parent. fd is an open /proc/PID/stat, which refers to that process even if its number
// is reused. nil means no process.
type process struct{ fd int }

func watchProcess(number int) (*process, error) {
	fd, err := unix.Open(fmt.Sprintf("/proc/%d/stat", number), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, errs.New(errs.ErrNotSupported, "cannot watch process %d: %v", number, err)
	}
	return &process{fd}, nil
}

// isAlive reports whether the process has not ended. A zombie counts as ended.
func (p *process) isAlive() bool {
	b := make([]byte, 256)
	for {
		n, err := unix.Pread(p.fd, b, 0)
		if err == unix.EINTR {
			continue
		}
		if err != nil || n <= 0 {
			return err != unix.ESRCH && n != 0
		}
		// The state follows the name, which is in parentheses and may contain parentheses.
		at := bytes.LastIndex(b[:n], []byte(") "))
		return at < 0 || at+2 >= n || (b[at+2] != 'Z' && b[at+2] != 'X')
	}
}

func (p *process) close() {
	if p != nil {
		_ = unix.Close(p.fd)
	}
}

const (
	tokenBytes = 16
	pageBytes  = 4096 // the first page holds the token; the memory follows

	// lasting fixes the file's size. If the file could shrink, an access would kill processes that have mapped it.
	lasting = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW
)

// A sharedMemory is shared memory that is mapped in this process. nil means none.
type sharedMemory struct {
	fd   int
	raw  unsafe.Pointer
	base unsafe.Pointer
	n    int64 // bytes of the mapping
}

func pid() int { return os.Getpid() }

// newShared creates shared memory of n zero bytes.
func newShared(n int64, token []byte) (*sharedMemory, error) {
	fd, err := unix.MemfdCreate("overwire", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, errs.New(errs.ErrIO, "cannot create shared memory: %v", err)
	}
	size := pageBytes + n
	if err = unix.Ftruncate(fd, size); err == nil {
		_, err = unix.Pwrite(fd, token, 0)
	}
	if err == nil {
		_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, lasting|unix.F_SEAL_SEAL)
	}
	if err != nil {
		_ = unix.Close(fd)
		return nil, errs.New(errs.ErrIO, "cannot create shared memory of %d bytes: %v", n, err)
	}
	return mapShared(fd, size)
}

func mapShared(fd int, size int64) (*sharedMemory, error) {
	raw, err := unix.MmapPtr(fd, 0, nil, uintptr(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		_ = unix.Close(fd)
		return nil, errs.New(errs.ErrIO, "cannot map shared memory of %d bytes: %v", size, err)
	}
	// A forked child does not need the memory.
	_ = unix.Madvise(unsafe.Slice((*byte)(raw), size), unix.MADV_DONTFORK)
	return &sharedMemory{fd: fd, raw: raw, base: unsafe.Add(raw, pageBytes), n: size}, nil
}

// openShared maps n bytes of another process's memory, or maps this process's memory again.
func openShared(o *Offer, number int, n int64) (*sharedMemory, error) {
	refuse := func(why any) (*sharedMemory, error) {
		return nil, errs.New(errs.ErrNotSupported, "cannot open the shared memory of process %d: %v", o.Process, why)
	}
	fd, err := unix.Open(fmt.Sprintf("/proc/%d/fd/%d", o.Process, number),
		unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK|unix.O_NOCTTY, 0)
	if err != nil {
		return refuse(err)
	}
	// In another PID namespace, the number may belong to another process, so the token is compared.
	var st unix.Stat_t
	token := make([]byte, tokenBytes)
	if err = unix.Fstat(fd, &st); err == nil && (st.Mode&unix.S_IFMT != unix.S_IFREG || st.Size != pageBytes+n) {
		err = io.ErrUnexpectedEOF
	}
	if err == nil {
		if seals, e := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0); e != nil || seals&lasting != lasting {
			err = errors.New("its size can change")
		}
	}
	if err == nil {
		_, err = unix.Pread(fd, token, 0)
	}
	want, _ := hex.DecodeString(o.Token)
	if err == nil && !bytes.Equal(token, want) {
		err = os.ErrNotExist
	}
	if err != nil {
		_ = unix.Close(fd)
		return refuse(err)
	}
	s, err := mapShared(fd, pageBytes+n)
	if err != nil {
		return refuse(err)
	}
	return s, nil
}

func (s *sharedMemory) close() {
	if s == nil || s.raw == nil {
		return
	}
	_ = unix.MunmapPtr(s.raw, uintptr(s.n))
	_ = unix.Close(s.fd)
	s.raw = nil
}
