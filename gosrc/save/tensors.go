package save

// This file writes tensorizer's .tensors files.

import (
	"context"
	"time"

	"github.com/overwire/overwire/gosrc/codec"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/save/publish"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/tensorizer"
	"github.com/zeebo/xxh3"
)

// writeTensors writes a .tensors file. Tensors from another .tensors file keep their types,
// modules and dtypes. Other tensors are written as those of a state dict.
func writeTensors(ctx context.Context, s *session, to publish.Draft, _ writerShare, file *File) (written, error) {
	known := map[source.Source]map[string]tensorizer.Item{}
	all := make([]tensorizer.Tensor, len(file.Items))
	for i, t := range file.Items {
		if t.from == nil || t.from.format != tensorizer.Format {
			it, err := tensorizer.NewItem(t.name, t.dtype, t.shape, t.bytes)
			if err != nil {
				return written{}, errs.Locate("save", to.URI(), t.name, -1, err)
			}
			all[i] = tensorizer.Tensor{Item: it, Data: flowOf(s, t)}
			continue
		}
		if known[t.from.src] == nil {
			f, err := tensorizer.Open(ctx, t.from.src, true)
			if err != nil {
				return written{}, err
			}
			known[t.from.src] = f.Items()
		}
		all[i] = tensorizer.Tensor{Item: known[t.from.src][t.name], Data: flowOf(s, t)}
	}
	size, err := tensorizer.Write(ctx, to, tensorizer.How{Path: to.URI(), Encrypt: s.spec.Storage.Encrypt,
		Workers: s.threads, InOrder: source.Remote(file.Path)}, all)
	return written{size: size}, err
}

// flowOf returns a Flow that reads a tensor's bytes and compares them with the source's hash.
func flowOf(s *session, t *Item) tensorizer.Flow {
	var f tensorizer.Flow
	if m, ok := t.body.(memory); ok {
		f.Memory = m
	} else {
		if file, ok := t.body.(fileBody); ok {
			f.Step = file.Block()
		}
		f.Next = func(ctx context.Context, buf []byte, off int64) ([]byte, error) {
			defer addLap(&s.clock.read, time.Now())
			return t.body.bytes(ctx, buf, off)
		}
	}
	f.Busy = &s.clock.hash
	whole := xxh3.New()
	f.Pass = func(p []byte) error {
		if t.known() != nil {
			_, _ = whole.Write(p)
		}
		s.job.Bytes.Add(int64(len(p)))
		return nil
	}
	f.Done = func() error {
		if t.known() != nil && t.bytes > 0 && codec.HashOf(whole.Sum128()) != t.known().Hash {
			return t.errOtherBytes()
		}
		s.job.Tensors.Add(1)
		return nil
	}
	return f
}
