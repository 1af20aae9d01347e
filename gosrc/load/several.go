package load

// This file combines several open models into one.

import (
	"github.com/overwire/overwire/gosrc/format"
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
