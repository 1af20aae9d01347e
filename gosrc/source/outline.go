package source

// This file tells a source what its reader knows of the object before it is opened.

import "context"

// An Outline is what a reader expects of an object: a source that has to bring it from its
// beginning on, and whose store does not state a size, stops where the object cannot be
// what is expected. The zero value expects nothing.
type Outline struct {
	// Most is how many bytes the object may have; 0: any number.
	Most int64
	// Size tells from the first bytes of an object how many it has, -1 if they do not say;
	// or, if need is more than len(head), that it needs that number to tell. nil: nothing
	// is known.
	Size func(uri string, head []byte) (size, need int64, err error)
	// Longer: the object may have more bytes, which are not wanted.
	Longer bool
}

type outlineKey struct{}

// In returns a context with which objects of this outline are opened.
func (o Outline) In(ctx context.Context) context.Context {
	return context.WithValue(ctx, outlineKey{}, o)
}

// OutlineOf is the outline of the objects that are opened with a context.
func OutlineOf(ctx context.Context) Outline {
	o, _ := ctx.Value(outlineKey{}).(Outline)
	return o
}
