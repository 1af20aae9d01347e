// Package load is the verb: open a model, and bring its tensors, or slices of
// them, into memory.
package load

import (
	"context"
	"sync"

	"github.com/overwire/overwire/gosrc/codec"
	"github.com/overwire/overwire/gosrc/fault"
	"github.com/overwire/overwire/gosrc/format"
	"github.com/overwire/overwire/gosrc/knob"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/source/open"
	"github.com/overwire/overwire/gosrc/tensor"
)

// A Spec says what to open.
type Spec struct {
	// URIs are files, folders or index.json files, one or many shards.
	URIs []string `json:"uris"`
	// Map says whether plain tensors of local files are mapped instead of
	// read; nil: yes.
	Map *bool `json:"map"`
	// Lenient accepts what other parsers of safetensors let pass.
	Lenient bool `json:"lenient"`
}

// A Model is an opened model: its index is in memory, its sources are open.
// It is safe for concurrent use.
type Model struct {
	ix   *tensor.Index
	srcs []source.Source
	mapp bool

	mu   sync.Mutex
	refs int // 1 for the handle, 1 for each running load
	shut bool

	pinning bool    // a Pin runs: no load may
	pin     *pinned // nil: not pinned
}

// Open opens and indexes a model. Everything its headers say has been
// validated when it returns.
func Open(ctx context.Context, spec Spec) (*Model, error) {
	ix, srcs, err := format.OpenAll(ctx, spec.URIs, open.Source, format.Options{Lenient: spec.Lenient, Known: codec.Known})
	if err != nil {
		return nil, err
	}
	return &Model{ix: ix, srcs: srcs, mapp: mapping(spec.Map), refs: 1}, nil
}

// Index is what the model holds.
func (m *Model) Index() *tensor.Index { return m.ix }

// Close ends the handle. Loads that run go on; the sources are closed after
// the last of them. Close may be called more than once.
func (m *Model) Close() {
	m.mu.Lock()
	again := m.shut
	m.shut = true
	m.mu.Unlock()
	if !again {
		m.drop()
	}
}

// where names the model, by its first source, in an error that is of no tensor.
func (m *Model) where(verb string, err error) error {
	at := &fault.At{Verb: verb, Chunk: -1, Offset: -1, Err: err}
	if len(m.ix.Sources) > 0 {
		at.Source = m.ix.Sources[0].URI
	}
	return at
}

// hold keeps the sources open until drop; it fails on a closed model.
func (m *Model) hold() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.shut {
		return fault.New(fault.ErrArgument, "the model is closed")
	}
	if m.pinning {
		return fault.New(fault.ErrArgument, "the model is being pinned")
	}
	m.refs++
	return nil
}

func (m *Model) drop() {
	m.mu.Lock()
	m.refs--
	last := m.refs == 0
	m.mu.Unlock()
	if last {
		if m.pin != nil {
			m.pin.unregister()
		}
		for _, s := range m.srcs {
			_ = s.Close()
		}
	}
}

// mapping decides whether plain tensors are mapped: the caller's word, then
// the knob, then yes.
func mapping(word *bool) bool {
	if word != nil {
		return *word
	}
	return knob.MMap.Get() != "off"
}
