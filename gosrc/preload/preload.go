// Package preload runs loads that start automatically when overwire is imported with a preload variable set. They
// need neither Python nor its lock: they open, read and decode while the interpreter imports other modules.
//
// A load takes over a preload file by file, and only for exactly the bytes that it would read itself. It opens
// its files and skips reading files with the identity of a preloaded file (device, inode, size and times; for an
// object of a store its ETag or date). Each tensor is given out once. A preload is dropped if its file was
// replaced or written to, or if its tensors differ from what the load asks for. A preload that failed is
// forgotten: the load then gets its own error, or none.
package preload

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/spawn"
	"github.com/overwire/overwire/gosrc/job"
	"github.com/overwire/overwire/gosrc/knob"
	"github.com/overwire/overwire/gosrc/load"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/source/file"
	"github.com/overwire/overwire/gosrc/source/open"
	"github.com/overwire/overwire/gosrc/tensor"
)

// A Preload is one background load, including the opening of its files.
type Preload struct {
	uris    []string
	reached string // format.Access.Key
	device  string // as the load's options name it; "" is the host
	read    string // a value of OVERWIRE_READ
	cancel  context.CancelFunc

	paused chan struct{} // closed when it waits for a file to become old enough
	pauses sync.Once     // of paused
	opened chan struct{} // closed when the fields below are set
	model  *load.Preloaded
	files  []preloaded
	err    error
}

type preloaded struct {
	id    source.Identity
	uri   string
	names []string // names that stand for it
}

var (
	mu    sync.Mutex
	live  []*Preload
	notes []Note // notes of dropped preloads, until Join reports them
)

// A Note says why a preload was dropped. Routine means that the program did it on purpose.
type Note struct {
	Text    string `json:"text"`
	Routine bool   `json:"routine"`
}

var errCancelled = errs.New(errs.ErrCancelled, "by the caller")

// Start starts to load everything that spec names. A second Start of the same files to the same device returns
// the first preload, unless the files were replaced or the tensors taken since.
func Start(spec load.Spec, opt load.Options) *Preload {
	p := &Preload{uris: normalizeURIs(spec.URIs), reached: spec.Storage.Key(), device: deviceName(opt.Device),
		read:   readingMode(opt.Read),
		paused: make(chan struct{}), opened: make(chan struct{})}
	mu.Lock()
	defer mu.Unlock()
	pruneEmpty()
	for _, old := range slices.Clone(live) {
		if !slices.Equal(old.uris, p.uris) || old.reached != p.reached {
			continue
		}
		if old.device == p.device && old.read == p.read && old.isWhole() {
			return old
		}
		old.dropWithNote("", true)
	}
	live = append(live, p)
	ctx, cancel := context.WithCancel(spawn.Context())
	p.cancel = cancel
	spawn.Go("preload", func() {
		defer cancel()
		defer close(p.opened)
		p.err = spawn.Guard("preload", func() error { return p.openFiles(ctx, spec, opt) })
		if errors.Is(p.err, context.Canceled) {
			p.err = errCancelled
		}
		if p.err != nil {
			mu.Lock()
			live = slices.DeleteFunc(live, func(q *Preload) bool { return q == p })
			mu.Unlock()
		}
	})
	return p
}

// openFiles opens the files and starts to preload their tensors.
func (p *Preload) openFiles(ctx context.Context, spec load.Spec, opt load.Options) error {
	if at := slices.IndexFunc(spec.URIs, open.Downloaded); at >= 0 {
		return unknownState(spec.URIs[at], "an external downloader gives")
	}
	m, ids, err := p.whenSettled(ctx, spec)
	if err != nil {
		return err
	}
	for i, s := range m.Index().Sources {
		p.files = append(p.files, preloaded{ids[i], s.URI, namesOf(s.URI)})
	}
	if p.model, err = load.NewPreloaded(m, opt); err != nil {
		m.Close()
	}
	return err
}

// unknownState is the error for an object that a later load could not identify. Only the load itself may read it,
// once.
func unknownState(uri, who string) error {
	return &errs.At{Verb: "preload", Source: uri, Chunk: -1, Offset: -1,
		Err: errs.New(errs.ErrNotSupported,
			"%s neither an ETag nor a date to compare, so only the load itself can read it", who)}
}

// Time stamps of a file system are as coarse as a tick of the kernel's clock, or two seconds if they have no
// fractions of a second.
const (
	tick   = 40 * time.Millisecond
	coarse = 2100 * time.Millisecond
	looks  = 50
)

// whenSettled opens files after their last change is old enough that another change would show in their times.
// For a file that was saved just now it waits until then.
func (p *Preload) whenSettled(ctx context.Context, spec load.Spec) (*load.Model, []source.Identity, error) {
	var before []source.Identity
	for look := range looks {
		m, err := load.Open(ctx, spec)
		if err != nil {
			return nil, nil, err
		}
		ids, settled, known := m.FileIdentities()
		if known && (settled || slices.Equal(ids, before)) {
			return m, ids, nil
		}
		where := m.Index().Sources[0].URI
		m.Close()
		if !known {
			return nil, nil, unknownState(where, "its server gives")
		}
		before = ids
		if err := p.pauseForClock(ctx, look, ids); err != nil {
			return nil, nil, err
		}
	}
	return nil, nil, &errs.At{Verb: "preload", Source: spec.URIs[0], Chunk: -1, Offset: -1,
		Err: errs.New(errs.ErrIO, "it is being written to")}
}

// pauseForClock waits until a change of the files would show in their times. A later load does not wait for a
// preload that pauses long or repeatedly.
func (p *Preload) pauseForClock(ctx context.Context, look int, ids []source.Identity) error {
	pause := tick
	if slices.ContainsFunc(ids, func(id source.Identity) bool {
		return id.Object == "" && id.Changed%int64(time.Second) == 0
	}) {
		pause = coarse
	}
	if look > 0 || pause > tick {
		p.pauses.Do(func() { close(p.paused) })
	}
	select {
	case <-time.After(pause):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Drop forgets the preload and cancels it. Loads keep what they have taken over.
func (p *Preload) Drop() {
	mu.Lock()
	defer mu.Unlock()
	p.dropWithNote("", true)
}

// dropWithNote is Drop with a note for Join to report. mu is held.
func (p *Preload) dropWithNote(why string, routine bool) {
	if !slices.Contains(live, p) {
		return
	}
	live = slices.DeleteFunc(live, func(q *Preload) bool { return q == p })
	if why != "" {
		notes = append(notes, Note{fmt.Sprintf("the preload of %s was dropped: %s", errs.RedactURI(p.uris[0]), why),
			routine})
	}
	p.cancel()
	end := func() {
		<-p.opened
		if p.model != nil {
			p.model.Drop()
		}
	}
	if job.IsClosed(p.opened) {
		end() // now, before the load that cannot use it allocates as much again
	} else {
		spawn.Go("preload drop", end)
	}
}

// pruneEmpty forgets preloads that have given out all their tensors. mu is held.
func pruneEmpty() {
	live = slices.DeleteFunc(live, func(p *Preload) bool {
		return job.IsClosed(p.opened) && (p.model == nil || p.model.Spent())
	})
}

// isWhole reports whether all tensors are still available to a load. mu is held.
func (p *Preload) isWhole() bool {
	s, done, err := p.Opened(0)
	return !done || err == nil && s.Whole() && p.replacedFile() == ""
}

// replacedFile names a local file of the preload that was replaced or removed; "" if
// none was, or while the files are not open. mu is held.
func (p *Preload) replacedFile() string {
	if !job.IsClosed(p.opened) {
		return ""
	}
	for _, f := range p.files {
		if path, ok := source.Local(f.uri); ok && f.id.Object == "" {
			if now, err := file.Identify(path); err != nil || now != f.id {
				return f.uri
			}
		}
	}
	return ""
}

// Sweep drops the preloads of files that a save has just replaced: local files, or objects of a store at or below
// a URI.
func Sweep(uri string) {
	mu.Lock()
	defer mu.Unlock()
	pruneEmpty()
	for _, p := range slices.Clone(live) {
		gone := p.replacedFile()
		for _, u := range p.uris {
			if source.Remote(uri) && (u == uri || strings.HasPrefix(u, strings.TrimSuffix(uri, "/")+"/") ||
				strings.HasPrefix(uri, strings.TrimSuffix(u, "/")+"/")) {
				gone = u
			}
		}
		if gone != "" {
			p.dropWithNote(errs.RedactURI(gone)+" was replaced", true)
		}
	}
}

// Said returns why preloads were dropped. Each note is returned once.
func Said() []Note {
	mu.Lock()
	defer mu.Unlock()
	said := notes
	notes = nil
	return said
}

// An Answer is the result of Join.
type Answer struct {
	// Device is where the preloaded tensors for loads of the model are; nil if there are none.
	Device *string `json:"device"`
	// Notes say why preloads were dropped, since the last Answer.
	Notes []Note `json:"notes"`
}

// Join lets loads of a model to a device take the preloaded tensors of its files. It drops preloads of these
// files that it cannot use: those of other bytes, on another device, or read in another mode; with alone set, all
// of them. It waits up to d until preloads that may be of the same files have opened theirs; done is false if d
// was too short.
func Join(m *load.Model, opt load.Options, alone bool, d time.Duration) (a Answer, done bool) {
	srcs := m.Index().Sources
	if !waitForOpened(srcs, d) {
		return a, false
	}
	ids, _, _ := m.FileIdentities()
	device := deviceName(opt.Device)
	mu.Lock()
	defer mu.Unlock()
	pruneEmpty()
	for _, p := range slices.Clone(live) {
		if !job.IsClosed(p.opened) {
			if p.names(srcs) { // it is paused
				p.dropWithNote("its file was still being written to", false)
			}
			continue
		}
		if p.reached != m.Reached() || p.err != nil {
			continue
		}
		pairs, other := p.matchFiles(srcs, ids)
		if len(pairs) == 0 && other == "" {
			continue
		}
		why, routine := p.reasonUnfit(m, pairs, device, readingMode(opt.Read))
		switch {
		case other != "":
			p.dropWithNote(other+" was replaced since", false)
			continue
		case alone:
			p.dropWithNote("this load reads the files itself", false)
			continue
		case a.Device != nil && *a.Device != p.device:
			p.dropWithNote("other files of the load are on "+cmp.Or(*a.Device, "the host"), false)
			continue
		case why != "":
			p.dropWithNote(why, routine)
			continue
		}
		for _, at := range pairs {
			if m.Attach(at[0], p.model, at[1], p.files[at[1]].id) {
				a.Device = &p.device
			} else {
				p.dropWithNote(errs.RedactURI(srcs[at[0]].URI)+" was written to since", false)
			}
		}
	}
	a.Notes, notes = notes, nil
	return a, true
}

// matchFiles pairs a model's files with the same files of the preload that were not
// given to a load. other is a file of the preload that was replaced.
func (p *Preload) matchFiles(srcs []tensor.Source, ids []source.Identity) (pairs [][2]int, other string) {
	for i, id := range ids {
		if id == (source.Identity{}) { // in memory, or from a server that reports no identity
			continue
		}
		k := slices.IndexFunc(p.files, func(f preloaded) bool { return f.id == id })
		if k >= 0 {
			if !p.model.Gone(k) {
				pairs = append(pairs, [2]int{i, k})
			}
			continue
		}
		mine := namesOf(srcs[i].URI)
		for _, f := range p.files {
			if slices.ContainsFunc(f.names, func(n string) bool { return slices.Contains(mine, n) }) {
				other = errs.RedactURI(f.uri)
			}
		}
	}
	return pairs, other
}

// reasonUnfit says why a preload's tensors do not fit a load of a model to a device, "" if they fit.
func (p *Preload) reasonUnfit(m *load.Model, pairs [][2]int, device, read string) (why string, routine bool) {
	if p.device != "" && p.device != device {
		return "it is on " + p.device + ", and the load goes to " + cmp.Or(device, "the host"), false
	}
	if p.read != read {
		return fmt.Sprintf("it was read in mode %q, but the load uses %q", p.read, read), false
	}
	for _, at := range pairs {
		switch mapped := p.model.Mapped(at[1]); {
		case mapped && device != "":
			return "its tensors are mapped files, but a load to a GPU reads them, now from the page cache", true
		case device == "" && !m.MapsAs(at[0], p.model.Model(), at[1]):
			return "one of them maps the file and the other reads it", false
		}
	}
	return "", false
}

// waitForOpened waits until every preload has opened its files that may be those of a model: local files, or
// files of the same server.
func waitForOpened(srcs []tensor.Source, d time.Duration) bool {
	mu.Lock()
	waiting := slices.Clone(live)
	mu.Unlock()
	late := time.NewTimer(d)
	defer late.Stop()
	for _, p := range waiting {
		if !slices.ContainsFunc(p.uris, func(u string) bool {
			return slices.ContainsFunc(srcs, func(s tensor.Source) bool { return originOf(u) == originOf(s.URI) })
		}) {
			continue
		}
		if job.IsClosed(p.opened) {
			continue
		}
		select {
		case <-p.opened:
		case <-p.paused:
		case <-late.C:
			return false
		}
	}
	return true
}

// originOf is the server of a URI, "" for this machine.
func originOf(uri string) string {
	if _, ok := source.Local(uri); ok {
		return ""
	}
	scheme, rest, _ := strings.Cut(uri, "://")
	server, _, _ := strings.Cut(rest, "/")
	return strings.ToLower(scheme + "://" + server)
}

// normalizeURIs brings URIs into one form, however their paths were written.
func normalizeURIs(uris []string) []string {
	all := make([]string, len(uris))
	for i, u := range uris {
		has := namesOf(u)
		all[i] = has[len(has)-1]
	}
	return all
}

// namesOf are the names of a file. For a local file these are its absolute path and the path that it resolves to.
func namesOf(uri string) []string {
	path, ok := source.Local(uri)
	if !ok {
		return []string{uri}
	}
	if abs, err := filepath.Abs(path); err == nil {
		path = abs
	}
	if real, err := filepath.EvalSymlinks(path); err == nil && real != path {
		return []string{path, real}
	}
	return []string{path}
}

// names reports whether the preload was asked for one of a model's files, by its own name, by its folder's, or by
// that of an index.json in the same folder.
func (p *Preload) names(srcs []tensor.Source) bool {
	for _, s := range srcs {
		for _, n := range namesOf(s.URI) {
			if slices.ContainsFunc(p.uris, func(u string) bool {
				return u == n || strings.HasPrefix(n, strings.TrimSuffix(u, "/")+"/") ||
					strings.HasSuffix(u, ".index.json") && filepath.Dir(u) == filepath.Dir(n)
			}) {
				return true
			}
		}
	}
	return false
}

// deviceName is a device's name, "" for the host.
func deviceName(device string) string {
	switch device {
	case "cpu":
		return ""
	case "cuda":
		return "cuda:0"
	}
	return device
}

// readingMode is the reading mode that an option selects.
func readingMode(read string) string { return cmp.Or(read, knob.Read.Get()) }

// Opened waits up to d (without limit if negative) until the files are open and the load runs, and returns what
// it preloads. done is false if d has passed first.
func (p *Preload) Opened(d time.Duration) (s *load.Preloaded, done bool, err error) {
	if !job.Within(p.opened, d) {
		return nil, false, nil
	}
	return p.model, true, p.err
}
