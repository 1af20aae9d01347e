package source

// A Draft is one object of a store that is being written, and that no reader sees
// until it is published. The context that it was created with holds for all
// that it does but Drop.
//
// Write and Skip are safe in parallel; the other calls come one at a time,
// after them. Memory is bounded: what can be is sent while the rest is still
// being written.
type Draft interface {
	// URI names the object as the user wrote it.
	URI() string
	// Write puts bytes at an offset, each offset at most once. The bytes are
	// the caller's again when it returns. It waits while the store is slower.
	Write(p []byte, off int64) error
	// Skip says that [lo, hi) will not be written: it is zero.
	Skip(lo, hi int64) error
	// Finish gives the object its size and returns when the store has all of
	// it; what was neither written nor skipped is zero.
	Finish(size int64) error
	// Publish makes the finished object visible, in place of the one before,
	// in one step.
	Publish() error
	// Drop ends the draft: what was not published is removed from the store.
	// It may be called more than once.
	Drop()
}
