package publish

import (
	"context"
	"testing"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/job"
	"github.com/overwire/overwire/gosrc/source"
)

// A watchedDraft records at each call whether the job has ended for its waiters.
type watchedDraft struct {
	source.Draft
	over  func() bool
	stops []bool
	drops []bool
}

func (d *watchedDraft) StopSends() { d.stops = append(d.stops, d.over()) }
func (d *watchedDraft) Drop()      { d.drops = append(d.drops, d.over()) }

// A cancelled save ends for its caller as soon as the caller's memory is no longer in use, before the store has removed
// the parts. A failing save waits for parts in flight.
func TestCancelStopsSends(t *testing.T) {
	for _, isCancelled := range []bool{true, false} {
		var d *watchedDraft
		j := job.Start("save", func(ctx context.Context, j *job.Job) error {
			d = &watchedDraft{over: func() bool { return job.IsClosed(j.Done()) }}
			o := &objects{pub: &Publication{Job: j}, drafts: []source.Draft{nil, d}}
			if isCancelled {
				j.Cancel()
			}
			err := errs.New(errs.ErrIO, "no")
			o.Drop(err)
			return err
		})
		<-j.Done()
		if !job.CancelAll(-1) {
			t.Fatal("the job has not ended")
		}
		if len(d.stops) > 0 != isCancelled || isCancelled && d.stops[0] || len(d.drops) != 1 ||
			d.drops[0] != isCancelled {
			t.Fatalf("cancelled: %v, over at StopSends: %v, at Drop: %v", isCancelled, d.stops, d.drops)
		}
	}
}
