// Package source defines Source, which reads the bytes of a file or object by offset. Sources know nothing
// about tensors. Each package below this one implements one kind of source.
package source

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/overwire/overwire/gosrc/errs"
)

// A Source is one file or object of a fixed size, read by offset.
//
// It is safe for concurrent use: ReadAt calls run in parallel.
type Source interface {
	// URI is the source's name as the user wrote it. It may contain secrets: apply errs.RedactURI before showing it.
	URI() string
	// Size is the number of bytes, fixed when the source was opened.
	Size() int64
	// ReadAt fills all of p from offset off or returns an error; it never returns a partial result. Reading beyond
	// Size, or from a medium with fewer bytes than Size, returns errs.ErrCorrupt ("truncated"). A failing medium
	// returns errs.ErrIO with the system's text. ReadAt returns errs.ErrCancelled soon after ctx is cancelled.
	ReadAt(ctx context.Context, p []byte, off int64) error
	// Facts returns further properties of the source. It is cheap. Most facts never change while the source is open.
	Facts() Facts
	// Close releases the source's resources. ReadAt calls in flight finish or fail; later calls fail. Close may
	// be called more than once.
	Close() error
}

// Facts describe a source beyond its bytes. The zero value describes a source that can only be read with
// ReadAt, with no round trip per read, and that has no identity. A source that wraps another one passes on only
// the facts that are true of the wrapper: see ReadAtOnly.
type Facts struct {
	// Remote means that the bytes come from another program or over a network, which includes network file systems.
	Remote bool
	// Quick means that the kernel serves the file from a local disk or memory, so reads never wait for a server. A file
	// on an unknown file system is neither Remote nor Quick.
	Quick bool
	// Concurrency is the largest number of parallel reads that the source can use. Each read costs a round
	// trip, so a few large reads are better than many small ones. 1 means that the bytes arrive in order. 0
	// means that there is no limit and that small reads cost nothing extra.
	Concurrency int
	// RangeBytes is the best size of a range: large enough to hide a round trip. 0 means that Ranges is nil and
	// that the source is read with ReadAt.
	RangeBytes int64
	Ranges     Ranges
	// Identity distinguishes the state in which the source was opened from every other state. The zero value means that
	// the state is unknown. While Settled is false, the bytes could change without a change of Identity.
	Identity Identity
	Settled  bool
	// Now returns the current Identity, because a file may have been written to. It is nil if the source cannot
	// change while it is open.
	Now func() (Identity, error)
	// File is the local file that holds these bytes, or nil.
	File File
	// View returns n bytes from off without a copy. Only sources in memory have it. The bytes belong to the
	// source, are read-only and stay valid until Close. If Compare is set, every load verifies their checksums;
	// otherwise they were verified once for all loads.
	View    func(off, n int64) ([]byte, error)
	Compare bool
	// Coding names how the store keeps the bytes at an offset, for example "encrypted". nil means that they are
	// stored unchanged.
	Coding func(off int64) string
	// Headers are the headers of the response that opened the source, unverified. nil means that there was no response.
	Headers map[string][]string
	// SHA256 is the hash of the bytes in 64 lowercase hex digits, according to the store. "" means that it is unknown.
	SHA256 string
	// Prefetch announces a range that will be read soon. It neither waits nor fails. nil means that the source
	// does not prefetch.
	Prefetch func(off, n int64)
	// Doubt reports bytes that were read and are wrong. It returns true if they may have come through other processes:
	// then the next ReadAt reads them from their store. nil means that all bytes come from their store.
	Doubt func(off, n int64) bool
}

// HeadBytes is how much of a file is read first. It covers the whole header of most files. The request that
// opens an object also fetches these bytes.
const HeadBytes = 256 << 10

// Head reads the first HeadBytes bytes of a source, or all of a shorter one.
func Head(ctx context.Context, src Source) ([]byte, error) {
	b := make([]byte, max(0, min(src.Size(), HeadBytes)))
	return b, src.ReadAt(ctx, b, 0)
}

// ReadAtOnly returns the facts of a wrapper that checks or changes the bytes, which are then only available
// through ReadAt.
func (f Facts) ReadAtOnly() Facts {
	f.RangeBytes, f.Ranges, f.File, f.View, f.Doubt = 0, nil, nil, nil, nil
	return f
}

// A File is a local file that a source has open.
type File interface {
	// WithFD calls fn with the open file descriptor. The file stays open until fn returns.
	WithFD(fn func(fd int) error) error
	// Expect announces a load that will read total bytes, from this file and others, in the mode how (a value of
	// OVERWIRE_READ). host means that the tensors are loaded into host memory. Expect returns how many parallel ReadAt
	// calls suit the file best; 0 means any number.
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
	// Object and Pin are set for remote sources. Object is the URI. Pin identifies the state in the store: an
	// ETag, a date, or a key that is used only once.
	Object, Pin string
}

// Pinned returns the Identity of an object in a store. The Identity is zero if pin is empty.
func Pinned(s Source, pin string) (id Identity, settled bool) {
	if pin == "" {
		return Identity{}, false
	}
	return Identity{Size: s.Size(), Object: s.URI(), Pin: pin}, true
}

// Known reports whether id is set.
func (id Identity) Known() bool { return id != Identity{} }

// Unchanged reports whether the source still has the Identity id.
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

// RuleNotCached is the rule of an errs.ErrNotFound that comes from a cache, without a request to the store.
const RuleNotCached = "NotCached"

// RuleRefused is the rule of an errs.ErrIO when a store refuses a request and a retry would not help.
const RuleRefused = "Refused"

// Changed returns the error for bytes that have changed since the source was opened.
func Changed() error {
	return errs.New(errs.ErrCorrupt, "changed while it was read: it was replaced or written to; load it again")
}

// Unwritten returns an error if the source was written to after it was opened, because data read from it may
// mix old and new bytes. It costs one fstat call. Renames and mode changes do not count: a file that a save
// replaced is still intact. Writes within one tick of the file system's clock are not detected.
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

// Ranges opens ranges. A range is read in order, step by step: while the caller processes one step, the next
// one arrives. A range requests enough bytes to hide a round trip and keeps one step in memory.
type Ranges interface {
	// AtOnce returns how many ranges should currently be read in parallel. A source that measures its link may
	// change the number at any time.
	AtOnce() int
	// OpenRange waits for a permit and returns a range that has not requested anything yet. The caller can then
	// choose the bytes as late as possible.
	OpenRange(ctx context.Context) (Range, error)
}

// A Range is read by one goroutine at a time. Once it has begun, it does not wait for other ranges.
type Range interface {
	// Begin requests n bytes from off and waits until they start to arrive. It is called once.
	Begin(ctx context.Context, off, n int64) error
	// Next fills p with the bytes that follow the previous step, under the same rules as Source.ReadAt. It is
	// not called again after an error.
	Next(p []byte) error
	// Waited returns how long the steps since the last call waited for a permit, and for responses to begin.
	Waited() (permit, answer time.Duration)
	// Close discards the bytes that were not read.
	Close() error
}

type urgentKey struct{}

// Urgent returns a context for reads that do not wait for a permit. Their caller holds resources that the permit
// holders are waiting for, so waiting could deadlock.
func Urgent(ctx context.Context) context.Context { return context.WithValue(ctx, urgentKey{}, true) }

// IsUrgent reports whether ctx is from Urgent.
func IsUrgent(ctx context.Context) bool { return ctx.Value(urgentKey{}) != nil }

// An Output is a file or an object that is being written. Readers do not see it until it is published.
//
// Write and Skip may run in parallel. The other methods are called afterwards, one at a time.
type Output interface {
	// URI is the name as the user wrote it, or the path of a local file with symbolic links resolved.
	URI() string
	// Write writes bytes at an offset, each offset at most once. It does not retain p. It blocks while the
	// store is slower than the caller.
	Write(p []byte, off int64) error
	// WriteView is like Write, but uses the bytes without a copy. They must not change until the save has ended or
	// Draft.StopSends has returned.
	WriteView(p []byte, off int64) error
	// Skip declares that [lo, hi) will not be written and consists of zeros.
	Skip(lo, hi int64) error
	// Finish sets the size and waits until the disk or the store has all bytes. Ranges that were neither written nor
	// skipped are zeros.
	Finish(size int64) error
}

// A Draft is an object that is being written to a store. Cancelling the context with which it was created ends every
// call except Drop and UndoPublish. Memory is bounded: parts are sent while the rest is still being written.
type Draft interface {
	Output
	// Publish makes the finished object visible atomically. It replaces an existing object of the same name.
	Publish() error
	// UndoPublish removes the published object unless another program replaced it. An error means that it may remain.
	UndoPublish() error
	// StopSends aborts all sends immediately. Only Drop may follow. Once it returns, the draft no longer reads
	// bytes passed to WriteView.
	StopSends()
	// Drop ends the draft and removes all unpublished data from the store. It may be called more than once.
	Drop()
}

// An Entry is a file below a folder of a store, at any depth.
type Entry struct {
	Name string // relative to the folder, separated by slashes
	Size int64  // -1 if the store does not report it
}

// notices are the warnings that Notices has not returned yet.
var notices struct {
	sync.Mutex
	texts []string
}

// maxNotices is the largest number of stored warnings.
const maxNotices = 64

// Notice stores a warning until the next call of Notices. The text must not contain secrets. The caller of
// Notices shows it once.
func Notice(text string) {
	notices.Lock()
	defer notices.Unlock()
	if !slices.Contains(notices.texts, text) && len(notices.texts) < maxNotices {
		notices.texts = append(notices.texts, text)
	}
}

// Notices returns the warnings added since the last call.
func Notices() []string {
	notices.Lock()
	defer notices.Unlock()
	texts := notices.texts
	notices.texts = nil
	return texts
}
