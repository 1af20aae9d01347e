package source

// This file passes a reader's expectations of an object to its source, before it is opened.

import "context"

// An Outline is what a reader expects of an object. It lets a source that reads from the beginning, from a store
// that does not state a size, stop when the object cannot be the expected one. The zero value expects nothing.
type Outline struct {
	// Most is the largest size that the object may have, in bytes; 0 means any size.
	Most int64
	// Size returns the object's size as its first bytes state it, -1 if they do not. If need exceeds len(head),
	// it needs that many bytes to tell. nil means that nothing is known.
	Size func(uri string, head []byte) (size, need int64, err error)
	// Longer says that the object may have more bytes, which are not wanted.
	Longer bool
}

type outlineKey struct{}

// In returns a context that opens objects with this outline.
func (o Outline) In(ctx context.Context) context.Context {
	return context.WithValue(ctx, outlineKey{}, o)
}

// OutlineOf returns the outline of a context.
func OutlineOf(ctx context.Context) Outline {
	o, _ := ctx.Value(outlineKey{}).(Outline)
	return o
}
