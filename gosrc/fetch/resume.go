package fetch

// This file fetches objects to files and resumes interrupted fetches.

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

// File writes the bytes of the URIs to a file, which is either complete or absent. If the fetch of a single
// object is interrupted, a hidden file retains the bytes and the object's state in the store (ETag, size). The
// next run verifies their hash and resumes after them, unless the object has changed.
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

// bringObject is File for one URI. With inFolder, the note about the fetch remains, and a file that an earlier
// run completed is not fetched again. some reports whether bytes of this or an earlier run remain on the disk.
func bringObject(ctx context.Context, j *job.Job, spec Spec, out string, inFolder bool) (
	rep Report, some bool, err error) {
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
		err = errs.In("fetch", s.URI(), errs.New(errs.ErrEngine, "got %d bytes, expected %d", p.Done, s.Size()))
	}
	if err == nil {
		err = p.Publish(inFolder)
	}
	if err != nil && p.Done > 0 && !inFolder {
		source.Notice(fmt.Sprintf("%d of %d bytes of %s are saved: run fetch again to resume", p.Done, s.Size(), out))
	}
	return rep, p.Done > 0, err
}

func countBytes(j *job.Job, n int64) {
	if j != nil {
		j.Bytes.Add(n)
	}
}

// objectState returns an identifier of an object and its state in the store. It returns "" if the state has no
// identity, or if it is a local file, because copying it again is just as fast.
func objectState(s source.Source, opt source.Options) string {
	f := s.Facts()
	if f.File != nil || f.Identity.Pin == "" {
		return ""
	}
	store := opt.StoreOf(source.Scheme(s.URI()))
	sum := sha256.Sum256(fmt.Appendf(nil, "%s\x00%s\x00%s\x00%d", source.Path(s.URI()), store,
		f.Identity.Pin, s.Size()))
	return hex.EncodeToString(sum[:16])
}
