// Package source defines where bytes come from: a Source returns bytes by offset
// and knows nothing of tensors. Each kind of source is a package below this one.
package source

import (
	"context"
	"time"

	"github.com/overwire/overwire/gosrc/errs"
)

// A Source is one file or object of a fixed size, read by offset.
//
// It is safe for concurrent use: ReadAt calls run in parallel.
type Source interface {
	// URI names the source as the user wrote it. It may hold secrets: apply errs.RedactURI before showing it.
	URI() string
	// Size is the number of bytes, fixed when the source was opened.
	Size() int64
	// ReadAt fills all of p from offset off or returns an error; it never returns a partial result. Reading past
	// Size, or a medium that has fewer bytes than Size promised, is errs.ErrCorrupt ("truncated"). A failing
	// medium is errs.ErrIO with the system's text. ReadAt returns soon after ctx is cancelled, with
	// errs.ErrCancelled.
	ReadAt(ctx context.Context, p []byte, off int64) error
	// Facts says what else callers may rely on. It is cheap. Most of it never changes while the source is open.
	Facts() Facts
	// Close releases what the source holds. ReadAt calls in flight finish or fail;
	// later ones fail. Close may be called more than once.
	Close() error
}

// Facts describe a source beyond its bytes. The zero value describes a source that only has ReadAt, with reads
// that cost no round trip and a state that nothing identifies. A source that wraps another one passes on only the
// facts that hold for both: see ReadAtOnly.
type Facts struct {
	// Remote says that the bytes cross a network or come from another program. Network file systems count as
	// remote.
	Remote bool
	// Quick says that no read waits longer than a disk takes, because the kernel itself serves the file. An
	// unknown file system is neither Remote nor Quick, since it may wait for a server.
	Quick bool
	// Concurrency is the most reads in flight that the source can use. Each costs a round trip, so few large
	// reads are better than many small ones. 1 means that the bytes come in order, 0 that there is no limit and
	// reads may have any size.
	Concurrency int
	// RangeBytes is the best size of a range: large enough to hide a round trip. If it is 0, use ReadAt; Ranges
	// is nil.
	RangeBytes int64
	Ranges     Ranges
	// Identity distinguishes the state in which the source was opened from every other. The zero value means that
	// nothing does. While Settled is false, the bytes could change without a change of Identity.
	Identity Identity
	Settled  bool
	// Now returns the current Identity, since a file may have been written to. nil means that the source cannot
	// change while it is open.
	Now func() (Identity, error)
	// File is the local file that holds these bytes, nil if there is none.
	File File
	// View returns n bytes from off without a copy, for a source in memory; nil for all other sources. The bytes
	// belong to the source, are read-only and stay valid until Close. With Compare, every load compares their
	// checksums; otherwise that was done once for all loads.
	View    func(off, n int64) ([]byte, error)
	Compare bool
	// Coding names how the bytes at an offset are stored underneath, for example "encrypted". nil means that they
	// are stored as they are.
	Coding func(off int64) string
	// Headers are those of the response that opened the source, unverified. nil means that there was no such
	// response.
	Headers map[string][]string
	// Prefetch announces a range that will be read soon, which makes some reads faster. It neither waits nor
	// fails. nil means that announcing would not help.
	Prefetch func(off, n int64)
}

// HeadBytes is how much of a file is read first. It covers the whole header of most files. Opening an object
// brings these bytes with it.
const HeadBytes = 256 << 10

// Head reads the first HeadBytes bytes of a source, or all of a shorter one.
func Head(ctx context.Context, src Source) ([]byte, error) {
	b := make([]byte, max(0, min(src.Size(), HeadBytes)))
	return b, src.ReadAt(ctx, b, 0)
}

// ReadAtOnly returns the facts of a source that wraps this one and checks or changes its bytes, so they are only
// available by ReadAt.
func (f Facts) ReadAtOnly() Facts {
	f.RangeBytes, f.Ranges, f.File, f.View = 0, nil, nil, nil
	return f
}

// A File is a local file that a source has open.
type File interface {
	// WithFD calls fn with the open descriptor, which stays open meanwhile.
	WithFD(fn func(fd int) error) error
	// Expect announces a load that will read total bytes, of this file and others, in the mode that
	// OVERWIRE_READ=how names. host says that its tensors fill host memory. Expect returns how many ReadAt calls
	// in flight suit the file best; 0 means any number.
	Expect(total int64, host bool, how string) (depth int)
	// DirectBytes is the number of bytes read by direct I/O since Expect.
	DirectBytes() int64
}

// An Identity distinguishes one state of a file or object from every other: equal identities mean equal bytes.
type Identity struct {
	Device, Inode uint64
	Size          int64
	Modified      int64 // ns since 1970
	Changed       int64 // ns since 1970
	// Object and Pin are set for remote sources. Object is the URI. Pin identifies the state at its store: an
	// ETag, a date, or a key that is used once.
	Object, Pin string
}

// Pinned returns the Identity of an object of a store. Without a pin there is none.
func Pinned(s Source, pin string) (id Identity, settled bool) {
	if pin == "" {
		return Identity{}, false
	}
	return Identity{Size: s.Size(), Object: s.URI(), Pin: pin}, true
}

// Known reports whether id identifies a state.
func (id Identity) Known() bool { return id != Identity{} }

// Unchanged reports whether a source still has the Identity id.
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

// RuleNotCached is the rule of an errs.ErrNotFound that a cache returns without asking its store.
const RuleNotCached = "NotCached"

// RuleRefused is the rule of an errs.ErrIO when a store refuses a request and another try would not help.
const RuleRefused = "Refused"

// Changed returns the error for bytes that have changed since the source was opened.
func Changed() error {
	return errs.New(errs.ErrCorrupt, "changed while it was read: it was replaced or written to; load it again")
}

// Unwritten refuses a source that was written to since it was opened: data read from it may mix both states. It
// costs one fstat call. Changing a file's name or mode does not count: a file that a save replaces is still
// whole. Writes within one tick of the file system's clock cannot be seen.
func Unwritten(s Source) error {
	f := s.Facts()
	if f.Now == nil {
		return nil
	}
	now, err := f.Now()
	if err == nil && now != f.Identity {
		err = errs.In("read", s.URI(), Changed())
	}
	return err
}

// Ranges are read in steps, in order: while a caller works on one step, the next is on its way. A range requests
// enough to hide a round trip and keeps one step in memory.
type Ranges interface {
	// AtOnce is how many ranges to read at once now. A source that measures its link may change the number at any
	// time.
	AtOnce() int
	// OpenRange waits for a permit and returns a range that has not requested anything yet. That lets the caller
	// choose its bytes as late as possible.
	OpenRange(ctx context.Context) (Range, error)
}

// A Range is read by one goroutine at a time. Between Begin and its end it waits
// for no other range.
type Range interface {
	// Begin requests n bytes from off and waits until they start to arrive. It is called once.
	Begin(ctx context.Context, off, n int64) error
	// Next fills p with the bytes after those of the last step, as Source.ReadAt
	// does. After an error there is no further step.
	Next(p []byte) error
	// Waited returns how long the steps since the last call waited for a permit, and for a response to begin.
	Waited() (permit, answer time.Duration)
	// Close abandons what was not read.
	Close() error
}
