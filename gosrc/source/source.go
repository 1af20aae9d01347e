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
	// Close releases what the source holds. ReadAt calls in flight finish or
	// fail; later ones fail. Close may be called more than once.
	Close() error
}

// A Planned source reads better when it knows what is coming.
type Planned interface {
	// Expect says that a load begins which reads total bytes, of this source
	// and others, and how: a value of OVERWIRE_READ. It returns how many ReadAt
	// calls in flight serve this source best; 0: whatever the caller has.
	Expect(total int64, how string) (depth int)
	// Past is how many bytes were read past the page cache since Expect.
	Past() int64
}

// An Identity tells one state of a file from every other: while it is the
// same, so are the bytes.
type Identity struct {
	Device, Inode uint64
	Size          int64
	Modified      int64 // ns since 1970
	Changed       int64 // ns since 1970
	// Object is the URI of what is no local file, and what pins it there.
	Object string
}

// An Identified source has an Identity, that of the moment when it was opened;
// ok is false as long as a change of the bytes might not show in it. Now is the
// Identity that it has by now: a file may have been written to.
type Identified interface {
	Identity() (id Identity, ok bool)
	Now() (Identity, error)
}

// A Pinned source has an Identity of its store's: an ETag, a date, keys that
// are used once. "" is none.
type Pinned interface {
	Source
	Identity() string
}

// An Over is a source that gives what another one has in other words.
type Over interface{ Under() Source }

// IdentityOf is what tells the state in which a source was opened from every
// other; known is false where nothing does. settled is false as long as a change
// might not show.
func IdentityOf(s Source) (id Identity, settled, known bool) {
	switch s := s.(type) {
	case Over:
		return IdentityOf(s.Under())
	case Identified:
		id, settled = s.Identity()
		return id, settled, true
	case Pinned:
		if pin := s.Identity(); pin != "" {
			return Identity{Size: s.Size(), Object: s.URI() + "\x00" + pin}, true, true
		}
	}
	return id, false, false
}

// Unchanged says whether a source has the Identity id still.
func Unchanged(s Source, id Identity) bool {
	switch s := s.(type) {
	case Over:
		return Unchanged(s.Under(), id)
	case Identified:
		now, err := s.Now()
		return err == nil && now == id
	}
	now, _, known := IdentityOf(s)
	return known && now == id
}

// A Lender is a source whose bytes lie in memory, where their checksums have
// been compared: there is nothing to read and nothing to check.
type Lender interface {
	Source
	// Lend gives n bytes from off. They belong to the source, are not written
	// to, and stay until Close.
	Lend(off, n int64) ([]byte, error)
}

// A Ranged source can hand over a range in steps, in order: whoever works on
// one step while the next is on its way asks for as much as hides a round trip
// and keeps as little as a step.
type Ranged interface {
	Source
	// Ranged is how many bytes such a range best has; 0: reads that are whole
	// are better.
	Ranged() int64
	// AtOnce is how many of them are read at once as things stand: a source that
	// measures what pays may say another number each time.
	AtOnce() int
	// Turn waits until another range may be open, and gives one that nothing was
	// asked of yet: what it best has may depend on when that is.
	Turn(ctx context.Context) (Range, error)
}

// A Range is read by one goroutine at a time. From its beginning to its end it
// waits for no other range.
type Range interface {
	// Begin asks for n bytes from off, once, and waits until they are on their way.
	Begin(ctx context.Context, off, n int64) error
	// Next fills p with the bytes that follow those of the last step, as
	// Source.ReadAt does. After an error there is no other step.
	Next(p []byte) error
	// Close gives up what was not read.
	Close() error
}

// A Waiter is a Range that tells what its steps waited for besides bytes: its
// turn, where only so many ranges may be open at once, and the beginning of an
// answer. Both count from the last call.
type Waiter interface {
	Waited() (turn, answer time.Duration)
}
