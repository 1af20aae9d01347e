package load

// This file makes models from open models: it combines several into one, or shows one with another index.

import (
	"github.com/overwire/overwire/gosrc/format"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/tensor"
)

// Several combines open models into one, which uses their open files. It lists the tensors and sources of one model
// after another, so their numbers distinguish tensors of the same name. It does not use preloaded tensors. The models'
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
