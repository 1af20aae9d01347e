package source

// This file defines Draft, an object of a store while it is being written.

// A Draft is an object of a store while it is being written. Readers see it only once it is published. Cancelling
// the context that it was created with ends every call except Drop.
//
// Write and Skip may run in parallel; the other calls follow them, one at a time. Memory is bounded: parts are
// sent while the rest is still being written.
type Draft interface {
	// URI names the object as the user wrote it.
	URI() string
	// Write writes bytes at an offset, each offset at most once. It does not keep p. It blocks while the store is
	// slower than the caller.
	Write(p []byte, off int64) error
	// WriteView is Write for bytes that do not change until the draft has ended or StopSends has returned. The
	// store sends them without a copy.
	WriteView(p []byte, off int64) error
	// Skip declares that [lo, hi) will not be written and is zero.
	Skip(lo, hi int64) error
	// Finish sets the object's size and returns when the store has all of it. Ranges that were neither written
	// nor skipped are zero.
	Finish(size int64) error
	// Publish makes the finished object visible in one step. It replaces any earlier object of that name.
	Publish() error
	// StopSends aborts all sends at once. Only Drop may follow. The draft no longer reads the bytes of WriteView
	// afterwards.
	StopSends()
	// Drop ends the draft and removes from the store everything that was not published. It may be called more
	// than once.
	Drop()
}
