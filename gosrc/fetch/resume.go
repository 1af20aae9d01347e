package fetch

// This file brings objects to files, and goes on where an earlier run has stopped.

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/atomicfile"
	"github.com/overwire/overwire/gosrc/job"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/source/open"
)

// File writes the bytes of the URIs to a file, which is complete or absent. What an interrupted run has brought of a single object stays,
// hidden, next to its state at the store (ETag, size): the next run compares its hash, and goes on behind it, unless
// the object has changed.
func File(ctx context.Context, j *job.Job, spec Spec, out string) (Report, error) {
	if len(spec.URIs) != 1 || spec.From > 0 || spec.To > 0 {
		return fetchAnew(ctx, j, spec, out)
	}
	rep, _, err := bringObject(ctx, j, spec, out, false)
	return rep, err
}

func fetchAnew(ctx context.Context, j *job.Job, spec Spec, out string) (rep Report, err error) {
	err = atomicfile.With(out, func(f *os.File) (err error) {
		rep, err = Fetch(ctx, j, spec, f)
		return err
	})
	return rep, err
}

// bringObject is File for one URI. inFolder: the note of what was brought stays, and a file that an earlier run has completed is not
// brought again. some: bytes of it, or of an earlier run, are there.
func bringObject(ctx context.Context, j *job.Job, spec Spec, out string, inFolder bool) (rep Report, some bool, err error) {
	s, err := open.Own(spec.Storage).Open(ctx, spec.URIs[0])
	if err != nil {
		return Report{}, false, err
	}
	defer s.Close()
	spec.first = s
	of := objectState(s, spec.Storage)
	if of == "" {
		rep, err = fetchAnew(ctx, j, spec, out)
		return rep, err == nil, err
	}
	if inFolder && atomicfile.IsComplete(ctx, out, of, s.Size()) {
		countBytes(j, s.Size())
		return Report{}, true, nil
	}
	p, err := atomicfile.OpenPartial(ctx, out, of)
	if err != nil {
		return Report{}, false, err
	}
	if p == nil || p.Done > s.Size() {
		if p != nil {
			p.Close()
		}
		rep, err = fetchAnew(ctx, j, spec, out)
		return rep, err == nil, err
	}
	defer p.Close()
	if spec.From = p.Done; spec.counted {
		countBytes(j, p.Done)
	}
	rep, err = Fetch(ctx, j, spec, p)
	if err == nil && p.Done != s.Size() {
		err = errs.In("fetch", s.URI(), errs.New(errs.ErrEngine, "%d bytes came of %d", p.Done, s.Size()))
	}
	if err == nil {
		err = p.Publish(inFolder)
	}
	if err != nil && p.Done > 0 && !inFolder {
		source.Notice(fmt.Sprintf("%d of %d bytes of %s stay: fetch it again to go on there", p.Done, s.Size(), out))
	}
	return rep, p.Done > 0, err
}

func countBytes(j *job.Job, n int64) {
	if j != nil {
		j.Bytes.Add(n)
	}
}

// objectState names an object in its state at its store; "": nothing identifies it, or it is a local file, which is copied as fast.
func objectState(s source.Source, opt source.Options) string {
	f := s.Facts()
	if f.File != nil || f.Identity.Pin == "" {
		return ""
	}
	sum := sha256.Sum256(fmt.Appendf(nil, "%s\x00%s\x00%s\x00%d", source.Path(s.URI()), opt.StoreOf(source.Scheme(s.URI())),
		f.Identity.Pin, s.Size()))
	return hex.EncodeToString(sum[:16])
}
