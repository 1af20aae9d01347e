package publish

// This file publishes the objects of a store together.

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/source/open"
)

// objects is the destination of a save to a store.
type objects struct {
	pub    *Publication
	files  []*File
	drafts []source.Draft // indexed by file; nil if not created yet
}

func (o *objects) Create(ctx context.Context, i int) (source.Output, error) {
	d, err := open.Create(ctx, o.files[i].Path, o.pub.Options, o.files[i].Most)
	if err != nil {
		return nil, err
	}
	o.drafts[i] = d
	return timedDraft{d, o.pub}, nil
}

func (o *objects) Drop(err error) {
	o.pub.Job.Failed(err, func() {
		for _, d := range o.drafts {
			if d != nil {
				d.StopSends()
			}
		}
	})
	for _, d := range o.drafts {
		if d != nil {
			d.Drop()
		}
	}
}

// Publish publishes the objects in order. The last one is the object that readers look for. Then it removes stale
// objects. If publishing fails, the old model remains, and published shards are removed, except those that another
// program has replaced.
func (o *objects) Publish(ctx context.Context) error {
	stale, err := staleFiles(ctx, o.pub, o.pub.Path, o.files[len(o.files)-1])
	if err != nil {
		return err
	}
	stale = slices.DeleteFunc(stale, func(p string) bool {
		return slices.ContainsFunc(o.files, func(f *File) bool { return f.Path == p })
	})
	var shards []source.Draft
	for i, d := range o.drafts {
		if err := d.Publish(); err != nil {
			if remaining, why := UndoAll(shards); why != nil {
				err = errs.WithRule(errs.RuleRemains, fmt.Errorf("%w; cannot remove %s: %v", err,
					strings.Join(remaining, ", "), errs.Message(why)))
			}
			return err
		}
		if o.files[i].Shard {
			shards = append(shards, d)
		}
		if o.pub.OnPublish != nil {
			o.pub.OnPublish(d)
		}
	}
	// The new model is complete. Report objects that cannot be removed.
	var first error
	for _, p := range stale {
		if err := open.Remove(ctx, p, o.pub.Options); err != nil && first == nil {
			first = err
		}
	}
	return first
}

// A timedDraft adds the time of its writes to the publication's WriteTime.
type timedDraft struct {
	source.Draft
	pub *Publication
}

func (t timedDraft) Write(p []byte, off int64) error {
	defer t.pub.addTime(time.Now())
	return t.Draft.Write(p, off)
}

func (t timedDraft) WriteView(p []byte, off int64) error {
	defer t.pub.addTime(time.Now())
	return t.Draft.WriteView(p, off)
}

func (t timedDraft) Finish(size int64) error {
	defer t.pub.addTime(time.Now())
	return t.Draft.Finish(size)
}
