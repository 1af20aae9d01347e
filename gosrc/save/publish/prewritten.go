package publish

// This file describes files with content that is known before the save writes them.

import (
	"context"

	"github.com/overwire/overwire/gosrc/internal/spawn"
)

// A Prewritten is a file with known content. Names and Tensors are the names and the total bytes of its tensors, for an
// index.json. Fill writes each byte of the file once, from one or several goroutines.
type Prewritten struct {
	Bytes   int64
	Names   []string
	Tensors int64
	Fill    func(ctx context.Context, write func(p []byte, off int64) error) error
}

// WholeFile returns a Prewritten with the content b.
func WholeFile(b []byte) *Prewritten {
	const step, writers = 8 << 20, 2 // file systems serialize the writes of a file
	fill := func(ctx context.Context, write func(p []byte, off int64) error) error {
		return spawn.Each(ctx, "save.write", writers, (len(b)+step-1)/step, func(i int) error {
			return write(b[i*step:min(len(b), (i+1)*step)], int64(i*step))
		})
	}
	return &Prewritten{Bytes: int64(len(b)), Fill: fill}
}
