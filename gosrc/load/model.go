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
	// Storage says how to reach what is no local file.
	Storage source.Options `json:"storage"`
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
}

// Open opens and indexes a model. Everything its headers say has been
// validated when it returns.
func Open(ctx context.Context, spec Spec) (*Model, error) {
	ix, srcs, err := format.OpenAll(ctx, spec.URIs, open.With(spec.Storage), format.Options{Lenient: spec.Lenient, Known: codec.Known, List: open.Lister(spec.Storage)})
	if err != nil {
		return nil, err
	}
	return &Model{ix: ix, srcs: srcs, mapp: mapping(spec.Map), refs: 1}, nil
}

// Index is what the model holds.
func (m *Model) Index() *tensor.Index { return m.ix }

// far is how many reads at once the model's sources can make use of: 0 if all
// are local files.
func (m *Model) far() int {
	n := 0
	for _, s := range m.srcs {
		if f, ok := s.(interface{ Far() int }); ok {
			n = max(n, f.Far())
		}
	}
	return n
}

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

// hold keeps the sources open until drop; it fails on a closed model.
func (m *Model) hold() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.shut {
		return fault.New(fault.ErrArgument, "the model is closed")
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
