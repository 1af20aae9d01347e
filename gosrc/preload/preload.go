// Package preload runs loads that start when overwire is imported with a preload variable set. They use neither Python
// nor the GIL: they open, read and decode files while the interpreter imports other modules.
//
// A load attaches to a preload file by file, and only if the preloaded bytes are exactly those that it would
// read. The load opens its files, and does not read files with the identity of a preloaded file (device, inode,
// size and times, or the ETag or date of an object in a store). Each preloaded tensor goes to the first load
// that takes it. A preload is dropped if its file was replaced or modified, or if its tensors differ from what
// the load needs. A failed preload is removed, so the load reports only its own errors.
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
	reached string // result of format.Access.Key
	device  string // name of the device, or "" for the host
	read    string // reading mode, a value of OVERWIRE_READ
	cancel  context.CancelFunc

	paused chan struct{} // closed when the preload waits for a file to become old enough
	pauses sync.Once     // guards closing of paused
	opened chan struct{} // closed when the fields below are set
	model  *load.Preloaded
	files  []preloaded
	err    error
}

type preloaded struct {
	id    source.Identity
	uri   string
	names []string // result of namesOf(uri)
}

var (
	mu    sync.Mutex
	live  []*Preload
	notes []Note // notes about dropped preloads that Join has not reported yet
)

// A Note explains why a preload was dropped. Routine means that the program dropped it on purpose.
type Note struct {
	Text    string `json:"text"`
	Routine bool   `json:"routine"`
}

var errCancelled = errs.New(errs.ErrCancelled, "by the caller")

// Start starts to load everything that spec names. If the same files are already being preloaded to the same device, it
// returns that preload, unless files were replaced or tensors were taken since it started.
func Start(spec load.Spec, opt load.Options) *Preload {
	p := &Preload{uris: normalizeURIs(spec.URIs), reached: spec.Storage.Key(), device: deviceName(opt.Device),
		read: readingMode(opt.Read), paused: make(chan struct{}), opened: make(chan struct{})}
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

// openFiles opens the files and starts to load their tensors.
func (p *Preload) openFiles(ctx context.Context, spec load.Spec, opt load.Options) error {
	if at := slices.IndexFunc(spec.URIs, open.Downloaded); at >= 0 {
		return unknownState(spec.URIs[at], "an external downloader reports")
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

// unknownState returns the error for an object that a later load could not identify, so it cannot be preloaded.
func unknownState(uri, who string) error {
	return errs.In("preload", uri, errs.New(errs.ErrNotSupported,
		"%s neither an ETag nor a date, so the object cannot be preloaded", who))
}

// tick and coarse are the resolutions of file times: a tick of the kernel's clock, or two seconds on file systems
// without fractions of a second. looks is the maximum number of attempts.
const (
	tick   = 40 * time.Millisecond
	coarse = 2100 * time.Millisecond
	looks  = 50
)

// whenSettled opens files when their last change is old enough that another change would show in their times. If a file
// has just been saved, it waits until the change is old enough.
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
			return nil, nil, unknownState(where, "its server reports")
		}
		before = ids
		if err := p.pauseForClock(ctx, look, ids); err != nil {
			return nil, nil, err
		}
	}
	return nil, nil, errs.In("preload", spec.URIs[0], errs.New(errs.ErrIO, "the file is still being written"))
}

// pauseForClock waits until a change of the files would show in their times. If the pause is long or repeated, later
// loads stop waiting for the preload.
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

// Drop removes and cancels the preload. Loads keep the tensors that they have taken.
func (p *Preload) Drop() {
	mu.Lock()
	defer mu.Unlock()
	p.dropWithNote("", true)
}

// DropAll drops all preloads. Later loads read their files.
func DropAll() {
	mu.Lock()
	defer mu.Unlock()
	for _, p := range slices.Clone(live) {
		p.dropWithNote("the process was quiesced", true)
	}
}

// dropWithNote implements Drop with a note for Join to report. The caller holds mu.
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
		end() // free the memory before the load allocates the same amount again
	} else {
		spawn.Go("preload drop", end)
	}
}

// pruneEmpty removes preloads after all their tensors have been taken. The caller holds mu.
func pruneEmpty() {
	live = slices.DeleteFunc(live, func(p *Preload) bool {
		return job.IsClosed(p.opened) && (p.model == nil || p.model.Spent())
	})
}

// isWhole reports whether all tensors are still available to a load. The caller holds mu.
func (p *Preload) isWhole() bool {
	s, done, err := p.Opened(0)
	return !done || err == nil && s.Whole() && p.replacedFile() == ""
}

// replacedFile returns a local file of the preload that was replaced or removed. It returns "" if
// there is none, or if the files are not open yet. The caller holds mu.
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

// Sweep drops preloads of files that a save has just replaced: local files, or objects at or below the URI of a store.
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

// Said returns the notes about dropped preloads. Each note is returned once.
func Said() []Note {
	mu.Lock()
	defer mu.Unlock()
	said := notes
	notes = nil
	return said
}

// An Answer is the result of Join.
type Answer struct {
	// Device is the device of the preloaded tensors for loads of the model, or nil if there are none.
	Device *string `json:"device"`
	// Notes are the notes about preloads that were dropped since the last Answer.
	Notes []Note `json:"notes"`
}

// Join allows loads of a model to a device to take the preloaded tensors of the model's files. It drops
// preloads of these files that cannot be used, because their bytes, device or reading mode differ. With alone,
// it drops all preloads of these files. It first waits up to d until the preloads that may contain the same
// files have opened their files. done is false if d was too short.
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
			if p.names(srcs) { // the preload is paused
				p.dropWithNote("its file was still being written", false)
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
			p.dropWithNote(other+" was replaced after it was preloaded", false)
			continue
		case alone:
			p.dropWithNote("this load cannot use preloaded tensors", false)
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
				p.dropWithNote(errs.RedactURI(srcs[at[0]].URI)+" was modified after it was preloaded", false)
			}
		}
	}
	a.Notes, notes = notes, nil
	return a, true
}

// matchFiles pairs a model's files with the same files of the preload that are still available.
// other is a file of the preload that was replaced.
func (p *Preload) matchFiles(srcs []tensor.Source, ids []source.Identity) (pairs [][2]int, other string) {
	for i, id := range ids {
		if id == (source.Identity{}) { // the file is in memory, or the server reports no identity
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

// reasonUnfit returns why a preload's tensors cannot be used for a load of a model to a device, or "" if they can.
func (p *Preload) reasonUnfit(m *load.Model, pairs [][2]int, device, read string) (why string, routine bool) {
	if p.device != "" && p.device != device {
		return "it is on " + p.device + ", but the load is to " + cmp.Or(device, "the host"), false
	}
	if p.read != read {
		return fmt.Sprintf("it was read in mode %q, but the load uses %q", p.read, read), false
	}
	for _, at := range pairs {
		switch mapped := p.model.Mapped(at[1]); {
		case mapped && device != "":
			return "its files are memory-mapped, but a load to a GPU reads them", true
		case device == "" && !m.MapsAs(at[0], p.model.Model(), at[1]):
			return "either the preload or the load memory-maps the file, but not both", false
		}
	}
	return "", false
}

// waitForOpened waits until every preload that may contain a model's files has opened its files. These are
// preloads of local files, or of files on the same server.
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

// originOf returns the server of a URI, or "" for this machine.
func originOf(uri string) string {
	if _, ok := source.Local(uri); ok {
		return ""
	}
	scheme, rest, _ := strings.Cut(uri, "://")
	server, _, _ := strings.Cut(rest, "/")
	return strings.ToLower(scheme + "://" + server)
}

// normalizeURIs returns URIs in one form, regardless of how their paths were written.
func normalizeURIs(uris []string) []string {
	all := make([]string, len(uris))
	for i, u := range uris {
		has := namesOf(u)
		all[i] = has[len(has)-1]
	}
	return all
}

// namesOf returns the names of a file. For a local file, these are its absolute path and the path without symlinks.
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

// names reports whether the preload's URIs include one of a model's files, the folder of one, or an index.json
// in that folder.
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

// deviceName returns a device's name, or "" for the host.
func deviceName(device string) string {
	switch device {
	case "cpu":
		return ""
	case "cuda":
		return "cuda:0"
	}
	return device
}

// readingMode returns the reading mode that an option selects.
func readingMode(read string) string { return cmp.Or(read, knob.Read.Get()) }

// Opened waits up to d (forever if d is negative) until the files are open and the load has started, and returns the
// preloaded tensors. done is false if d was too short.
func (p *Preload) Opened(d time.Duration) (s *load.Preloaded, done bool, err error) {
	if !job.Within(p.opened, d) {
		return nil, false, nil
	}
	return p.model, true, p.err
}
