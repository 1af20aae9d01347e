package load

// One model made of several that are open.

import (
	"github.com/overwire/overwire/gosrc/format"
	"github.com/overwire/overwire/gosrc/tensor"
)

// Several is one model of several open ones, with the very files that they have open: it
// has their tensors and sources, one model behind the other, so their numbers tell tensors
// of the same name apart. It takes nothing that was preloaded. Until it is closed, and its
// loads have ended, the models' files stay open.
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
