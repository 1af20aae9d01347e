package save

import (
	"context"
	"errors"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/overwire/overwire/gosrc/fault"
	"github.com/overwire/overwire/gosrc/format/safetensors"
	"github.com/overwire/overwire/gosrc/format/tensors"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/source/open"
	"github.com/overwire/overwire/gosrc/tensor"
)

// A far file is an object of a store: it streams there, and shows when it is
// published. Nothing of it touches the disk.
type far struct{ source.Draft }

func (f far) write(p []byte, off int64) error { return f.Write(p, off) }
func (f far) skip(lo, hi int64) error         { return f.Skip(lo, hi) }

// remote reports whether a path is that of a store.
func remote(path string) bool {
	s := open.Scheme(path)
	return s != "" && s != "file"
}

// join is filepath.Join that leaves URIs whole.
func join(dir, name string) string {
	if remote(dir) {
		return strings.TrimSuffix(dir, "/") + "/" + name
	}
	return filepath.Join(dir, name)
}

// saveFar is save for a store.
func (w *writer) saveFar(ctx context.Context, parts []part, rep Report) (_ Report, err error) {
	var drafts []source.Draft
	defer func() {
		for _, d := range drafts {
			d.Drop()
		}
	}()
	for _, p := range parts {
		d, err := open.Create(ctx, p.path, w.spec.Storage, p.most())
		if err != nil {
			return Report{}, err
		}
		drafts = append(drafts, d)
		size := int64(len(p.blob))
		if p.blob != nil {
			err = d.Write(p.blob, 0)
		} else if tensorizer(p.path) {
			size, err = w.tensors(ctx, far{d}, p.path, p.items)
		} else {
			f := &fileWriter{writer: w, output: far{d}, path: p.path, part: p}
			size, err = f.write(ctx)
		}
		if err == nil {
			err = d.Finish(size)
		}
		if err != nil {
			return Report{}, wrap("save", p.path, "", -1, err)
		}
		rep.BytesOut += size
		rep.Files = append(rep.Files, p.path)
	}
	if err := w.publishFar(ctx, parts, drafts); err != nil {
		return Report{}, err
	}
	rep.Ratio = 1
	if rep.BytesIn > 0 {
		rep.Ratio = float64(rep.BytesOut) / float64(rep.BytesIn)
	}
	return rep, nil
}

// most is more than the part can have bytes.
func (p *part) most() int64 {
	n := int64(len(p.blob)) + 256<<20 // header and index, whatever their size
	for _, t := range p.items {
		n += t.bytes + t.bytes/128 + 2*tensors.Align
	}
	return n
}

// publishFar shows the objects, the one that readers look for last. A store
// has no step that shows several: where the old index would name new shards it
// is removed first. What the old model leaves is removed at the end.
func (w *writer) publishFar(ctx context.Context, parts []part, drafts []source.Draft) error {
	kept := map[string]bool{}
	for _, p := range parts {
		kept[p.path] = true
	}
	last := parts[len(parts)-1].path
	index := last
	if len(parts) == 1 {
		index = indexPath(w.spec.Path)
	}
	var old []string
	if len(parts) > 1 || w.spec.Shard != 0 {
		var err error
		if old, err = w.oldShards(ctx, index); err != nil {
			return err
		}
	}
	again := slices.ContainsFunc(old, func(p string) bool { return kept[p] })
	if again && len(parts) > 1 {
		if err := open.Remove(ctx, last, w.spec.Storage); err != nil {
			return err
		}
	}
	for _, d := range drafts {
		if err := d.Publish(); err != nil {
			return err
		}
	}
	if w.spec.Shard == 0 {
		return nil
	}
	// The model stands: what cannot be removed now is told, all the same.
	var first error
	for _, p := range append(old, w.spec.Path, indexPath(w.spec.Path)) {
		if kept[p] {
			continue
		}
		if err := open.Remove(ctx, p, w.spec.Storage); err != nil && first == nil {
			first = err
		}
	}
	return first
}

// oldShards lists the shards of the model's own name in an index, if there is
// one.
func (w *writer) oldShards(ctx context.Context, index string) (out []string, err error) {
	if !strings.HasSuffix(index, ".index.json") {
		return nil, nil
	}
	s, err := open.With(w.spec.Storage)(ctx, index)
	if errors.Is(err, fault.ErrNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer s.Close()
	b := make([]byte, min(s.Size(), tensor.MaxHeader)) // a larger one is not ours
	if err := s.ReadAt(ctx, b, 0); err != nil {
		return nil, err
	}
	shards, _ := safetensors.ReadIndexJSON(index, b) // a broken one names nothing
	dir, stem := stemOf(strings.TrimSuffix(index, ".index.json"))
	name := regexp.MustCompile("^" + regexp.QuoteMeta(stem) + `-\d{5}-of-\d{5}` + regexp.QuoteMeta(extension) + "$")
	for _, f := range shards.Files {
		if name.MatchString(f) {
			out = append(out, join(dir, f))
		}
	}
	return out, nil
}
