// Package load is the verb: open a model, and bring its tensors, or slices of
// them, into memory.
package load

import (
	"context"
	"strings"
	"sync"
	"time"

	"github.com/overwire/overwire/gosrc/codec"
	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/device/cpu"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/format"
	"github.com/overwire/overwire/gosrc/internal/regular"
	"github.com/overwire/overwire/gosrc/knob"
	"github.com/overwire/overwire/gosrc/plan"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/source/open"
	"github.com/overwire/overwire/gosrc/tensor"
	"github.com/overwire/overwire/gosrc/unpack"
)

// A Spec says what to open.
type Spec struct {
	// URIs are files, folders or index.json files, one or many shards.
	URIs []string `json:"uris"`
	// Map says whether plain tensors of files are mapped instead of read; nil:
	// except on network file systems.
	Map *bool `json:"map"`
	// Lenient accepts headers that only other safetensors parsers accept.
	Lenient bool `json:"lenient"`
	// Parts opens files whose tensors are parts of tensors, too.
	Parts bool `json:"parts"`
	// Storage says how to reach remote files.
	Storage format.Access `json:"storage"`
	// Opened is the one source, if it is open already; the model closes it.
	Opened source.Source `json:"-"`
	// Keys are the names that will be requested; nil: all. Of a model with an
	// index.json, only the shards that contain one of them are opened.
	Keys []string `json:"keys"`
}

// A Model is an opened model: its index is in memory, its sources are open.
// It is safe for concurrent use.
type Model struct {
	ix   *tensor.Index // as loads see it: see package unpack
	held *tensor.Index // as it is stored
	srcs []source.Source
	mapp string // a value of OVERWIRE_MMAP
	key  string // of how its files were reached: format.Access.Key
	// The models that own these sources, which it holds; nil: the sources are its own.
	parts []*Model
	// When Open began and ended, for traces.
	opened [2]time.Time

	mu   sync.Mutex
	refs int // 1 for the handle, 1 for each running load
	shut bool

	mappings []fileMapping // by source; nil: none yet

	preloaded []attached // by file: what was preloaded of it; nil: nothing

	pinning bool    // Pin runs: no load may start
	pin     *pinned // nil: not pinned
}

// headers caches those of the files that were opened last.
var headers format.Cache

// Open opens and indexes a model. Everything its headers say has been
// validated when it returns.
func Open(ctx context.Context, spec Spec) (*Model, error) {
	began := time.Now()
	m := &Model{mapp: knob.MMap.Get(), key: spec.Storage.Key(), refs: 1}
	if spec.Map != nil {
		m.mapp = map[bool]string{true: "on", false: "off"}[*spec.Map]
	}
	stores := open.With(spec.Storage.Options)
	opener := stores.Open
	if spec.Opened != nil {
		opener = func(context.Context, string) (source.Source, error) { return spec.Opened, nil }
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

// IsBrief reports whether to open these takes less than to wake another thread: one small local file,
// not encrypted, that nothing keeps waiting.
func IsBrief(uris []string, access format.Access) bool {
	return len(uris) == 1 && len(access.Decrypt) == 0 && !strings.Contains(uris[0], "://") &&
		!strings.HasSuffix(uris[0], ".json") && regular.IsQuick(uris[0], plan.StepPiece)
}

// Of is the model of an index that has been validated and the one source of its bytes.
func Of(ix *tensor.Index, src source.Source) *Model {
	return &Model{ix: ix, held: ix, srcs: []source.Source{src}, mapp: "off", refs: 1}
}

// Names returns the tensors listed in index.json files, without opening a shard; ok
// is false when some of the files have no index.
func Names(ctx context.Context, spec Spec) (names []string, ok bool, err error) {
	stores := open.With(spec.Storage.Options)
	return format.Names(ctx, spec.URIs, stores.Open, format.Options{List: stores.List})
}

// Index is the model's index, as it is stored.
func (m *Model) Index() *tensor.Index { return m.held }

// Seen is the model's index as loads see it: see package unpack.
func (m *Model) Seen() *tensor.Index { return m.ix }

// Sources are the model's sources, for who holds it.
func (m *Model) Sources() []source.Source { return m.srcs }

// Close ends the handle. Running loads continue; the sources are closed after the
// last of them. Close may be called more than once.
func (m *Model) Close() {
	m.mu.Lock()
	again := m.shut
	m.shut = true
	m.mu.Unlock()
	if !again {
		m.Drop()
	}
}

// LocateError adds the model, by its first source, to an error that is not about one
// tensor.
func (m *Model) LocateError(verb string, err error) error {
	at := &errs.At{Verb: verb, Chunk: -1, Offset: -1, Err: err}
	if len(m.ix.Sources) > 0 {
		at.Source = m.ix.Sources[0].URI
	}
	return at
}

// Hold keeps the sources open until drop; it fails on a closed model.
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

// Uncut refuses files that were cut or written to since they were opened: what was read of
// them, or will be of a mapping, may be of both states. Reading a mapping of a file that
// was truncated may give zeros and no error.
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

// maps reports whether plain tensors of a source are mapped. Files on a network are
// only if that was asked for: a page at a time is the slowest way to read them, and
// a server that fails would end the process.
func (m *Model) maps(s source.Source) bool {
	f := s.Facts()
	return f.File != nil && (m.mapp == "on" || m.mapp == "auto" && !f.Remote)
}
