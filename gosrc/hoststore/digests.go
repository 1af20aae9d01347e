package hoststore

// This file keeps containers of this process's tensors in a store, and finds the tensors there by their names and keyed
// digests. The digests and their key stay in this process, so no one can construct other tensors with the same digests.

import (
	"context"
	"errors"
	"maps"
	"slices"
	"sync"

	"github.com/overwire/overwire/gosrc/codec"
	"github.com/overwire/overwire/gosrc/codec/digest"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/format"
	"github.com/overwire/overwire/gosrc/knob"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/tensor"
)

// An ownContainer is a container of this process's tensors. Its name is a cryptographic digest of its bytes, so the
// store has these bytes under the name, even if another process has put them there.
type ownContainer struct {
	name    string
	size    int64
	front   label                 // of its header and index
	digests map[string]digest.Sum // of the tensors, by name
}

// own has the containers that this process has kept, the latest last. Tensors are found only there.
var own struct {
	mu  sync.Mutex
	all []ownContainer
}

// maxOwn is how many containers own has. They no longer count if their tensors have changed.
const maxOwn = 64

// A Part is a container of this process's tensors in a store.
type Part struct {
	Source  source.Source
	Index   *tensor.Index
	Digests map[string]digest.Sum // keyed, by the names of tensors
}

// FindParts returns containers that this process has kept and the store still has, which together have as many of the
// wanted tensors as possible. want has their keyed digests by name. The caller closes their sources. If the store
// fails, FindParts returns what it has found, and logs a notice. A nil Link finds nothing.
func FindParts(ctx context.Context, l *Link, want map[string]digest.Sum) (parts []Part) {
	const instead = "the tensors are kept in this process's own memory"
	if l == nil || len(want) == 0 {
		return nil
	}
	client := l.connect(ctx, instead)
	if client == nil {
		return nil
	}
	missing := maps.Clone(want)
	own.mu.Lock()
	all := slices.Clone(own.all)
	own.mu.Unlock()
	for _, o := range slices.Backward(all) {
		if !takeFrom(missing, o.digests) {
			continue
		}
		p, err := fetchPart(ctx, client, o)
		if err != nil {
			if errors.Is(err, errs.ErrCorrupt) {
				_, _ = client.Drop(ctx, o.name)
			}
			if ctx.Err() == nil {
				counts.lost.Add(1)
				l.fail(err, instead)
			}
			return parts
		}
		if p == nil { // evicted
			maps.Copy(missing, want)
			for i := range parts {
				takeFrom(missing, parts[i].Digests)
			}
			continue
		}
		p.Source = l.noteUse(p.Source, p.Source.Facts(), o.name)
		parts = append(parts, *p)
	}
	return parts
}

// takeFrom removes tensors with the same names and digests, and reports whether there were some.
func takeFrom(missing, sums map[string]digest.Sum) bool {
	before := len(missing)
	maps.DeleteFunc(missing, func(name string, sum digest.Sum) bool { has, ok := sums[name]; return ok && has == sum })
	return len(missing) < before
}

// fetchPart returns a container, or nil if the store does not have it.
func fetchPart(ctx context.Context, c *Client, o ownContainer) (*Part, error) {
	src, err := c.fetch(ctx, o.name, o.front, o.size, "host store entry "+o.name[:12])
	if err != nil || src == nil {
		return nil, err
	}
	ix, err := format.Open(ctx, []source.Source{src}, format.Options{Known: codec.Known, Parts: true})
	if err != nil {
		_ = src.Close()
		return nil, errs.New(errs.ErrCorrupt, "%s", errs.Message(err))
	}
	return &Part{src, ix, o.digests}, nil
}

// KeepBytes puts a container of this process's tensors into the user's store, unless the store has the same bytes or
// another process is putting them there. FindParts then finds the tensors by their names and keyed digests.
func KeepBytes(ctx context.Context, src source.Source, digests map[string]digest.Sum) error {
	path := knob.Host.Get()
	if path == off {
		path = auto
	}
	o := ownContainer{size: src.Size(), digests: digests}
	var err error
	if o.front, _, err = labelAs(ctx, src, ""); err != nil {
		return err
	}
	if o.name, err = contentName(ctx, src); err != nil {
		return err
	}
	err = putWith(ctx, path, src, func(c *Client) (string, error) {
		return c.putAs(ctx, src, label{name: o.name}, func(int64) {}, nil)
	})
	if err != nil {
		return err
	}
	own.mu.Lock()
	defer own.mu.Unlock()
	own.all = slices.DeleteFunc(own.all, func(x ownContainer) bool { return x.name == o.name })
	own.all = append(own.all[max(0, len(own.all)-maxOwn+1):], o)
	return nil
}
