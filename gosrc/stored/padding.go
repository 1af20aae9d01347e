package stored

// This file checks the bytes between the chunks of a container.

import (
	"context"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/tensor"
)

// CheckPadding checks that the bytes between and after the chunks of source k of ix are
// zero, as the writer leaves them. If not, the error is errs.ErrCorrupt, with the offset.
func CheckPadding(ctx context.Context, src source.Source, ix *tensor.Index, k int) error {
	var pad [64]byte
	gap := func(i int, from, to int64) error {
		for from < to {
			if ctx.Err() != nil {
				return errs.Cause(ctx)
			}
			p := pad[:min(int64(len(pad)), to-from)]
			if err := src.ReadAt(ctx, p, from); err != nil {
				return err
			}
			for n, b := range p {
				if b != 0 {
					return errs.Place("verify", ix.Sources[k].URI, ix.Tensors[i].Name, from+int64(n),
						errs.New(errs.ErrCorrupt, "bytes between chunks are not zero: the file is damaged"))
				}
			}
			from += int64(len(p))
		}
		return nil
	}
	for i := range ix.Tensors {
		t := &ix.Tensors[i]
		if int(t.Source) != k || t.Count == 0 {
			continue
		}
		at := t.Off
		for _, c := range ix.Chunks[t.First : t.First+t.Count] {
			if err := gap(i, at, c.Off); err != nil {
				return err
			}
			at = c.Off + int64(c.Stored)
		}
		if err := gap(i, at, t.Off+t.Stored); err != nil {
			return err
		}
	}
	return nil
}
