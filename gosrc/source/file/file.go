// Package file reads local files with parallel pread calls on one descriptor.
//
// A file that shrinks while it is open gives errs.ErrCorrupt at the first missing byte. If another file is
// renamed onto its path, the source still reads the original.
//
// Cold ranges, which are not in the page cache, are read by direct I/O (O_DIRECT). Resident ranges are read
// from the cache. Loading cold ranges into host memory through the cache would need memory twice, for the
// tensors and for the cache. In a virtual machine, obtaining this memory from the host can take longer than
// reading the disk. Cold ranges are nevertheless read through the cache in these cases:
//
//   - loads to a GPU that fit into half of the free memory, because other ranks read the same file;
//   - the rest of a load that fits, once the disk has turned out to be slow, because the next load from memory
//     is many times faster;
//   - files on network file systems, which have their own cache and read-ahead.
//
// OVERWIRE_READ overrides these rules. If O_DIRECT is unavailable or fails, even in the middle of a range,
// reads are buffered: the choice affects speed, never the bytes.
//
// Direct I/O uses threads with pread, not io_uring: on the measured disks, both saturate the device with 8 or
// more parallel reads.
package file

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/hostmem"
	"github.com/overwire/overwire/gosrc/internal/regular"
	"github.com/overwire/overwire/gosrc/internal/sizes"
	"github.com/overwire/overwire/gosrc/source"
	"golang.org/x/sys/unix"
)

// step is the size of the largest pread, so that a cancelled read returns within milliseconds on any working disk.
const step = 4 << 20

// maxRefusals is how often a read is retried, at intervals of a millisecond, while the file system returns EAGAIN.
const maxRefusals = 5000

// A File is an open local file. It implements source.Source.
type File struct {
	uri  string
	size int64

	mu   sync.RWMutex // held for reading by every call that uses fd
	fd   int
	shut bool

	kind   regular.Kind
	id     source.Identity
	about  attributes
	opened time.Time
	direct direct
}

// attributes affect a file's change time, but not its bytes.
type attributes struct {
	mode, uid, gid uint32
	links          uint64
}

func attributesOf(st *unix.Stat_t) attributes {
	return attributes{st.Mode, st.Uid, st.Gid, uint64(st.Nlink)}
}

// Open opens a regular file for reading. It refuses directories and special files because their size is not meaningful.
func Open(path string) (*File, error) {
	fd, st, err := regular.Open(path)
	if err != nil {
		return nil, errs.In("open", path, err)
	}
	if err := regular.Sized(fd, &st); err != nil {
		_ = unix.Close(fd)
		return nil, errs.In("open", path, err)
	}
	return newFile(path, fd, &st), nil
}

// FromFD returns a source that reads a duplicate of the caller's descriptor. uri names the source in errors.
func FromFD(fd int, uri string) (*File, error) {
	var st unix.Stat_t
	err := regular.Again(func() error { return unix.Fstat(fd, &st) })
	if err == nil {
		err = regular.Check(&st)
	}
	if err == nil {
		err = regular.Sized(fd, &st)
	}
	own := -1
	if err == nil {
		own, err = unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 3)
	}
	if err != nil {
		return nil, errs.In("open", uri, errs.FromOS(err))
	}
	return newFile(uri, own, &st), nil
}

func newFile(uri string, fd int, st *unix.Stat_t) *File {
	return &File{uri: uri, size: st.Size, fd: fd, kind: kindOf(fd), opened: time.Now(), id: identityOf(st),
		about: attributesOf(st)}
}

func identityOf(st *unix.Stat_t) source.Identity {
	return source.Identity{
		Device: uint64(st.Dev), Inode: st.Ino, Size: st.Size, Modified: st.Mtim.Nano(), Changed: st.Ctim.Nano(),
	}
}

// URI returns the path as the caller passed it.
func (f *File) URI() string { return f.uri }

// Size returns the file's size when it was opened.
func (f *File) Size() int64 { return f.size }

// settle is how old a file's last change must be for Identity to be reliable. Some file systems store times
// with a resolution of two seconds, and a second write within one tick is not detected.
const settle = 3 * time.Second

// Facts implements source.Source. The file is remote if it is on a network file system or on one with its own
// cache, such as ZFS.
func (f *File) Facts() source.Facts {
	last := time.Unix(0, max(f.id.Modified, f.id.Changed))
	facts := source.Facts{Remote: f.kind == regular.Network,
		Quick: f.kind == regular.Disk || f.kind == regular.InMemory, Identity: f.id,
		Settled: f.opened.Sub(last) > settle, Now: f.stateNow, File: f}
	if f.kind == regular.Network {
		facts.Prefetch = f.prefetchRange
	}
	return facts
}

// stateNow returns the current Identity. A change of name, mode, owner or links does not change it: a file that
// a save replaced is still intact.
func (f *File) stateNow() (id source.Identity, err error) {
	err = f.WithFD(func(fd int) error {
		var st unix.Stat_t
		if err := regular.Again(func() error { return unix.Fstat(fd, &st) }); err != nil {
			return f.placeError(-1, errs.FromOS(err))
		}
		id = identityOf(&st)
		if id.Changed != f.id.Changed && (attributesOf(&st) != f.about || f.isRenamed()) {
			id.Changed = f.id.Changed
		}
		return nil
	})
	return id, err
}

// isRenamed reports whether the path that was opened no longer leads to this file.
func (f *File) isRenamed() bool {
	now, err := Identify(f.uri)
	return err != nil || now.Inode != f.id.Inode || now.Device != f.id.Device
}

// Identify returns the Identity of the file at a path without opening it.
func Identify(path string) (source.Identity, error) {
	var st unix.Stat_t
	if err := regular.Again(func() error { return unix.Stat(path, &st) }); err != nil {
		return source.Identity{}, errs.In("open", path, errs.FromOS(err))
	}
	return identityOf(&st), nil
}

// ReadAt fills p from off; see source.Source.
func (f *File) ReadAt(ctx context.Context, p []byte, off int64) error {
	if off < 0 || off > f.size || int64(len(p)) > f.size-off {
		return f.placeError(off, errs.New(errs.ErrCorrupt,
			"truncated: expected %d bytes from this offset, but the file has %d", len(p), f.size))
	}
	f.mu.RLock()
	defer f.mu.RUnlock()
	if f.shut {
		return f.placeError(off, errs.New(errs.ErrArgument, "the source is closed"))
	}
	bypass := f.direct.wantsDirect(f, off, len(p))
	refusals := 0 // since the last bytes arrived
	for len(p) > 0 {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		var n int
		var err error
		if bypass {
			n, err = f.direct.readDirect(p, off)
			if isRefusal(err) {
				f.direct.stopDirect()
				bypass = false
				continue
			}
		} else {
			n, err = unix.Pread(f.fd, p[:min(len(p), step)], off)
		}
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case errors.Is(err, unix.EAGAIN) && refusals < maxRefusals: // the file system has no bytes yet
			refusals++
			time.Sleep(time.Millisecond)
			continue
		case err == nil && n == 0 && bypass: // let a buffered read decide whether the file ends here
			bypass = false
			continue
		case err != nil:
			return f.placeError(off, errs.FromFile(&os.PathError{Op: "read", Path: f.uri, Err: err}))
		case n == 0:
			return f.placeError(off, errs.New(errs.ErrCorrupt, "truncated: the file had %d bytes when it was opened",
				f.size))
		}
		p = p[n:]
		off += int64(n)
		refusals = 0
	}
	return nil
}

// prefetchRange announces a range to the kernel for read-ahead over a network. It does nothing on disks: parallel reads
// are as fast or faster there (measured in alternating runs), and direct I/O would read the range twice.
func (f *File) prefetchRange(off, n int64) {
	f.mu.RLock()
	defer f.mu.RUnlock()
	if !f.shut && !f.direct.wantsDirect(f, off, int(n)) {
		_ = unix.Fadvise(f.fd, off, n, unix.FADV_WILLNEED)
	}
}

// WithFD calls fn with the open descriptor, which stays open until fn returns.
func (f *File) WithFD(fn func(fd int) error) error {
	f.mu.RLock()
	defer f.mu.RUnlock()
	if f.shut {
		return f.placeError(-1, errs.New(errs.ErrArgument, "the source is closed"))
	}
	return fn(f.fd)
}

// Close waits for the reads in flight and closes the descriptor.
func (f *File) Close() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.shut {
		return nil
	}
	f.shut = true
	f.direct.closeDirect()
	if err := unix.Close(f.fd); err != nil {
		return f.placeError(-1, errs.FromOS(err))
	}
	return nil
}

func (f *File) placeError(off int64, err error) error {
	return errs.Place("read", f.uri, "", off, err)
}

// kindOf returns the kind of file system that holds a file.
func kindOf(fd int) regular.Kind {
	of, err := regular.IdentifyFile(fd)
	if err != nil {
		return regular.Network // unknown: read through the page cache
	}
	return of.Kind
}

// noCachestat is set once the kernel has answered that it lacks cachestat, which is new in Linux 6.5.
var noCachestat atomic.Bool

// residentShare returns the share of the pages of [off, off+n) that are in the page cache. known is false if the kernel
// does not report it. For a file that the user may not write, the kernel reports that every page is resident.
func residentShare(fd int, off, n int64) (share float64, known bool) {
	if n <= 0 {
		return 1, true
	}
	first, last := off/page, (off+n-1)/page
	pages := float64(last - first + 1)
	if !noCachestat.Load() {
		const sysCachestat = 451
		span := struct{ off, n uint64 }{uint64(off), uint64(n)}
		var st struct{ cached, dirty, writeback, evicted, recently uint64 }
		_, _, e := unix.Syscall6(sysCachestat, uintptr(fd), uintptr(unsafe.Pointer(&span)),
			uintptr(unsafe.Pointer(&st)), 0, 0, 0)
		if e == 0 {
			return min(1, float64(st.cached)/pages), true
		}
		if errors.Is(e, unix.ENOSYS) {
			noCachestat.Store(true)
		}
	}
	return mincoreShare(fd, first*page, int(last-first+1))
}

// mincoreShare implements residentShare with mincore(2) on a mapping.
func mincoreShare(fd int, off int64, pages int) (float64, bool) {
	m, err := unix.MmapPtr(fd, off, nil, uintptr(pages)*page, unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return 0, false
	}
	defer func() { _ = unix.MunmapPtr(m, uintptr(pages)*page) }()
	vec := make([]byte, pages)
	if _, _, e := unix.Syscall(unix.SYS_MINCORE, uintptr(m), uintptr(pages)*page,
		uintptr(unsafe.Pointer(&vec[0]))); e != 0 {
		return 0, false
	}
	in := 0
	for _, v := range vec {
		in += int(v & 1)
	}
	return float64(in) / float64(pages), true
}

const (
	// depth is the number of parallel reads that suits a disk, for direct I/O and for filling the cache.
	depth = 16
	// window is the unit in which the file is classified as resident or cold.
	window = 16 << 20
	// least is the smallest direct read. Smaller reads are dominated by the disk's latency, which the kernel's
	// read-ahead hides.
	least = 128 << 10
	// page is the memory alignment for direct reads without a buffer. Devices accept smaller alignments, but
	// the page must not be shared with other data: after a fork, a write to another part of the page would copy
	// the page, while the device still writes to the original.
	page = 4096
	// bounce is the size of the buffers for reads that are not aligned.
	bounce = 1 << 20
	// A disk is slow (0.15 GB/s) if depth readers wait longer than probeTime for the first probe bytes. Reading
	// through the page cache then costs little extra, and the next load is much faster.
	probe     = 128 << 20
	probeTime = 900 * time.Millisecond
)

// direct reads a file by direct I/O (O_DIRECT).
type direct struct {
	load    atomic.Pointer[windows] // nil: direct I/O is off
	stopped atomic.Bool

	mu    sync.Mutex // held while fd is opened or closed
	tried bool
	fd    int   // opened with O_DIRECT; valid if align > 0
	align int64 // alignment of offsets and lengths; 0 means that direct I/O is not possible
}

// windows has the state of each window of a file during a load.
type windows struct {
	forced bool // use direct I/O even for resident ranges
	fits   bool // tensors and page cache fit into memory, so a slow disk is read through the cache
	state  []atomic.Int32
	bytes  atomic.Int64 // read by direct I/O
	waited atomic.Int64 // ns, summed over all readers
	slow   atomic.Bool  // the disk is slow
}

// The states of a window.
const (
	unseen = iota
	warm
	cold
)

// Expect decides how the next load reads the file; see source.File.
func (f *File) Expect(total int64, host bool, how string) int {
	f.mu.RLock()
	defer f.mu.RUnlock()
	f.direct.load.Store(nil)
	if f.shut {
		return 0
	}
	if how == "buffered" { // cold bytes need as many readers as the disk can serve
		if !host && f.kind != regular.InMemory && f.anyCold() {
			return depth
		}
		return 0
	}
	isForced, fits := how == "direct", false
	if !isForced {
		if f.kind == regular.InMemory || !f.anyCold() {
			return 0
		}
		fits = total <= hostmem.Available()/2
		if f.kind == regular.Network || fits && !host {
			return depth
		}
	}
	if f.direct.openDirect(f.fd) {
		f.direct.load.Store(&windows{forced: isForced, fits: fits, state: make([]atomic.Int32, f.size/window+1)})
		return depth
	}
	if isForced {
		return 0
	}
	return depth // the cold bytes are read into the page cache
}

// DirectBytes returns the number of bytes that direct I/O has read; see source.File.
func (f *File) DirectBytes() int64 {
	if l := f.direct.load.Load(); l != nil {
		return l.bytes.Load()
	}
	return 0
}

// anyCold samples the residency of the whole file. The caller holds f.mu.
func (f *File) anyCold() bool {
	const places, look = 16, 64 << 10
	for i := range int64(places) {
		if share, isKnown := residentShare(f.fd, f.size/places*i, min(look, f.size)); !isKnown || share < 1 {
			return true
		}
	}
	return false
}

// wantsDirect reports whether n bytes at off should be read by direct I/O. The caller holds f.mu.
func (p *direct) wantsDirect(f *File, off int64, n int) bool {
	l := p.load.Load()
	if l == nil || n < least || p.stopped.Load() || l.slow.Load() {
		return false
	}
	w := &l.state[off/window]
	state := w.Load()
	if state == unseen {
		state = cold
		if !l.forced {
			from := off / window * window
			if share, isKnown := residentShare(f.fd, from, min(window, f.size-from)); isKnown && share > 0.5 {
				state = warm
			}
		}
		w.Store(state)
	}
	return state == cold
}

// openDirect reopens the file of fd for direct I/O. It opens the same file even if its path now leads to a different
// file.
func (p *direct) openDirect(fd int) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.tried {
		return p.align > 0 && !p.stopped.Load()
	}
	p.tried = true
	align := dioAlign(fd)
	if align == 0 {
		return false
	}
	err := regular.Again(func() (err error) {
		p.fd, err = unix.Open(fmt.Sprintf("/proc/self/fd/%d", fd), unix.O_RDONLY|unix.O_CLOEXEC|unix.O_DIRECT, 0)
		return err
	})
	if err != nil {
		return false
	}
	p.align = align
	return true
}

// dioAlign returns the alignment that direct reads need for offsets and lengths. 0 means that direct reads are
// not possible or need more than page alignment.
func dioAlign(fd int) int64 {
	var st unix.Statx_t
	err := regular.Again(func() error { return unix.Statx(fd, "", unix.AT_EMPTY_PATH, unix.STATX_DIOALIGN, &st) })
	if err != nil || st.Mask&unix.STATX_DIOALIGN == 0 { // Linux before 6.1: a page always suffices
		return page
	}
	if st.Dio_mem_align > page || st.Dio_offset_align > page {
		return 0
	}
	return int64(st.Dio_offset_align)
}

// buffers holds page-aligned buffers of bounce bytes.
var buffers = sync.Pool{New: func() any {
	b := make([]byte, bounce+page)
	skip := -uintptr(unsafe.Pointer(&b[0])) & (page - 1)
	b = b[skip : skip+bounce]
	return &b
}}

// readDirect reads into b from off. It may read fewer bytes than len(b). It uses a buffer if memory or offset
// is not aligned. Like pread, it returns 0 at the end of the file.
func (p *direct) readDirect(b []byte, off int64) (int, error) {
	head, start := off%p.align, time.Now()
	if whole := min(len(b), step) &^ (page - 1); head == 0 && whole > 0 && uintptr(unsafe.Pointer(&b[0]))%page == 0 {
		n, err := unix.Pread(p.fd, b[:whole], off)
		return p.countRead(n, start), err
	}
	buf := buffers.Get().(*[]byte)
	defer buffers.Put(buf)
	n := sizes.RoundUp(head+int64(len(b)), p.align)
	count, err := unix.Pread(p.fd, (*buf)[:min(n, bounce)], off-head)
	if err != nil || int64(count) <= head {
		return 0, err
	}
	return p.countRead(copy(b, (*buf)[head:count]), start), nil
}

// countRead counts n bytes of a read that started at begun, and returns n.
func (p *direct) countRead(n int, begun time.Time) int {
	if l := p.load.Load(); l != nil && n > 0 {
		wait, all := l.waited.Add(int64(time.Since(begun))), l.bytes.Add(int64(n))
		if l.fits && all >= probe && all-int64(n) < probe && wait > depth*int64(probeTime) {
			l.slow.Store(true)
		}
	}
	return n
}

// isRefusal reports whether an error is caused by O_DIRECT.
func isRefusal(err error) bool {
	return errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EOPNOTSUPP)
}

// stopDirect ends direct reads of this file.
func (p *direct) stopDirect() { p.stopped.Store(true) }

// closeDirect closes the second descriptor. The caller has waited for all reads.
func (p *direct) closeDirect() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.load.Store(nil)
	if p.align > 0 {
		_ = unix.Close(p.fd)
		p.align = 0
	}
}
