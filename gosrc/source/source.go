// Package source is where bytes come from: a Source gives bytes by offset and
// never hears of tensors. Each kind of source is a room below this one.
package source

import (
	"context"
	"time"
)

// A Source is one file or object of a fixed size, read by offset.
//
// Implementations are safe for concurrent use; ReadAt calls run in parallel.
type Source interface {
	// URI names the source as the user wrote it; secrets are redacted by
	// whoever shows it.
	URI() string
	// Size is the number of bytes, fixed when the source was opened.
	Size() int64
	// ReadAt fills p from offset off, all of it, or returns an error: never a
	// partial result. Reading past Size, or a medium that gives fewer bytes
	// than Size promised, is fault.ErrCorrupt ("truncated"); a failing medium
	// is fault.ErrIO with the system's words. It returns soon after ctx is
	// cancelled, with fault.ErrCancelled.
	ReadAt(ctx context.Context, p []byte, off int64) error
	// Facts says what else callers may count on. It is cheap, and most of it
	// never changes while the source is open.
	Facts() Facts
	// Close releases what the source holds. ReadAt calls in flight finish or
	// fail; later ones fail. Close may be called more than once.
	Close() error
}

// Facts are what is true of a source besides its bytes. The zero value is that
// of a source with ReadAt alone, whose reads cost no round trip and which
// nothing tells from another. A source that reads from another one passes on
// what is true of both, and nothing else: see ReadAtOnly.
type Facts struct {
	// Remote: the bytes cross a network, or come from what another program
	// brings. Files on network file systems are remote, too.
	Remote bool
	// Concurrency is how many reads at once the source can make use of, at most;
	// each costs a round trip, so that few large ones are better than many. 1: the
	// bytes come in order. 0: as many as the caller has, of any size.
	Concurrency int
	// RangeBytes is how many bytes a range best has that is read in steps, so many
	// that a round trip is lost in them; 0: ReadAt is better, and Ranges is nil.
	RangeBytes int64
	Ranges     Ranges
	// Identity tells the state in which the source was opened from every other;
	// the zero value: nothing does. Settled is false as long as a change of the
	// bytes might not show in it.
	Identity Identity
	Settled  bool
	// Now is the Identity by now: a file may have been written to. nil: it cannot
	// change while the source is open.
	Now func() (Identity, error)
	// File is the local file whose bytes these are; nil: there is none.
	File File
	// View gives n bytes from off of a source that lies in memory, where their
	// checksums have been compared: there is nothing to read and nothing to check.
	// They belong to the source, are not written to, and stay until Close. nil:
	// the source is not resident.
	View func(off, n int64) ([]byte, error)
	// Coding says in a word how the bytes at an offset are stored below, like
	// "encrypted"; nil: as they are.
	Coding func(off int64) string
	// Headers are those of the answer that opened the source; nil: it came from no
	// server that has any. They are the server's words, whatever it says in them.
	Headers map[string][]string
	// Prefetch tells what will be read soon, where that makes reads faster; it
	// waits for nothing and never fails. nil: it would not.
	Prefetch func(off, n int64)
}

// ReadAtOnly is what remains of the facts of a source for one that reads from it
// and compares or changes its bytes: nobody gets them but by ReadAt.
func (f Facts) ReadAtOnly() Facts {
	f.RangeBytes, f.Ranges, f.File, f.View = 0, nil, nil, nil
	return f
}

// A File is a local file as its source has it open.
type File interface {
	// WithFD calls fn with the open descriptor, which stays open meanwhile.
	WithFD(fn func(fd int) error) error
	// Expect says that a load begins which reads total bytes, of this file and
	// others, and how: a value of OVERWIRE_READ. It returns how many ReadAt calls
	// in flight serve the file best; 0: whatever the caller has.
	Expect(total int64, how string) (depth int)
	// DirectBytes is how many bytes were read by direct I/O since Expect.
	DirectBytes() int64
}

// An Identity tells one state of a file or an object from every other: while it
// is the same, so are the bytes.
type Identity struct {
	Device, Inode uint64
	Size          int64
	Modified      int64 // ns since 1970
	Changed       int64 // ns since 1970
	// Object is the URI of what is no local file, and Pin what its store tells
	// this state of it by: an ETag, a date, a key that is used once.
	Object, Pin string
}

// Pinned is the Identity of an object of a store; without a pin there is none.
func Pinned(s Source, pin string) (id Identity, settled bool) {
	if pin == "" {
		return Identity{}, false
	}
	return Identity{Size: s.Size(), Object: s.URI(), Pin: pin}, true
}

// Known says whether anything tells this state from others.
func (id Identity) Known() bool { return id != Identity{} }

// Unchanged says whether a source has the Identity id still.
func (f Facts) Unchanged(id Identity) bool {
	now := f.Identity
	if f.Now != nil {
		var err error
		if now, err = f.Now(); err != nil {
			return false
		}
	}
	return now.Known() && now == id
}

// Ranges are read in steps, in order: a caller that works on one step while the next
// is on its way asks for as much as hides a round trip and keeps as little as a
// step.
type Ranges interface {
	// AtOnce is how many of them are read at once as things stand: a source that
	// measures what pays may say another number each time.
	AtOnce() int
	// OpenRange waits until another range may be open, and gives one that nothing
	// was asked of yet: what it best has may depend on when that is.
	OpenRange(ctx context.Context) (Range, error)
}

// A Range is read by one goroutine at a time. From its beginning to its end it
// waits for no other range.
type Range interface {
	// Begin asks for n bytes from off, once, and waits until they are on their way.
	Begin(ctx context.Context, off, n int64) error
	// Next fills p with the bytes that follow those of the last step, as
	// Source.ReadAt does. After an error there is no other step.
	Next(p []byte) error
	// Waited tells what the steps since the last call waited for besides bytes: a
	// permit, where only a limited number of ranges may be open at once, and the beginning of
	// an answer.
	Waited() (permit, answer time.Duration)
	// Close gives up what was not read.
	Close() error
}
