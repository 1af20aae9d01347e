// Package load opens a model and loads its tensors, or slices of them, into memory.
package load

import (
	"context"
	"errors"
	"strings"
	"sync"
	"time"

	"github.com/overwire/overwire/gosrc/codec"
	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/device/cpu"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/format"
	"github.com/overwire/overwire/gosrc/hoststore"
	"github.com/overwire/overwire/gosrc/internal/regular"
	"github.com/overwire/overwire/gosrc/internal/spawn"
	"github.com/overwire/overwire/gosrc/knob"
	"github.com/overwire/overwire/gosrc/plan"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/source/open"
	"github.com/overwire/overwire/gosrc/tensor"
	"github.com/overwire/overwire/gosrc/unpack"
)

// A Spec describes what to open.
type Spec struct {
	// URIs are files, folders or index.json files; a model may be one file or many shards.
	URIs []string `json:"uris"`
	// Map decides whether plain tensors in files are mapped instead of read. nil means that they are mapped, except on
	// network file systems.
	Map *bool `json:"map"`
	// Lenient accepts headers that only other safetensors parsers accept.
	Lenient bool `json:"lenient"`
	// Parts also accepts files that contain parts of tensors.
	Parts bool `json:"parts"`
	// Storage describes how to reach remote files.
	Storage format.Access `json:"storage"`
	// Opened is the model's only source if it is already open. The model closes it.
	Opened source.Source `json:"-"`
	// Keys are the tensor names that will be requested; nil means all. If the model has an index.json, only shards that
	// contain at least one of these tensors are opened.
	Keys []string `json:"keys"`
	// Host decides whether local files come from the host store; nil means that OVERWIRE_HOST decides.
	Host *bool `json:"host"`
}

// A Model is an opened model. Its index is in memory and its sources are open. It is safe for concurrent use.
type Model struct {
	ix   *tensor.Index // as loads see it; see package unpack
	held *tensor.Index // as it is stored
	srcs []source.Source
	mapp string // a value of OVERWIRE_MMAP
	key  string // format.Access.Key of the spec
	host *hoststore.Link
	// The models that own the sources. This model holds them. nil means that this model owns its sources.
	parts []*Model
	// The times when Open began and ended, for traces.
	opened [2]time.Time

	mu   sync.Mutex
	refs int // 1 for the handle plus 1 for each running load
	shut bool

	mappings []fileMapping // indexed by source; nil before the first load that maps

	preloaded []attached // indexed by file: the preloaded tensors; nil means none

	pinning bool    // Pin is running: no load may start
	pin     *pinned // nil if not pinned
}

// headers caches the headers of recently opened files.
var headers format.Cache

// Open opens and indexes a model, and validates all headers.
func Open(ctx context.Context, spec Spec) (*Model, error) {
	began := time.Now()
	m := &Model{mapp: knob.MMap.Get(), key: spec.Storage.Key(), refs: 1, host: hoststore.NewLink(spec.Host)}
	defer m.host.Done()
	if spec.Map != nil {
		m.mapp = map[bool]string{true: "on", false: "off"}[*spec.Map]
	}
	stores := open.With(spec.Storage.Options)
	opener := m.host.Open(stores.OpenLike)
	if spec.Opened != nil {
		opener = func(context.Context, string, source.Outline) (source.Source, error) { return spec.Opened, nil }
	}
	ix, srcs, _, err := format.OpenAll(ctx, spec.URIs, opener, format.Options{
		Lenient: spec.Lenient, Parts: spec.Parts, Keys: spec.Keys, Known: codec.Known, Cache: &headers,
		List: stores.List, Settings: spec.Storage.Decrypt,
	})
	if err != nil {
		return nil, err
	}
	m.held = ix
	m.ix, m.srcs = unpack.Model(ix, srcs)
	m.opened = [2]time.Time{began, time.Now()}
	return m, nil
}

// IsBrief reports whether opening takes less time than waking another thread. That is the case for a single, small,
// unencrypted local file on a file system that does not make the caller wait, without the host store.
func IsBrief(spec *Spec) bool {
	uris := spec.URIs
	return len(uris) == 1 && len(spec.Storage.Decrypt) == 0 && hoststore.NewLink(spec.Host) == nil &&
		!strings.Contains(uris[0], "://") &&
		!strings.HasSuffix(uris[0], ".json") && regular.IsQuick(uris[0], plan.StepPiece)
}

// FromHost returns how many files of the model are in the host store's memory.
func (m *Model) FromHost() int { return m.host.Held() }

// Distrust drops the model's files from the host store if err means that their bytes were wrong.
func (m *Model) Distrust(err error) {
	if errors.Is(err, errs.ErrCorrupt) {
		m.host.Distrust(spawn.Context())
	}
}

// Of makes a model from a validated index and its sources. link is nil if no source is from the host store.
func Of(ix *tensor.Index, srcs []source.Source, link *hoststore.Link) *Model {
	m := &Model{held: ix, mapp: "off", refs: 1, host: link}
	m.ix, m.srcs = unpack.Model(ix, srcs)
	return m
}

// Names returns the tensor names that index.json files list, without opening a shard. ok is false if some of the files
// have no index.
func Names(ctx context.Context, spec Spec) (names []string, ok bool, err error) {
	stores := open.With(spec.Storage.Options)
	return format.Names(ctx, spec.URIs, stores.OpenLike, format.Options{List: stores.List})
}

// Index returns the model's index as it is stored.
func (m *Model) Index() *tensor.Index { return m.held }

// Seen returns the model's index as loads see it; see package unpack.
func (m *Model) Seen() *tensor.Index { return m.ix }

// Sources returns the model's sources. The caller must hold the model while using them.
func (m *Model) Sources() []source.Source { return m.srcs }

// Close closes the handle. Running loads continue, and the sources are closed after the
// last load. Close may be called more than once.
func (m *Model) Close() {
	m.mu.Lock()
	again := m.shut
	m.shut = true
	m.mu.Unlock()
	if !again {
		m.Drop()
	}
}

// LocateError adds the URI of the model's first source to an error that does not concern a single tensor.
func (m *Model) LocateError(verb string, err error) error {
	at := &errs.At{Verb: verb, Chunk: -1, Offset: -1, Err: err}
	if len(m.ix.Sources) > 0 {
		at.Source = m.ix.Sources[0].URI
	}
	return at
}

// Hold keeps the sources open until Drop. It fails if the model is closed or being pinned.
func (m *Model) Hold() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.shut {
		return errs.New(errs.ErrArgument, "the model is closed")
	}
	if m.pinning {
		return errs.New(errs.ErrArgument, "the model is being pinned")
	}
	m.refs++
	m.host.NoteRead()
	return nil
}

// Drop undoes Hold.
func (m *Model) Drop() {
	m.mu.Lock()
	m.refs--
	last := m.refs == 0
	m.mu.Unlock()
	if last {
		m.detachPreloaded()
		for _, one := range m.parts {
			one.Drop()
		}
		if m.parts == nil {
			for _, s := range m.srcs {
				_ = s.Close()
			}
		}
		for i := range m.mappings {
			device.Memory{Block: m.mappings[i].block}.Release()
		}
	}
}

// Uncut returns an error if a file was truncated or written to after it was opened, because the bytes read or mapped
// may mix old and new contents. Reading a mapping of a truncated file may also give zeros without an error.
func (m *Model) Uncut() error {
	for _, s := range m.srcs {
		err := source.Unwritten(s)
		if err != nil && s.Facts().File != nil {
			if cut := withFD(s, func(fd int) error { return cpu.StillHas(fd, s.Size()) }); cut != nil {
				return cut
			}
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// maps reports whether plain tensors of a source are mapped. Files on a network file system are mapped only on request:
// reading them page by page is slow, and a failing server would kill the process.
func (m *Model) maps(s source.Source) bool {
	f := s.Facts()
	return f.File != nil && (m.mapp == "on" || m.mapp == "auto" && !f.Remote)
}

// Several combines open models into one, which uses their open files. It numbers the tensors and sources of all models
// consecutively, so tensors with the same name have different numbers. It does not use preloaded tensors. The models'
// files stay open until the combined model is closed and its loads have ended.
func Several(models []*Model) (_ *Model, err error) {
	m := &Model{mapp: "off", refs: 1}
	defer func() {
		if err != nil {
			m.Close()
		}
	}()
	var seen, held []*tensor.Index
	for _, one := range models {
		if err := one.Hold(); err != nil {
			return nil, one.LocateError("open", err)
		}
		m.parts = append(m.parts, one)
		m.srcs = append(m.srcs, one.srcs...)
		seen, held = append(seen, one.ix), append(held, one.held)
	}
	if m.ix, err = format.Join(seen); err == nil {
		m.held, err = format.Join(held)
	}
	return m, err
}

// ViewOf returns m with another index, for srcs that read from the sources of m. The files of m stay open until the
// view is closed and its loads have ended. The view does not use preloaded tensors.
func ViewOf(m *Model, ix *tensor.Index, srcs []source.Source) (*Model, error) {
	if err := m.Hold(); err != nil {
		return nil, m.LocateError("open", err)
	}
	return &Model{ix: ix, held: ix, srcs: srcs, mapp: "off", refs: 1, host: m.host, parts: []*Model{m}}, nil
}
