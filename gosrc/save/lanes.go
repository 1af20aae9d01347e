package save

// This file writes the files of a save, several at once.

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/spawn"
	"github.com/overwire/overwire/gosrc/source"
)

const (
	// mostLanes is how many files are written at once: file systems let one writer at a
	// time into a file.
	mostLanes = 8
	// laneThreads is the least of a lane's: files that follow one another with all
	// threads end as soon.
	laneThreads = 4
)

// A lane writes one file after the other, beside others.
type lane struct {
	number, of int
	threads    int
}

// lanesOf are those of a save of these files.
func (w *writer) lanesOf(parts []part) []lane {
	n := min(len(parts), mostLanes)
	if len(w.gpus) == 0 {
		n = min(n, max(1, w.threads/laneThreads))
	}
	for _, g := range w.gpus {
		n = min(n, max(1, g.Slots()/laneSlots))
	}
	if source.Remote(w.spec.Path) {
		n = 1 // an upload has several connections
	}
	all := make([]lane, n)
	for i := range all {
		all[i] = lane{i, n, max(1, (w.threads+n-1)/n)}
	}
	return all
}

// A failure is the first error of several goroutines: those that come after it are of the
// cancel that it makes.
type failure struct {
	cancel context.CancelCauseFunc
	once   sync.Once
	err    error
}

// noteError keeps an error, if it is the first, and cancels the rest.
func (f *failure) noteError(err error) {
	if err != nil {
		f.once.Do(func() { f.err = err; f.cancel(err) })
	}
}

// firstOr is the first error, or else err. No goroutine runs any more.
func (f *failure) firstOr(err error) error {
	if f.err != nil {
		return f.err
	}
	return err
}

// writeFiles makes and writes all files, and returns their sizes. The first error cancels the
// rest.
func (w *writer) writeFiles(ctx context.Context, cancel context.CancelCauseFunc, to destination, parts []part,
	rep *Report) ([]int64, error) {
	all := w.lanesOf(parts)
	free := make(chan lane, len(all))
	for _, one := range all {
		free <- one
	}
	drafts, out := make([]draft, len(parts)), make([]int64, len(parts))
	first := failure{cancel: cancel}
	each := func(do func(i int, on lane) error) error {
		return first.firstOr(spawn.Each(ctx, "save.file", len(all), len(parts), func(i int) error {
			on := <-free
			defer func() { free <- on }()
			err := do(i, on)
			if err != nil && drafts[i] != nil {
				err = errs.In("save", drafts[i].URI(), err)
			}
			first.noteError(err)
			return err
		}))
	}
	err := each(func(i int, on lane) (err error) {
		if drafts[i], err = to.create(ctx, i, &parts[i]); err != nil {
			return err
		}
		if w.stage != nil {
			drafts[i] = &staged{draft: drafts[i], ctx: ctx, stage: w.stage, clock: &w.clock}
		}
		if out[i], err = w.write(ctx, drafts[i], on, parts[i]); err != nil || w.stage != nil {
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
	return out, each(func(i int, on lane) error {
		s := drafts[i].(*staged)
		if err := s.write(ctx, on.threads, passed); err != nil {
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
