// Package fetch writes the bytes of URIs to one writer, in the given order. It reads parts ahead: two at
// first, and one more for each part written, up to a fixed window. If the caller stops early, most of the rest
// has not been downloaded.
package fetch

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/atomicfile"
	"github.com/overwire/overwire/gosrc/internal/modelfiles"
	"github.com/overwire/overwire/gosrc/internal/spawn"
	"github.com/overwire/overwire/gosrc/job"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/source/open"
)

const (
	part   = 4 << 20
	window = 16 // maximum number of parts in memory
	begin  = 2  // parts read ahead before the first one is written
)

// A Spec describes what to fetch.
type Spec struct {
	URIs    []string       `json:"uris"`
	Storage source.Options `json:"storage"`
	// Sizes are the sizes of the objects in bytes; nil if unknown. If an object has a different size, Fetch fails
	// before writing its first byte. With sizes, an external downloader is started only once for all objects.
	Sizes []int64 `json:"sizes"`
	// Own disables the external downloader, which may be this program.
	Own bool `json:"own"`
	// Most limits the total bytes of all objects; 0 means no limit.
	Most int64 `json:"most"`
	// From and To (exclusive) select bytes of a single object. If To is 0 or beyond the end of the object, the
	// range ends there.
	From int64 `json:"from"`
	To   int64 `json:"to"`
	// Pin is the state of a single object in an earlier fetch. If the object has changed, Fetch returns
	// errs.ErrCorrupt before writing a byte.
	Pin *Pin `json:"pin"`

	counted bool          // the caller has already added the size to the job
	first   source.Source // the opened first URI; Fetch closes it
}

// A Pin identifies a state of an object as its store reports it.
type Pin struct {
	Size int64 `json:"size"`
	// Identity is an ETag, a date, or a file's inode and time; nil if the store reports none. It consists of
	// bytes, because an ETag need not be UTF-8.
	Identity []byte `json:"identity"`
}

// A Report describes what was fetched.
type Report struct {
	Bytes   int64   `json:"bytes"`
	Seconds float64 `json:"seconds"`
	// Pin is set once the source is open, if there is only one URI.
	Pin *Pin `json:"pin"`
	// Headers are the headers of the server's first response, or nil.
	Headers map[string][]string `json:"headers"`
}

// A piece is a part that is being read.
type piece struct {
	buf  []byte
	err  error
	done chan struct{}
	last source.Source // source to close after this piece; nil unless this is its last piece
}

// Fetch writes the bytes of every URI to w. After an error, w has received a prefix of them. j may be nil.
func Fetch(ctx context.Context, j *job.Job, spec Spec, w io.Writer) (Report, error) {
	start := time.Now()
	if len(spec.URIs) == 0 {
		return Report{}, errs.New(errs.ErrArgument, "nothing to fetch")
	}
	if spec.From < 0 || spec.To < 0 || (spec.From > 0 || spec.To > 0) && len(spec.URIs) != 1 {
		return Report{}, errs.New(errs.ErrArgument, "a range (bytes %d to %d) requires exactly one URI, got "+
			"%d", spec.From, spec.To, len(spec.URIs))
	}
	if spec.Pin != nil && len(spec.URIs) != 1 {
		return Report{}, errs.New(errs.ErrArgument, "a pin requires exactly one URI, got %d", len(spec.URIs))
	}
	if spec.Sizes != nil && len(spec.Sizes) != len(spec.URIs) {
		return Report{}, errs.New(errs.ErrArgument, "got %d sizes for %d URIs: expected one for "+
			"each", len(spec.Sizes), len(spec.URIs))
	}
	ctx, cancel := context.WithCancelCause(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel(nil)
	pieces := make(chan *piece, window)
	free := make(chan []byte, window)
	ready := begin
	if spec.Own { // another program reads the output and needs all of it
		ready = window
	}
	for range ready {
		free <- nil
	}
	rep, more := Report{}, window-ready
	opened := func(s source.Source) error {
		if len(spec.URIs) != 1 {
			return nil
		}
		rep.Pin, rep.Headers = &Pin{s.Size(), identity(s)}, s.Facts().Headers
		if j != nil {
			j.SetReport(Report{Pin: rep.Pin, Headers: rep.Headers})
		}
		return spec.Pin.same(rep.Pin, s.URI())
	}
	spawn.GoFor(&wg, "fetch", func() {
		defer close(pieces)
		err := spawn.Guard("fetch", func() error { return readAhead(ctx, j, spec, opened, pieces, free, &wg) })
		if err != nil {
			cancel(err) // later causes are ignored
		}
	})
	for p := range pieces {
		<-p.done
		if p.err == nil && ctx.Err() == nil {
			n, err := w.Write(p.buf)
			rep.Bytes += int64(n)
			if j != nil {
				j.Bytes.Add(int64(n))
			}
			if err != nil {
				p.err = errs.New(errs.ErrIO, "write: %v", err)
			}
		}
		if p.err == nil && p.last != nil {
			p.err = source.Unwritten(p.last)
		}
		if p.err != nil {
			cancel(p.err)
		}
		if p.last != nil {
			_ = p.last.Close()
		}
		free <- p.buf[:cap(p.buf)]
		if more > 0 {
			more--
			free <- nil
		}
	}
	rep.Seconds = time.Since(start).Seconds()
	if ctx.Err() != nil {
		return rep, context.Cause(ctx)
	}
	return rep, nil
}

// identity returns what the store reports to distinguish this state of a source from others, or nil.
func identity(s source.Source) []byte {
	switch f := s.Facts(); {
	case f.File != nil: // inode and time reveal most changes, but not all
		return fmt.Append(nil, f.Identity.Device, f.Identity.Inode, f.Identity.Modified)
	case f.Identity.Known():
		return []byte(f.Identity.Pin)
	}
	return nil
}

// same compares the current state with the pin. A nil pin accepts every state.
func (p *Pin) same(now *Pin, uri string) error {
	if p == nil || p.Size == now.Size && bytes.Equal(p.Identity, now.Identity) {
		return nil
	}
	what := "its ETag or date differs"
	if p.Size != now.Size {
		what = fmt.Sprintf("it had %d bytes and now has %d", p.Size, now.Size)
	}
	return errs.In("fetch", uri, errs.New(errs.ErrCorrupt, "the object changed since it was opened: %s", what))
}

// readAhead opens the sources and starts reads while there are free buffers. It calls opened for each source.
func readAhead(ctx context.Context, j *job.Job, spec Spec, opened func(source.Source) error, pieces chan<- *piece,
	free <-chan []byte, wg *sync.WaitGroup) error {
	dial := open.With(spec.Storage).Open
	switch {
	case spec.Own:
		dial = open.Own(spec.Storage).Open
	case spec.Sizes != nil:
		several, rest := open.WithSizes(spec.URIs, spec.Sizes, spec.Storage)
		defer rest()
		dial = several
	}
	total := int64(0)
	for i, uri := range spec.URIs {
		s, err := spec.first, error(nil)
		if i > 0 || s == nil {
			s, err = dial(ctx, uri)
		}
		if err != nil {
			return err
		}
		if err := opened(s); err != nil {
			_ = s.Close()
			return err
		}
		size := s.Size()
		if spec.Sizes != nil && size != spec.Sizes[i] {
			_ = s.Close()
			return errs.In("fetch", uri, errs.New(errs.ErrCorrupt, "the object has %d bytes, expected "+
				"%d", size, spec.Sizes[i]))
		}
		if spec.To > 0 {
			size = min(size, spec.To)
		}
		from := min(spec.From, size)
		if total += size - from; spec.Most > 0 && total > spec.Most {
			_ = s.Close()
			return errs.In("fetch", uri, errs.New(errs.ErrFormat, "with this object, the total is %d bytes, over "+
				"the limit of %d", total, spec.Most))
		}
		if j != nil && !spec.counted {
			j.TotalBytes.Add(size - from)
		}
		if size == from {
			_ = s.Close()
		}
		n := int64(source.HeadBytes) // opening the source may have read these bytes
		for off := from; off < size; off, n = off+n, part {
			var buf []byte
			select {
			case buf = <-free:
			case <-ctx.Done():
				_ = s.Close()
				return context.Cause(ctx)
			}
			n = min(n, size-off)
			if int64(cap(buf)) < n {
				buf = make([]byte, n)
			}
			p := &piece{buf: buf[:n], done: make(chan struct{})}
			if off+n == size {
				p.last = s
			}
			pieces <- p // never blocks: the channel has room for all buffers
			spawn.GoFor(wg, "fetch part", func() {
				defer close(p.done)
				p.err = spawn.Guard("fetch part", func() error { return s.ReadAt(ctx, p.buf, off) })
			})
		}
	}
	return nil
}

// A FolderReport describes a fetched folder.
type FolderReport struct {
	Bytes   int64    `json:"bytes"`
	Seconds float64  `json:"seconds"`
	Files   []string `json:"files"`
}

// Folder fetches the files of a remote folder and its subfolders into the folder dst, weights first. It omits
// hidden files. From the Hub, all files come from one commit. A new dst becomes visible when it is complete.
// Until then it has a hidden name, and a later run resumes an interrupted fetch, as in File. Names that lead
// out of dst are refused before anything is written.
func Folder(ctx context.Context, j *job.Job, uri, dst string, opt source.Options) (rep FolderReport, err error) {
	start := time.Now()
	dir, files, err := filesOf(ctx, uri, opt)
	if err != nil {
		return rep, err
	}
	for _, f := range files {
		if j != nil {
			j.TotalBytes.Add(max(0, f.Size))
		}
	}
	work, some := dst, false
	var partial *atomicfile.PartialFolder // nil if dst exists
	if st, statErr := os.Stat(dst); statErr != nil || !st.IsDir() {
		if err := atomicfile.CheckFolder(dst); err != nil {
			return rep, err
		}
		if partial, err = atomicfile.OpenPartialFolder(dst); err != nil {
			return rep, err
		}
		work = partial.Work
		defer func() {
			if err == nil {
				err = partial.Publish()
			}
			partial.Close(err != nil && !some)
		}()
	}
	defer func() {
		if err != nil && some {
			source.Notice(dst + ": the files fetched so far are saved: run fetch again to resume")
		}
	}()
	paths := make([]string, len(files))
	for i, f := range files {
		paths[i] = filepath.Join(work, filepath.FromSlash(f.Name))
	}
	if partial != nil {
		if err := partial.KeepOnly(paths); err != nil {
			return rep, err
		}
	}
	for i, f := range files {
		if err := atomicfile.MakeFolders(filepath.Dir(paths[i])); err != nil {
			return rep, errs.In("fetch", paths[i], err)
		}
		spec := Spec{URIs: []string{source.Beside(dir, f.Name)}, Storage: opt, Own: true, counted: true}
		one, any, err := bringObject(ctx, j, spec, paths[i], true)
		rep.Bytes += one.Bytes
		if some = some || any; err != nil {
			return rep, err
		}
		rep.Files = append(rep.Files, filepath.Join(dst, filepath.FromSlash(f.Name)))
	}
	for _, path := range paths {
		atomicfile.ForgetPartial(path)
	}
	rep.Seconds = time.Since(start).Seconds()
	return rep, nil
}

// filesOf lists the files of a remote folder in the order in which they are fetched.
func filesOf(ctx context.Context, uri string, opt source.Options) (dir string, files []source.Entry, err error) {
	dir, files, err = open.With(opt).Walk(ctx, uri)
	if err != nil {
		return "", nil, err
	}
	files = slices.DeleteFunc(files, func(f source.Entry) bool {
		return filepath.IsLocal(f.Name) && (strings.HasPrefix(f.Name, ".") || strings.Contains(f.Name, "/."))
	})
	for _, f := range files {
		if !filepath.IsLocal(f.Name) || path.Clean(f.Name) != f.Name || strings.ContainsRune(f.Name, 0) {
			return "", nil, errs.In("fetch", uri, errs.New(errs.ErrFormat, "%q is not a valid file name", f.Name))
		}
	}
	slices.SortStableFunc(files, func(a, b source.Entry) int { return order(a.Name) - order(b.Name) })
	return dir, files, nil
}

// order returns 0 for weights, 1 for their indexes, and 2 for other files, which are fetched in this order.
// Files such as config.json, by which programs recognize a model, are fetched last.
func order(name string) int {
	n, weights := modelfiles.ParseName(path.Base(name))
	switch {
	case weights && !n.Index:
		return 0
	case weights:
		return 1
	}
	return 2
}

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
