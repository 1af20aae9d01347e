package source

// This file describes what a reader expects of an object that it opens.

// An Outline is what a reader expects of an object. Some stores do not report sizes, so their objects are read
// from the beginning. With an outline, such a source stops when the object cannot be the expected one. The zero
// value expects nothing.
type Outline struct {
	// Most is the largest size that the object may have, in bytes; 0 means any size.
	Most int64
	// Size derives the object's size from its first bytes. It returns -1 if they do not state it. If need exceeds
	// len(head), Size must be called again with that many bytes. A nil Size means that the size is unknown.
	Size func(uri string, head []byte) (size, need int64, err error)
	// Longer says that the object may have more bytes than Size reports; those are not needed.
	Longer bool
}
