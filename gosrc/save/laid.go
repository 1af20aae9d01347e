package save

// This file writes files whose bytes are there already, or that another package has
// laid out, as a save writes its own.

import (
	"context"

	"github.com/overwire/overwire/gosrc/companions"
	"github.com/overwire/overwire/gosrc/internal/spawn"
	"github.com/overwire/overwire/gosrc/job"
)

// A Laid is such a file: a safetensors file that stands for the tensors Names, of
// Tensors bytes, in an index.json. Fill writes each of its Bytes once, from one
// goroutine or several.
type Laid struct {
	Bytes   int64
	Names   []string
	Tensors int64
	Fill    func(ctx context.Context, write func(p []byte, off int64) error) error
}

// wholeFile is a file of these bytes.
func wholeFile(b []byte) *Laid {
	const step, writers = 8 << 20, 2 // file systems let one after the other in
	return &Laid{Bytes: int64(len(b)), Fill: func(ctx context.Context, write func(p []byte, off int64) error) error {
		return spawn.Each(ctx, "save.write", writers, (len(b)+step-1)/step, func(i int) error {
			return write(b[i*step:min(len(b), (i+1)*step)], int64(i*step))
		})
	}}
}

// WriteWhole writes a file whose bytes are there. An index of shards of its name may stay beside it.
func WriteWhole(ctx context.Context, path string, b []byte) error {
	spec := Spec{Path: path, Beside: true}
	if err := spec.checkSpec(); err != nil {
		return err
	}
	_, err := newWriter(spec, nil).saveAll(ctx, []outputFile{{path: spec.Path, laid: wholeFile(b)}})
	return err
}

// copyOf is a file like a companion of the source's.
func copyOf(f companions.File) *Laid {
	return &Laid{Bytes: f.Size, Fill: func(ctx context.Context, write func(p []byte, off int64) error) error {
		return companions.Copy(ctx, f, write)
	}}
}

// Lay writes files that belong together, to spec.Path or, of several, to shards of that
// name with an index. Convert's doc says when it is a folder; the files are named
// after stem there, and companions of the folder src ("": none) are copied.
func Lay(ctx context.Context, j *job.Job, src, stem string, files []Laid, spec Spec) (rep Report, err error) {
	if err := spec.checkSpec(); err != nil {
		return rep, err
	}
	w := newWriter(spec, j)
	folder, dst := isFolder(spec.Path, []string{src}, 1), spec.Path
	w.spec.Path = pathIn(folder, stem, spec)
	parts := make([]outputFile, len(files))
	for k := range files {
		parts[k].laid = &files[k]
	}
	parts = nameParts(w.spec.Path, parts)
	if !folder {
		return w.saveAll(ctx, parts)
	}
	return w.intoFolder(ctx, nil, []string{src}, dst, parts, companionOptions{})
}
