package source

// This file defines Draft, an object that is being written to a store, and the entries of a folder listing.

// A Draft is an object that is being written to a store. Readers do not see it until it is published.
// Cancelling the context with which it was created ends every call except Drop and UndoPublish.
//
// Write and Skip may run in parallel. The other methods are called afterwards, one at a time. Memory is
// bounded: parts are sent while the rest is still being written.
type Draft interface {
	// URI is the object's name as the user wrote it.
	URI() string
	// Write writes bytes at an offset, each offset at most once. It does not retain p. It blocks while the
	// store is slower than the caller.
	Write(p []byte, off int64) error
	// WriteView is like Write, but sends the bytes without a copy. They must not change until the draft has
	// ended or StopSends has returned.
	WriteView(p []byte, off int64) error
	// Skip declares that [lo, hi) will not be written and consists of zeros.
	Skip(lo, hi int64) error
	// Finish sets the object's size and waits until the store has received all of it. Ranges that were neither
	// written nor skipped are zeros.
	Finish(size int64) error
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
