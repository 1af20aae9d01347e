package save

// This file lists the formats that can be written, and writes tensorizer's .tensors files.

import (
	"context"
	"strings"
	"time"

	"github.com/zeebo/xxh3"

	"github.com/overwire/overwire/gosrc/codec"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/save/original"
	"github.com/overwire/overwire/gosrc/save/publish"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/source/open"
	"github.com/overwire/overwire/gosrc/tensorizer"
)

// A fileFormat is a format that files can be written in.
type fileFormat struct {
	// extension is the suffix of paths with this format. Paths with other suffixes have the last format in formats.
	extension string
	coded     bool // tensors may be compressed, or be aliases
	// refuse returns which part of a Spec the format does not support, or "".
	refuse func(s *Spec) string
	// settings are storage options that are added when sources are read for this format.
	settings map[string]string
	write    func(ctx context.Context, s *session, to source.Output, share writerShare, file *File) (written, error)
}

// written is the result of writing one file.
type written struct {
	size     int64
	original *original.Summary // nil if there is no original
}

var formats = []fileFormat{
	{
		extension: tensorizer.Extension,
		refuse:    refusedByTensors,
		settings:  map[string]string{tensorizer.OptionBytes: "true"}, // it supports dtypes that other formats lack
		write:     writeTensors,
	},
	{extension: publish.Extension, coded: true, refuse: refusedBySafetensors, write: encodeFile},
}

func refusedBySafetensors(s *Spec) string {
	if len(s.Storage.Encrypt) > 0 {
		return "only .tensors files can be encrypted, not folders or other formats"
	}
	return ""
}

func refusedByTensors(s *Spec) string {
	switch {
	case s.Shard > 0:
		return ".tensors files cannot be sharded"
	case len(s.Metadata) > 0:
		return ".tensors files cannot hold metadata"
	}
	return ""
}

// A Target is the parsed path that a save writes to.
type Target struct {
	Path   string // a local path, or a URI
	Remote bool
	Named  bool // the path has a file extension
	format *fileFormat
}

// At returns the target for another path on the same host or in the same store.
func (t Target) At(path string) Target {
	t.Path, t.format = path, &formats[len(formats)-1]
	for i := range formats {
		if strings.HasSuffix(path, formats[i].extension) {
			t.format = &formats[i]
			break
		}
	}
	t.Named = strings.HasSuffix(path, t.format.extension)
	return t
}

// Coded reports whether tensors in the target's format may be compressed or be aliases.
func (t Target) Coded() bool { return t.format.coded }

// Settings returns storage options to add when sources are read for this target.
func (t Target) Settings() map[string]string { return t.format.settings }

// Resolve checks a path and the parts of a Spec that do not depend on the tensors, and fills in defaults of the Spec.
func Resolve(path string, spec *Spec) (Target, error) {
	switch scheme := source.Scheme(path); {
	case path == "":
		return Target{}, badArgument(path, "", "there is no path to write to")
	case scheme == "file":
		local, err := source.FilePath(path)
		if err != nil {
			return Target{}, err
		}
		path = local
	case open.RecipeOf(scheme) != nil:
		return Target{}, errs.In("save", path, open.RecipeOf(scheme))
	case scheme != "" && !open.Writable(path):
		return Target{}, errs.In("save", path, errs.New(errs.ErrNotSupported,
			"cannot write to %s://: save to s3://, redis:// or a local file", scheme))
	}
	t := Target{Remote: source.Remote(path)}.At(path)
	if err := spec.check(path); err != nil {
		return t, err
	}
	if why := t.format.refuse(spec); why != "" {
		return t, badArgument(path, "", "%s", why)
	}
	return t, checkMetadata(path, spec.Metadata)
}

// writeTensors writes a .tensors file. Tensors from another .tensors file keep their types,
// modules and dtypes. Other tensors are written as those of a state dict.
func writeTensors(ctx context.Context, s *session, to source.Output, _ writerShare, file *File) (written, error) {
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
