package hoststore

// This file finds tensors in a store by their digests, so that equal tensors in memory need no copy of their own.

import (
	"context"
	"errors"
	"slices"

	"github.com/overwire/overwire/gosrc/codec"
	"github.com/overwire/overwire/gosrc/codec/digest"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/format"
	"github.com/overwire/overwire/gosrc/format/overwire"
	"github.com/overwire/overwire/gosrc/knob"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/tensor"
)

// A Part is a container from a store. The store has verified all its checksums and digests.
type Part struct {
	Source  source.Source
	Index   *tensor.Index
	Digests []digest.Sum // of the index's tensors
}

// FindParts returns containers with those of the wanted tensors that the store has. The caller closes their sources. If
// the store fails, FindParts logs a notice and returns what it has found so far. A nil Link finds nothing.
func FindParts(ctx context.Context, l *Link, want []digest.Sum) (parts []Part) {
	const instead = "the tensors are kept in this process's own memory"
	if l == nil || len(want) == 0 {
		return nil
	}
	client := l.connect(ctx, instead)
	if client == nil {
		return nil
	}
	missing, names := map[digest.Sum]bool{}, map[string]bool{}
	for _, sum := range want {
		missing[sum] = true
	}
	fails := func(err error) []Part {
		if ctx.Err() == nil {
			counts.lost.Add(1)
			l.fail(err, instead)
		}
		return parts
	}
	for batch := range slices.Chunk(want, maxDigests) {
		q := request{Op: opFind}
		for _, sum := range batch {
			if missing[sum] {
				q.Digests = append(q.Digests, sum.String())
			}
		}
		if len(q.Digests) == 0 {
			continue
		}
		r, err := client.askText(ctx, q, quick)
		if err != nil {
			return fails(err)
		}
		for _, name := range r.Names[:min(len(r.Names), maxFound)] {
			if names[name] || len(name) != nameLength {
				continue
			}
			names[name] = true
			p, err := fetchPart(ctx, client, name)
			if err != nil {
				if errors.Is(err, errs.ErrCorrupt) {
					_, _ = client.Drop(ctx, name)
				}
				return fails(err)
			}
			if p != nil && takeFrom(missing, p.Digests) {
				p.Source = l.noteUse(p.Source, p.Source.Facts(), name)
				parts = append(parts, *p)
			} else if p != nil {
				_ = p.Source.Close()
			}
		}
	}
	return parts
}

// takeFrom removes sums from missing, and reports whether missing had any of them.
func takeFrom(missing map[digest.Sum]bool, sums []digest.Sum) bool {
	before := len(missing)
	for _, sum := range sums {
		delete(missing, sum)
	}
	return len(missing) < before
}

// fetchPart returns the container with a name and its digests, or nil if the store does not have that name.
func fetchPart(ctx context.Context, c *Client, name string) (*Part, error) {
	src, err := c.fetch(ctx, label{name: name}, -1, "host store entry "+name[:12])
	if err != nil || src == nil {
		return nil, err
	}
	ix, err := format.Open(ctx, []source.Source{src}, format.Options{Known: codec.Known, Parts: true})
	p := &Part{Source: src, Index: ix}
	if err == nil {
		p.Digests, err = overwire.ReadDigests(ix.Sources[0].Mark, len(ix.Tensors))
	}
	if err != nil {
		_ = src.Close()
		return nil, errs.New(errs.ErrCorrupt, "%s", errs.Message(err))
	}
	return p, nil
}

// KeepBytes puts a container into the store, unless the store has it or another process is putting it.
func KeepBytes(ctx context.Context, src source.Source) error {
	path := knob.Host.Get()
	if path == off {
		path = auto
	}
	return putFile(ctx, path, src, nil)
}
