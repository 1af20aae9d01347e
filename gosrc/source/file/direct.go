package file

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/overwire/overwire/gosrc/internal/sizes"
	"golang.org/x/sys/unix"
)

const (
	// depth is the reads in flight that a disk wants for direct I/O,
	// and when the cache has to be filled.
	depth = 16
	// window is how much of a file is judged as one: resident or cold.
	window = 16 << 20
	// least is the smallest direct read: below it the disk's
	// latency, which read-ahead hides, is what counts.
	least = 128 << 10
	// page is the alignment of memory that is read into in place. Devices would
	// take less; but whole pages are nobody else's, and so a fork of the process
	// meanwhile, which makes other writers of a page move to a copy of it, cannot
	// come between the device and its page.
	page = 4096
	// bounce is the size of the buffers through which other reads go.
	bounce = 1 << 20
)

// direct reads a file by direct I/O (O_DIRECT).
type direct struct {
	load    atomic.Pointer[windows] // nil: nothing is read so
	stopped atomic.Bool

	mu    sync.Mutex // opening
	tried bool
	fd    int   // with O_DIRECT, valid if align > 0
	align int64 // of offsets and lengths; 0: it cannot be done here
}

// windows is what one load knows of a file.
type windows struct {
	forced bool // what is resident does not count
	state  []atomic.Int32
	bytes  atomic.Int64 // read by direct I/O
}

// The states of a window.
const (
	unseen = iota
	warm
	cold
)

// Expect decides how the coming load reads; see source.File.
func (f *File) Expect(total int64, how string) int {
	f.mu.RLock()
	defer f.mu.RUnlock()
	f.direct.load.Store(nil)
	if f.shut || how == "buffered" {
		return 0
	}
	forced := how == "direct"
	if !forced {
		if f.kind == inMemory || !f.anyCold() {
			return 0
		}
		if f.kind == network || total <= available()/2 {
			return depth
		}
	}
	if !f.direct.open(f.fd) {
		return 0
	}
	f.direct.load.Store(&windows{forced: forced, state: make([]atomic.Int32, f.size/window+1)})
	return depth
}

// DirectBytes is how many bytes direct I/O has read; see source.File.
func (f *File) DirectBytes() int64 {
	if l := f.direct.load.Load(); l != nil {
		return l.bytes.Load()
	}
	return 0
}

// anyCold looks at places all over the file. f.mu is held.
func (f *File) anyCold() bool {
	const places, look = 16, 64 << 10
	for i := range int64(places) {
		if share, known := resident(f.fd, f.size/places*i, min(look, f.size)); !known || share < 1 {
			return true
		}
	}
	return false
}

// wants says whether n bytes at off are to be read by direct I/O. f.mu is
// held.
func (p *direct) wants(f *File, off int64, n int) bool {
	l := p.load.Load()
	if l == nil || n < least || p.stopped.Load() {
		return false
	}
	w := &l.state[off/window]
	state := w.Load()
	if state == unseen {
		state = cold
		if !l.forced {
			from := off / window * window
			if share, known := resident(f.fd, from, min(window, f.size-from)); known && share > 0.5 {
				state = warm
			}
		}
		w.Store(state)
	}
	return state == cold
}

// open opens the file behind fd once more, for direct I/O: that very file,
// whatever its name means by now.
func (p *direct) open(fd int) bool {
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
	err := again(func() (err error) {
		p.fd, err = unix.Open(fmt.Sprintf("/proc/self/fd/%d", fd), unix.O_RDONLY|unix.O_CLOEXEC|unix.O_DIRECT, 0)
		return err
	})
	if err != nil {
		return false
	}
	p.align = align
	return true
}

// dioAlign is what offsets and lengths of direct reads of a file must be
// multiples of; 0: there are none, or they want more than a page.
func dioAlign(fd int) int64 {
	var st unix.Statx_t
	err := again(func() error { return unix.Statx(fd, "", unix.AT_EMPTY_PATH, unix.STATX_DIOALIGN, &st) })
	if err != nil || st.Mask&unix.STATX_DIOALIGN == 0 { // a kernel before 6.1: a page always does
		return page
	}
	if st.Dio_mem_align > page || st.Dio_offset_align > page {
		return 0
	}
	return int64(st.Dio_offset_align)
}

// buffers are aligned to a page and bounce bytes long.
var buffers = sync.Pool{New: func() any {
	b := make([]byte, bounce+page)
	skip := -uintptr(unsafe.Pointer(&b[0])) & (page - 1)
	b = b[skip : skip+bounce]
	return &b
}}

// read reads some of p from off, in place if memory and offset allow it and by
// way of a buffer if not. Like pread, it gives 0 at the end of the file.
func (p *direct) read(b []byte, off int64) (int, error) {
	head := off % p.align
	if whole := min(len(b), step) &^ (page - 1); head == 0 && whole > 0 && uintptr(unsafe.Pointer(&b[0]))%page == 0 {
		n, err := unix.Pread(p.fd, b[:whole], off)
		return p.count(n), err
	}
	buf := buffers.Get().(*[]byte)
	defer buffers.Put(buf)
	n := sizes.RoundUp(head+int64(len(b)), p.align)
	got, err := unix.Pread(p.fd, (*buf)[:min(n, bounce)], off-head)
	if err != nil || int64(got) <= head {
		return 0, err
	}
	return p.count(copy(b, (*buf)[head:got])), nil
}

func (p *direct) count(n int) int {
	if l := p.load.Load(); l != nil && n > 0 {
		l.bytes.Add(int64(n))
	}
	return n
}

// refused says whether an error is about O_DIRECT and not about the bytes.
func refused(err error) bool {
	return errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EOPNOTSUPP)
}

// stop gives direct reads up for this file.
func (p *direct) stop() { p.stopped.Store(true) }

// close closes the second descriptor. No read is under way.
func (p *direct) close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.load.Store(nil)
	if p.align > 0 {
		_ = unix.Close(p.fd)
		p.align = 0
	}
}
