package save

// This file has the verb Verify.

import (
	"context"
	"slices"
	"time"

	"github.com/overwire/overwire/gosrc/codec/digest"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/format"
	"github.com/overwire/overwire/gosrc/internal/ordered"
	"github.com/overwire/overwire/gosrc/job"
	"github.com/overwire/overwire/gosrc/knob"
	"github.com/overwire/overwire/gosrc/save/stored"
	"github.com/zeebo/xxh3"
)

// A VerifyReport says what was verified. With an error, its counts say how far
// verification came.
type VerifyReport struct {
	OK      bool           `json:"ok"`
	Tensors int            `json:"tensors"` // verified, aliases included
	Bytes   int64          `json:"bytes"`   // of tensors, decoded and hashed
	Stored  int64          `json:"stored"`  // bytes of the files
	Seconds float64        `json:"seconds"`
	Files   []VerifiedFile `json:"files"`
	Note    string         `json:"note,omitempty"` // what could not be verified
}

// A VerifiedFile is one file of a VerifyReport.
type VerifiedFile struct {
	URI     string `json:"uri"`
	Format  string `json:"format"`  // "overwire", "safetensors", "tensors" or "gguf"
	Checked string `json:"checked"` // "contents": every byte; "structure": header and sizes
	Tensors int    `json:"tensors"`
	Bytes   int64  `json:"bytes"`
	Stored  int64  `json:"stored"`
	// Original is the plain file that a container was made from, if that was asked for.
	Original *Original `json:"original,omitempty"`
}

// Verify verifies files. Of an overwire file every byte is checked: header and
// index are exactly what the writer makes of their content, every chunk has its CRC
// and decodes, every tensor has its XXH3-128, padding is zero. Of a plain
// safetensors file, and of GGUF, only the structure can be, since it holds no checksums,
// and the report says so. Of a .tensors file every tensor's hashes are compared, and the
// tags of encrypted ones with the key. With originals, what a container was made from
// is made again, and has its SHA-256. The first error ends it, with file, tensor, chunk
// and offset where they are known.
func Verify(ctx context.Context, j *job.Job, uris []string, storage format.Access, originals bool) (VerifyReport,
	error) {
	start := time.Now()
	var rep VerifyReport
	m, others, err := openOrList(ctx, uris, storage, true)
	if err != nil {
		return rep, errs.Ended(ctx, err)
	}
	if j == nil {
		j = job.New("verify")
	}
	if m != nil {
		defer m.closeSources()
		err = m.verifyAll(ctx, j, &rep, originals)
	}
	for _, file := range others {
		rep.addFile(file)
	}
	rep.OK = err == nil
	rep.Seconds = time.Since(start).Seconds()
	return rep, errs.Ended(ctx, err)
}

// verifyAll verifies a model, also what it was made from if originals are asked for, and that no
// file was written to meanwhile.
func (m *model) verifyAll(ctx context.Context, j *job.Job, rep *VerifyReport, originals bool) error {
	err := m.verify(ctx, j, rep)
	if err == nil && originals {
		err = m.originals(ctx, j, rep)
	}
	if err == nil {
		err = m.refuseWritten()
	}
	return err
}

func (m *model) verify(ctx context.Context, j *job.Job, rep *VerifyReport) error {
	for k := range m.ix.Sources {
		s := &m.ix.Sources[k]
		f := VerifiedFile{URI: errs.RedactURI(s.URI), Format: s.Format, Checked: "contents", Stored: s.Size}
		if formatNamed(s).verify == nil {
			f.Checked = "structure"
			rep.Note = "plain safetensors files hold no checksums: only their structure was verified"
		}
		rep.Files = append(rep.Files, f)
		rep.Stored += s.Size
	}
	items := m.items(knob.Workers(0))
	var total int64
	for i, t := range items {
		f := &rep.Files[m.ix.Tensors[i].Source]
		f.Tensors++
		f.Bytes += t.bytes
		if formatNamed(&m.ix.Sources[m.ix.Tensors[i].Source]).verify != nil {
			total += t.bytes
		}
	}
	j.TotalBytes.Store(total)
	j.TotalTensors.Store(int64(len(items)))
	for k := range m.ix.Sources {
		if verify := formatNamed(&m.ix.Sources[k]).verify; verify != nil {
			if err := verify(ctx, m, j, k, rep); err != nil {
				return err
			}
		}
	}
	return m.verifyContents(ctx, j, items, rep)
}

// originals verifies the originals that containers keep.
func (m *model) originals(ctx context.Context, j *job.Job, rep *VerifyReport) error {
	for k := range m.ix.Sources {
		o, err := m.original(ctx, Spec{}, k)
		if err != nil {
			return err
		}
		if o == nil {
			continue
		}
		p, err := o.Verify(ctx, m.ix, k, knob.Workers(0), m.metadata(k), func(n int64) {
			j.TotalBytes.Add(n)
			j.Bytes.Add(n)
		})
		if err != nil {
			return err
		}
		rep.Files[k].Original = &Original{rep.Files[k].URI, o.SHA256, p.Compared}
	}
	return nil
}

// checkZeros checks the bytes of source k that belong to no chunk. Header and index have
// checksums, which format.Open has compared.
func checkZeros(ctx context.Context, m *model, _ *job.Job, k int, _ *VerifyReport) error {
	return stored.CheckPadding(ctx, m.srcs[k], m.ix, k)
}

// A span is a run of a tensor's bytes in plain order.
type span struct {
	t    *item
	k    int // number of the tensor
	off  int64
	n    int64
	last bool
}

// cut appends the spans of tensor k, which is one of another file.
func (t *item) cut(spans []span, k int) []span {
	step := t.body.(fromFile).Step()
	for off := int64(0); off < t.bytes; off += step {
		n := min(step, t.bytes-off)
		spans = append(spans, span{t, k, off, n, off+n == t.bytes})
	}
	return spans
}

// verifyContents decodes and hashes every tensor that has bytes of its own, in pieces on
// all cores.
func (m *model) verifyContents(ctx context.Context, j *job.Job, items []*item, rep *VerifyReport) error {
	var spans []span
	for i, t := range items {
		if t.known != nil && m.ix.Tensors[i].Alias < 0 {
			spans = t.cut(spans, i)
		}
	}
	n := knob.Workers(0)
	window := 3*n + 2
	bufs := make([][]byte, window)
	kept, err := m.keptDigests()
	if err != nil {
		return err
	}
	parts := make([]digest.State, window)
	var sum digest.State
	var h xxh3.Hasher
	o := ordered.Tasks{N: len(spans), Window: window, Workers: n,
		Work: func(_, k int) error {
			s := &spans[k]
			b := &bufs[k%window]
			*b = slices.Grow((*b)[:0], int(s.n))[:s.n]
			_, err := s.t.body.bytes(ctx, *b, s.off)
			if parts[k%window] = (digest.State{}); kept[s.k] != nil && err == nil {
				parts[k%window].Add(s.off, *b)
			}
			return err
		},
		Turn: func(k int) error {
			s := &spans[k]
			if s.off == 0 {
				h.Reset()
				sum = digest.State{}
			}
			sum.Merge(parts[k%window])
			_, _ = h.Write(bufs[k%window])
			j.Bytes.Add(s.n)
			rep.Bytes += s.n
			if !s.last {
				return nil
			}
			if sumOf(&h) != s.t.known.Hash {
				return m.corruptTensor(s.k, "the decoded bytes are not those that were saved (XXH3-128 differs)")
			}
			if d := kept[s.k]; d != nil && *d != sum.Sum(s.t.bytes) {
				return m.corruptTensor(s.k, "the digest that the file keeps is not that of the decoded bytes")
			}
			rep.Tensors++
			j.Tensors.Add(1)
			return nil
		},
	}
	if err := o.Run(ctx, "save.verify"); err != nil {
		return err
	}
	return m.verifyOthers(j, items, kept, rep)
}

// verifyOthers verifies what has no bytes of its own: an alias with the tensor that it refers to.
func (m *model) verifyOthers(j *job.Job, items []*item, kept []*digest.Sum, rep *VerifyReport) error {
	for i, t := range items {
		rt := &m.ix.Tensors[i]
		if d := kept[i]; d != nil && (rt.Alias >= 0 && *d != *kept[rt.Alias] || t.bytes == 0 && *d != digest.Of(nil)) {
			return m.corruptTensor(i, "the digest that the file keeps is not that of its bytes")
		}
		switch {
		case formatNamed(&m.ix.Sources[rt.Source]).proves:
			continue // and was counted then
		case t.known == nil:
			rep.Tensors++
		case rt.Alias >= 0:
			if rt.Hash != m.ix.Tensors[rt.Alias].Hash {
				return m.corruptTensor(i, "an alias whose hash is not that of the tensor that holds its bytes")
			}
			rep.Tensors++
			rep.Bytes += t.bytes
			j.Bytes.Add(t.bytes)
		case t.bytes == 0:
			if rt.Hash != hashOfNothing() {
				return m.corruptTensor(i, "a tensor without bytes whose hash is not that of nothing")
			}
			rep.Tensors++
		default:
			continue
		}
		j.Tensors.Add(1)
	}
	return nil
}

func (m *model) corruptTensor(i int, what string) error {
	t := &m.ix.Tensors[i]
	return errs.Place("verify", m.ix.Sources[t.Source].URI, t.Name, t.Off, errs.New(errs.ErrCorrupt, "%s", what))
}
