package tensorizer

// This file hashes tensors with several workers.

import (
	"cmp"
	"context"
	"slices"
	"sync/atomic"
	"time"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/sizes"
	"github.com/overwire/overwire/gosrc/internal/spawn"
)

// A Flow is the data of one tensor that is being hashed. Its functions are never called concurrently.
type Flow struct {
	Sum   *Summer
	Bytes int64
	// Next returns bytes [off, off+len(buf)). The result is buf, or another slice that is valid until the next call.
	Next func(ctx context.Context, buf []byte, off int64) ([]byte, error)
	// If Step is not 0, every offset passed to Next and every size except the last is a multiple of it.
	Step int64
	// Memory, if not nil, is the complete data and is used instead of Next.
	Memory []byte
	// Pass, if not nil, is called in order with every piece that was hashed.
	Pass func(p []byte) error
	// Done, if not nil, is called after all bytes were hashed and passed.
	Done func() error
	// Busy, if not nil, counts the nanoseconds that hashing takes.
	Busy *atomic.Int64
}

// Pieces of memory are small enough to stay in the second-level cache from hashing to Pass. They are large enough
// that two writers of a file rarely wait for each other. Other data is read in larger blocks.
const (
	memoryPiece = 512 << 10
	readPiece   = 1 << 20
)

// Run hashes all flows with several workers. Unless inOrder is set, the largest flows come first, so that they do not
// delay the end. The first error stops all workers.
func Run(ctx context.Context, name string, workers int, inOrder bool, flows []Flow) error {
	order := make([]*Flow, len(flows))
	for i := range flows {
		order[i] = &flows[i]
	}
	if !inOrder {
		slices.SortStableFunc(order, func(a, b *Flow) int { return cmp.Compare(b.Bytes, a.Bytes) })
	}
	return spawn.Each(ctx, name, workers, len(order), func(k int) error { return order[k].hashFlow(ctx) })
}

// hashFlow hashes one flow piece by piece.
func (f *Flow) hashFlow(ctx context.Context) error {
	var buf []byte
	for off := int64(0); off < f.Bytes; {
		if ctx.Err() != nil {
			return errs.FromOS(context.Cause(ctx))
		}
		p, err := f.piece(ctx, &buf, off)
		if err != nil {
			return err
		}
		start := time.Now()
		f.Sum.Write(p)
		if f.Busy != nil {
			f.Busy.Add(int64(time.Since(start)))
		}
		if f.Pass != nil {
			if err := f.Pass(p); err != nil {
				return err
			}
		}
		off += int64(len(p))
	}
	if f.Done != nil {
		return f.Done()
	}
	return nil
}

func (f *Flow) piece(ctx context.Context, buf *[]byte, off int64) ([]byte, error) {
	if f.Memory != nil {
		return f.Memory[off:min(off+memoryPiece, f.Bytes)], nil
	}
	step := max(1, f.Step)
	n := min(sizes.RoundUp(readPiece, step), f.Bytes-off)
	if *buf == nil {
		*buf = make([]byte, n)
	}
	return f.Next(ctx, (*buf)[:n], off)
}
