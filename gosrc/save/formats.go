package save

// This file is the table of formats that are written and verified.

import (
	"context"
	"strings"
	"sync"
	"time"

	"github.com/zeebo/xxh3"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/job"
	"github.com/overwire/overwire/gosrc/knob"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/tensor"
	"github.com/overwire/overwire/gosrc/tensorizer"
)

// A fileFormat is one kind of file that is written and verified.
type fileFormat struct {
	name string // tensor.Source.Format
	// extension ends the paths of such files; "": all other paths.
	extension string
	coded     bool // tensors may be compressed, or be aliases
	// refuse returns what such a file does not support in a Spec; "": nothing.
	refuse func(s *Spec) string
	// settings are added when sources are read to become such a file.
	settings map[string]string
	write    func(ctx context.Context, w *writer, to draft, share writerShare, p outputFile) (size int64, err error)
	// verify checks the sums that source k holds; nil: such files hold none, and
	// opening them has checked all there is. With proves it checks their tensors
	// too.
	verify func(ctx context.Context, m *model, j *job.Job, k int, rep *VerifyReport) error
	proves bool
}

// formats lists them. A path belongs to the first whose extension it has, or else
// to the last.
var formats = []fileFormat{
	{
		name: tensorizer.Format, extension: tensorizer.Extension,
		refuse:   refusedByTensors,
		settings: map[string]string{tensorizer.OptionBytes: "true"}, // it supports dtypes that other formats lack
		write:    writeTensors,
		verify:   verifyTensors, proves: true,
	},
	{name: tensor.FormatOverwire, verify: checkZeros},
	{
		name: tensor.FormatSafetensors, extension: extension, coded: true,
		refuse: refusedBySafetensors,
		write:  writeSafetensors,
	},
}

// formatOf is the format of a file that is written.
func formatOf(path string) *fileFormat {
	for i := range formats {
		if f := &formats[i]; f.extension != "" && strings.HasSuffix(path, f.extension) {
			return f
		}
	}
	return &formats[len(formats)-1]
}

// namesFile reports whether a path has a format's extension.
func namesFile(path string) bool { return strings.HasSuffix(path, formatOf(path).extension) }

// formatNamed is the format of a source.
func formatNamed(s *tensor.Source) *fileFormat {
	for i := range formats {
		if formats[i].name == s.Format {
			return &formats[i]
		}
	}
	return &formats[len(formats)-1]
}

func refusedBySafetensors(s *Spec) string {
	if len(s.Storage.Encrypt) > 0 {
		return "only .tensors files are encrypted"
	}
	return ""
}

func refusedByTensors(s *Spec) string {
	switch {
	case s.Shard > 0:
		return ".tensors files are not sharded"
	case len(s.Metadata) > 0:
		return ".tensors files hold no metadata"
	}
	return ""
}

// writeSafetensors writes a plain file, or a container of docs/format.md.
func writeSafetensors(ctx context.Context, w *writer, to draft, share writerShare, p outputFile) (int64, error) {
	f := &fileWriter{writer: w, draft: to, share: share, packs: map[*gpu][]*pack{}, path: to.URI(), part: p}
	return f.write(ctx)
}

// writeTensors writes a .tensors file. Tensors from such a file keep their types,
// modules and dtypes; others become those of a state dict.
func writeTensors(ctx context.Context, w *writer, to draft, _ writerShare, p outputFile) (int64, error) {
	known := map[*origin]map[string]tensorizer.Item{}
	all := make([]tensorizer.Tensor, len(p.items))
	for i, t := range p.items {
		if t.origin == nil || t.origin.format != tensorizer.Format {
			it, err := tensorizer.NewItem(t.name, t.dtype, t.shape, t.bytes)
			if err != nil {
				return 0, errs.Locate("save", to.URI(), t.name, -1, err)
			}
			all[i] = tensorizer.Tensor{Item: it, Data: w.flowOf(t)}
			continue
		}
		if known[t.origin] == nil {
			f, err := tensorizer.Open(ctx, t.origin.src, true)
			if err != nil {
				return 0, err
			}
			known[t.origin] = f.Items()
		}
		all[i] = tensorizer.Tensor{Item: known[t.origin][t.name], Data: w.flowOf(t)}
	}
	return tensorizer.Write(ctx, to, tensorizer.How{Path: to.URI(), Encrypt: w.spec.Storage.Encrypt, Workers: w.threads,
		InOrder: source.Remote(p.path)}, all)
}

// flowOf reads a tensor's bytes, and compares the hash of their source.
func (w *writer) flowOf(t *item) tensorizer.Flow {
	var f tensorizer.Flow
	if m, ok := t.body.(memory); ok {
		f.Memory = m
	} else {
		if s, ok := t.body.(fromFile); ok {
			f.Step = s.Block()
		}
		f.Next = func(ctx context.Context, buf []byte, off int64) ([]byte, error) {
			defer addLap(&w.clock.read, time.Now())
			return t.body.bytes(ctx, buf, off)
		}
	}
	f.Busy = &w.clock.hash
	whole := xxh3.New()
	f.Pass = func(p []byte) error {
		if t.known != nil {
			_, _ = whole.Write(p)
		}
		w.job.Bytes.Add(int64(len(p)))
		return nil
	}
	f.Done = func() error {
		if t.known != nil && t.bytes > 0 && sumOf(whole) != t.known.Hash {
			return t.errOtherBytes()
		}
		w.job.Tensors.Add(1)
		return nil
	}
	return f
}

// errOtherBytes is the error of a tensor whose bytes differ from the hash of its source, which it names.
func (t *item) errOtherBytes() error {
	return errs.Locate("read", t.origin.src.URI(), t.name, -1,
		errs.New(errs.ErrCorrupt, "the bytes read are not those that were saved (XXH3-128 differs)"))
}

func verifyTensors(ctx context.Context, m *model, j *job.Job, k int, rep *VerifyReport) error {
	var mu sync.Mutex
	return tensorizer.Verify(ctx, m.srcs[k], tensorizer.Proof{
		Workers: knob.Workers(0), InOrder: m.srcs[k].Facts().Concurrency > 0,
		Passed: func(n int64) { j.Bytes.Add(n) },
		Proven: func(n int64) {
			mu.Lock()
			defer mu.Unlock()
			rep.Tensors++
			rep.Bytes += n
			j.Tensors.Add(1)
		},
	})
}
