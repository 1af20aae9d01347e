// Package file is the source of local files: parallel pread on one descriptor.
//
// A file that shrinks while it is open gives fault.ErrCorrupt at the missing
// bytes; one that is replaced by rename stays the file that was opened.
//
// Reads go through the page cache, except for what is cold in a load that is
// larger than half of the memory left. Whoever loads a model that fits will
// load it again, in the next process or the next rank: then it comes out of
// memory, many times faster than off the disk. A model that does not fit would
// push out what others keep there and itself before it is read again; it is
// read by direct I/O (O_DIRECT), range by range: what is resident anyway is
// taken from the cache. On network file systems the cache and its read-ahead are
// the fast path, and nothing goes around them. OVERWIRE_READ overrules all
// this. Where O_DIRECT does not exist, or breaks off, the buffered read takes
// over in the middle of a range: which way bytes come decides the time alone.
//
// Direct I/O is threads with pread, not io_uring: on the disks that
// were measured, both saturate the device from 8 reads in flight on.
package file

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/overwire/overwire/gosrc/fault"
	"github.com/overwire/overwire/gosrc/internal/regular"
	"github.com/overwire/overwire/gosrc/source"
)

// step is the most that one pread is asked for: small enough that a cancelled
// read returns within a few milliseconds from any disk that works.
const step = 4 << 20

// A File is an open local file. It implements source.Source.
type File struct {
	uri  string
	size int64

	mu   sync.RWMutex // held for reading by every call that uses fd
	fd   int
	shut bool

	kind   int // of file system
	id     source.Identity
	opened time.Time
	direct direct
}

// Open opens a regular file for reading. Directories and special files are
// refused, since their size says nothing.
func Open(path string) (*File, error) {
	fail := func(err error) (*File, error) {
		return nil, &fault.At{Verb: "open", Source: path, Chunk: -1, Offset: -1, Err: err}
	}
	fd, st, err := regular.Open(path)
	if err != nil {
		return fail(err)
	}
	if err := regular.Sized(fd, &st); err != nil {
		_ = unix.Close(fd)
		return fail(err)
	}
	return made(path, fd, &st), nil
}

// FromFD makes a source of a duplicate of a descriptor that the caller keeps;
// uri names it in errors.
func FromFD(fd int, uri string) (*File, error) {
	fail := func(err error) (*File, error) {
		return nil, &fault.At{Verb: "open", Source: uri, Chunk: -1, Offset: -1, Err: err}
	}
	var st unix.Stat_t
	if err := again(func() error { return unix.Fstat(fd, &st) }); err != nil {
		return fail(fault.FromOS(err))
	}
	if err := regular.Check(&st); err != nil {
		return fail(err)
	}
	if err := regular.Sized(fd, &st); err != nil {
		return fail(err)
	}
	own, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 3)
	if err != nil {
		return fail(fault.FromOS(err))
	}
	return made(uri, own, &st), nil
}

func made(uri string, fd int, st *unix.Stat_t) *File {
	return &File{uri: uri, size: st.Size, fd: fd, kind: kindOf(fd), opened: time.Now(), id: identity(st)}
}

func identity(st *unix.Stat_t) source.Identity {
	return source.Identity{
		Device: uint64(st.Dev), Inode: st.Ino, Size: st.Size, Modified: st.Mtim.Nano(), Changed: st.Ctim.Nano(),
	}
}

// URI is the path as it was given.
func (f *File) URI() string { return f.uri }

// Size is the file's size when it was opened.
func (f *File) Size() int64 { return f.size }

// settle is how old the last change must be before it counts as the last:
// time stamps of file systems are as coarse as two seconds, and a second write
// in the same tick leaves no trace.
const settle = 3 * time.Second

// Facts are those of a file, which is remote if it lies on a network file system,
// or on one that keeps a cache of its own.
func (f *File) Facts() source.Facts {
	last := time.Unix(0, max(f.id.Modified, f.id.Changed))
	facts := source.Facts{Remote: f.kind == network, Identity: f.id, Settled: f.opened.Sub(last) > settle, Now: f.now, File: f}
	if f.kind == network {
		facts.Prefetch = f.prefetch
	}
	return facts
}

// now is the file's state by now.
func (f *File) now() (id source.Identity, err error) {
	err = f.WithFD(func(fd int) error {
		var st unix.Stat_t
		if err := again(func() error { return unix.Fstat(fd, &st) }); err != nil {
			return f.at(-1, fault.FromOS(err))
		}
		id = identity(&st)
		return nil
	})
	return id, err
}

// Identify is the Identity of the file at a path, which is not opened.
func Identify(path string) (source.Identity, error) {
	var st unix.Stat_t
	if err := again(func() error { return unix.Stat(path, &st) }); err != nil {
		return source.Identity{}, &fault.At{Verb: "open", Source: path, Chunk: -1, Offset: -1, Err: fault.FromOS(err)}
	}
	return identity(&st), nil
}

// ReadAt fills p from off; see source.Source.
func (f *File) ReadAt(ctx context.Context, p []byte, off int64) error {
	if off < 0 || off > f.size || int64(len(p)) > f.size-off {
		return f.at(off, fault.New(fault.ErrCorrupt, "truncated: %d bytes wanted, the file has %d", len(p), f.size))
	}
	f.mu.RLock()
	defer f.mu.RUnlock()
	if f.shut {
		return f.at(off, fault.New(fault.ErrArgument, "the source is closed"))
	}
	bypass := f.direct.wants(f, off, len(p))
	for len(p) > 0 {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		var n int
		var err error
		if bypass {
			n, err = f.direct.read(p, off)
			if refused(err) {
				f.direct.stop()
				bypass = false
				continue
			}
		} else {
			n, err = unix.Pread(f.fd, p[:min(len(p), step)], off)
		}
		switch {
		case errors.Is(err, unix.EINTR), errors.Is(err, unix.EAGAIN):
			continue
		case errors.Is(err, unix.EINVAL): // of no argument of the caller's
			return f.at(off, fmt.Errorf("%w: %w", fault.ErrIO, &os.PathError{Op: "read", Path: f.uri, Err: err}))
		case err != nil:
			return f.at(off, fault.FromOS(&os.PathError{Op: "read", Path: f.uri, Err: err}))
		case n == 0:
			return f.at(off, fault.New(fault.ErrCorrupt, "truncated: the file had %d bytes when it was opened", f.size))
		}
		p = p[n:]
		off += int64(n)
	}
	return nil
}

// prefetch tells the kernel that a range will be read soon, for read-ahead that
// has a network to cross. On disks, reads in flight do as well or better (they
// were measured alternately), and what direct I/O reads it would read twice.
func (f *File) prefetch(off, n int64) {
	f.mu.RLock()
	defer f.mu.RUnlock()
	if !f.shut && !f.direct.wants(f, off, int(n)) {
		_ = unix.Fadvise(f.fd, off, n, unix.FADV_WILLNEED)
	}
}

// WithFD calls fn with the open descriptor, which stays open meanwhile.
func (f *File) WithFD(fn func(fd int) error) error {
	f.mu.RLock()
	defer f.mu.RUnlock()
	if f.shut {
		return f.at(-1, fault.New(fault.ErrArgument, "the source is closed"))
	}
	return fn(f.fd)
}

// Close closes the descriptor after the reads in flight.
func (f *File) Close() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.shut {
		return nil
	}
	f.shut = true
	f.direct.close()
	if err := unix.Close(f.fd); err != nil {
		return f.at(-1, fault.FromOS(err))
	}
	return nil
}

func (f *File) at(off int64, err error) error {
	return &fault.At{Verb: "read", Source: f.uri, Chunk: -1, Offset: off, Err: err}
}

// again repeats fn while a signal interrupts it.
func again(fn func() error) error {
	for {
		if err := fn(); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}
