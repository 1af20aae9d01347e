package save

// This file writes the files of a save, several at once.

import (
	"context"
	"sync/atomic"
	"time"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/spawn"
	"github.com/overwire/overwire/gosrc/source"
)

const (
	// mostWriters is how many files are written at once: file systems let one writer at a
	// time into a file.
	mostWriters = 8
	// leastThreads is the least that one has: files that follow one another with all
	// threads end as soon.
	leastThreads = 4
)

// A writerShare is one of the writers that are at work at once, each on one file after the other: its number
// among them, how many there are, and how many threads it has.
type writerShare struct {
	number, of int
	threads    int
}

// divideWriters decides how many files are written at once, and what each of their writers may use.
func (w *writer) divideWriters(parts []outputFile) []writerShare {
	n := min(len(parts), mostWriters)
	if len(w.gpus) == 0 {
		n = min(n, max(1, w.threads/leastThreads))
	}
	for _, g := range w.gpus {
		n = min(n, max(1, g.SlotCount()/leastFileSlots))
	}
	if source.Remote(w.spec.Path) {
		n = 1 // an upload has several connections
	}
	all := make([]writerShare, n)
	for i := range all {
		all[i] = writerShare{i, n, max(1, (w.threads+n-1)/n)}
	}
	return all
}

// firstError is what ended the work of several goroutines, of which each cancels ctx by its error:
// those that come after the first are of that cancel.
func firstError(ctx context.Context, err error) error {
	if err == nil || ctx.Err() == nil {
		return err
	}
	return context.Cause(ctx)
}

// writeFiles makes and writes all files, and returns their sizes. The first error cancels the
// rest.
func (w *writer) writeFiles(ctx context.Context, cancel context.CancelCauseFunc, to destination, parts []outputFile,
	rep *Report) ([]int64, error) {
	all := w.divideWriters(parts)
	free := make(chan writerShare, len(all))
	for _, share := range all {
		free <- share
	}
	drafts, out := make([]draft, len(parts)), make([]int64, len(parts))
	each := func(do func(i int, share writerShare) error) error {
		return firstError(ctx, spawn.Each(ctx, "save.file", len(all), len(parts), func(i int) error {
			share := <-free
			defer func() { free <- share }()
			err := do(i, share)
			if err != nil && drafts[i] != nil {
				err = errs.In("save", drafts[i].URI(), err)
			}
			if err != nil {
				cancel(err)
			}
			return err
		}))
	}
	err := each(func(i int, share writerShare) (err error) {
		if drafts[i], err = to.create(ctx, i, &parts[i]); err != nil {
			return err
		}
		if w.stage != nil {
			drafts[i] = &staged{draft: drafts[i], ctx: ctx, stage: w.stage, clock: &w.clock}
		}
		if out[i], err = w.write(ctx, drafts[i], share, parts[i]); err != nil || w.stage != nil {
			return err
		}
		return drafts[i].Finish(out[i])
	})
	if err != nil || w.stage == nil {
		return out, err
	}
	rep.Staged = time.Since(w.start).Seconds()
	w.spec.Staged()
	passed := w.passed(rep.BytesIn)
	return out, each(func(i int, share writerShare) error {
		s := drafts[i].(*staged)
		if err := s.write(ctx, share.threads, passed); err != nil {
			return err
		}
		return s.Finish(out[i])
	})
}

// passed begins the progress anew, by stored bytes that are written; bytes are those of
// the tensors.
func (w *writer) passed(bytes int64) func(n int64) {
	w.job.Bytes.Store(0)
	all := max(1, w.stage.pos)
	var done atomic.Int64
	return func(n int64) {
		w.job.Bytes.Store(int64(float64(min(done.Add(n), all)) / float64(all) * float64(bytes)))
	}
}
