// Package load is the verb: open a model, and bring its tensors, or slices of
// them, into memory.
package load

import (
	"context"
	"sync"
	"unsafe"

	"github.com/overwire/overwire/gosrc/codec"
	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/device/cpu"
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
	// Keys are the names that will be asked for; nil: all. Of a model with an
	// index.json only the shards that have one of them are opened.
	Keys []string `json:"keys"`
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
	// One mapping of each source serves all loads: a process may have only some
	// 65,000 mappings, and a model more tensors. Its bytes go to one owner each;
	// who asks for a tensor again gets a mapping of the load's own.
	maps  []mapped
	given []bool // by tensor: its bytes in the mapping have, or had, an owner
}

// mapped is a source in memory, held by the model.
type mapped struct {
	base  unsafe.Pointer
	block *device.Block
}

// Open opens and indexes a model. Everything its headers say has been
// validated when it returns.
func Open(ctx context.Context, spec Spec) (*Model, error) {
	ix, srcs, err := format.OpenAll(ctx, spec.URIs, open.Source, format.Options{Lenient: spec.Lenient, Keys: spec.Keys, Known: codec.Known})
	if err != nil {
		return nil, err
	}
	return &Model{ix: ix, srcs: srcs, mapp: mapping(spec.Map), refs: 1}, nil
}

// Names returns the tensors that index.json files promise, without opening a
// shard; ok is false when some of the files have no index.
func Names(spec Spec) (names []string, ok bool, err error) { return format.Names(spec.URIs) }

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
		for _, mp := range m.maps {
			device.Memory{Block: mp.block}.Release()
		}
	}
}

// claim makes the caller the owner of a tensor's bytes in the mapping that all
// loads share; false if it has had one. The caller has a hold on the model.
func (m *Model) claim(tensor int32) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.given == nil {
		m.given = make([]bool, len(m.ix.Tensors))
	}
	had := m.given[tensor]
	m.given[tensor] = true
	return !had
}

// shared returns the mapping of a source, with n holders more.
func (m *Model) shared(source int, n int64) (mapped, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.maps == nil {
		m.maps = make([]mapped, len(m.srcs))
	}
	mp := &m.maps[source]
	if mp.block == nil {
		got, err := mapSource(m.srcs[source], 1, true)
		if err != nil {
			return mapped{}, err
		}
		*mp = got
	} else if err := withFD(m.srcs[source], func(fd int) error { return cpu.StillHas(fd, m.srcs[source].Size()) }); err != nil {
		return mapped{}, err
	}
	for range n {
		mp.block.Hold()
	}
	return *mp, nil
}

// A mappable source is a local file.
type mappable interface {
	WithFD(fn func(fd int) error) error
}

func mapSource(src source.Source, holders int64, alone bool) (mp mapped, err error) {
	err = withFD(src, func(fd int) (err error) {
		mp.base, mp.block, err = cpu.MapFile(fd, src.Size(), holders, alone)
		return err
	})
	return mp, err
}

func withFD(src source.Source, fn func(fd int) error) error {
	if err := src.(mappable).WithFD(fn); err != nil {
		return &fault.At{Verb: "map", Source: src.URI(), Chunk: -1, Offset: -1, Err: err}
	}
	return nil
}

// mapping decides whether plain tensors are mapped: the caller's word, then
// the knob, then yes.
func mapping(word *bool) bool {
	if word != nil {
		return *word
	}
	return knob.MMap.Get() != "off"
}
