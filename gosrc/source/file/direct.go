package file

// This file decides which ranges of a file are read by direct I/O (O_DIRECT), and reads them.

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/overwire/overwire/gosrc/internal/hostmem"
	"github.com/overwire/overwire/gosrc/internal/regular"
	"github.com/overwire/overwire/gosrc/internal/sizes"
	"golang.org/x/sys/unix"
)

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
	if f.shut || how == "buffered" {
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
