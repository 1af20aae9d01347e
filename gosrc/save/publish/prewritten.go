package publish

// This file describes files with bytes that are known before a save writes them.

import (
	"context"

	"github.com/overwire/overwire/gosrc/internal/spawn"
)

// A Prewritten is such a file. In an index.json it stands for the tensors Names, of Tensors bytes. Fill writes
// each of its Bytes once, from one goroutine or several.
type Prewritten struct {
	Bytes   int64
	Names   []string
	Tensors int64
	Fill    func(ctx context.Context, write func(p []byte, off int64) error) error
}

// WholeFile is a file of these bytes.
func WholeFile(b []byte) *Prewritten {
	const step, writers = 8 << 20, 2 // file systems let one after the other in
	fill := func(ctx context.Context, write func(p []byte, off int64) error) error {
		return spawn.Each(ctx, "save.write", writers, (len(b)+step-1)/step, func(i int) error {
			return write(b[i*step:min(len(b), (i+1)*step)], int64(i*step))
		})
	}
	return &Prewritten{Bytes: int64(len(b)), Fill: fill}
}
