package source

// This file defines how objects of stores are written: as a Draft, by offset.

// A Draft is an object of a store while it is written; readers see it only once it
// is published. The context that it was created with ends every call but Drop.
//
// Write and Skip are safe in parallel; the other calls follow them, one at a time.
// Memory is bounded: parts are sent while the rest is still being written.
type Draft interface {
	// URI names the object as the user wrote it.
	URI() string
	// Write writes bytes at an offset, each offset at most once. It does not keep
	// p. It waits while the store is slower.
	Write(p []byte, off int64) error
	// WriteView is Write of bytes that stay as they are until the draft has ended, or StopSends has
	// returned: a store sends them from where they are.
	WriteView(p []byte, off int64) error
	// Skip says that [lo, hi) will not be written: it is zero.
	Skip(lo, hi int64) error
	// Finish sets the object's size and returns when the store has all of it; what
	// was neither written nor skipped is zero.
	Finish(size int64) error
	// Publish makes the finished object visible, in place of the one before,
	// in one step.
	Publish() error
	// StopSends ends what is being sent, at once; only Drop may follow. Afterwards the draft reads no
	// bytes of WriteView any more.
	StopSends()
	// Drop ends the draft and removes from the store what was not published. It may
	// be called more than once.
	Drop()
}
