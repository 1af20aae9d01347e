// Package verify examines models. Verify compares every checksum, Inspect describes files by their headers, and Digests
// computes a digest of each tensor. The package writes nothing.
package verify

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/overwire/overwire/gosrc/codec"
	"github.com/overwire/overwire/gosrc/codec/digest"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/format"
	"github.com/overwire/overwire/gosrc/format/gguf"
	"github.com/overwire/overwire/gosrc/internal/avx"
	"github.com/overwire/overwire/gosrc/internal/regular"
	"github.com/overwire/overwire/gosrc/job"
	"github.com/overwire/overwire/gosrc/knob"
	"github.com/overwire/overwire/gosrc/save/original"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/source/open"
	"github.com/overwire/overwire/gosrc/stored"
	"github.com/overwire/overwire/gosrc/tensor"
	"github.com/overwire/overwire/gosrc/tensorizer"
	"github.com/zeebo/xxh3"
)

// Verify verifies files. In an overwire file it checks every byte: header and index must be exactly as the writer would
// write them, every chunk must match its CRC and decode, every tensor must match its XXH3-128, and padding must be
// zero. A plain safetensors or GGUF file has no checksums, so Verify checks only its structure, and the report says so.
// If the file is from the Hugging Face Hub and its SHA-256 is known, Verify compares that. In a .tensors
// file it compares every tensor's hashes, and with the key also the tags of encrypted tensors. If originals is set,
// Verify also restores the file from which a container was made, in memory, and compares its SHA-256. Verify stops at
// the first error, which names file, tensor, chunk and offset if known.
func Verify(ctx context.Context, j *job.Job, uris []string, access format.Access, originals bool) (Report, error) {
	start := time.Now()
	var rep Report
	m, others, err := openOrList(ctx, uris, access, true)
	if err != nil {
		return rep, errs.Ended(ctx, err)
	}
	if j == nil {
		j = job.New("verify")
	}
	if m != nil {
		defer m.Close()
		err = verifyModel(ctx, j, m, &rep)
		if err == nil && originals {
			err = verifyOriginals(ctx, j, m, &rep)
		}
		if err == nil {
			err = m.RefuseWritten()
		}
	}
	for _, file := range others {
		if err != nil {
			break
		}
		err = rep.addFile(file, func(f *VerifiedFile) error {
			src, err := open.With(access.Options).Open(ctx, file.opened)
			if err != nil {
				return err
			}
			defer src.Close()
			return compareHubSum(ctx, j, src, &rep, f)
		})
	}
	rep.OK = err == nil
	rep.Seconds = time.Since(start).Seconds()
	return rep, errs.Ended(ctx, err)
}

func verifyModel(ctx context.Context, j *job.Job, m *stored.Model, rep *Report) error {
	for k := range m.Index.Sources {
		s := &m.Index.Sources[k]
		f := VerifiedFile{URI: errs.RedactURI(s.URI), Format: s.Format, Checked: "contents", Stored: s.Size}
		if checks[s.Format].sums == nil {
			f.Checked = "structure"
		}
		rep.Files = append(rep.Files, f)
		rep.Stored += s.Size
	}
	var total int64
	for i := range m.Index.Tensors {
		t := &m.Index.Tensors[i]
		f := &rep.Files[t.Source]
		f.Tensors++
		f.Bytes += t.Bytes
		if checks[m.Index.Sources[t.Source].Format].sums != nil {
			total += t.Bytes
		}
	}
	j.TotalBytes.Store(total)
	j.TotalTensors.Store(int64(len(m.Index.Tensors)))
	for k := range m.Index.Sources {
		if sums := checks[m.Index.Sources[k].Format].sums; sums != nil {
			if err := sums(ctx, j, m, k, rep); err != nil {
				return err
			}
		} else if err := compareHubSum(ctx, j, m.Sources[k], rep, &rep.Files[k]); err != nil {
			return err
		} else if rep.Files[k].Checked == "structure" {
			rep.Note = plainNote
		}
	}
	digests, err := storedDigests(m)
	if err != nil {
		return err
	}
	if err := verifyContents(ctx, j, m, digests, rep); err != nil {
		return err
	}
	return verifyAliases(j, m, digests, rep)
}

// verifyOriginals verifies the originals that containers store.
func verifyOriginals(ctx context.Context, j *job.Job, m *stored.Model, rep *Report) error {
	for k := range m.Index.Sources {
		s := &m.Index.Sources[k]
		if !s.Overwire() || s.Unlisted > 0 {
			continue
		}
		o, err := original.Of(ctx, m.Sources[k], s, false)
		if err != nil {
			return err
		}
		if o == nil {
			continue
		}
		p, err := original.Verify(ctx, o, m, k, knob.Workers(0), func(n int64) {
			j.TotalBytes.Add(n)
			j.Bytes.Add(n)
		})
		if err != nil {
			return err
		}
		rep.Files[k].Original = &original.Summary{File: rep.Files[k].URI, SHA256: o.SHA256, Compared: p.Compared}
	}
	return nil
}

// verifyContents decodes and hashes all tensors of a model's containers except aliases, in spans, on all cores.
func verifyContents(ctx context.Context, j *job.Job, m *stored.Model, digests []*digest.Sum, rep *Report) error {
	workers := knob.Workers(0)
	var spans []stored.Span
	for i, r := range m.Readers(stored.NewCache(workers)) {
		if t := &m.Index.Tensors[i]; t.Alias < 0 && m.Index.Sources[t.Source].Overwire() {
			spans = stored.AppendSpans(spans, r, i, t.Bytes)
		}
	}
	parts := make([]digest.State, stored.Window(workers))
	var sum digest.State
	var h xxh3.Hasher
	return stored.ReadInOrder(ctx, "save.verify", workers, spans,
		func(k int, b []byte) {
			part := &parts[k%len(parts)]
			*part = digest.State{}
			if digests[spans[k].Number] != nil {
				part.Add(spans[k].Off, b)
			}
		},
		func(k int, b []byte) error {
			s := &spans[k]
			if s.Off == 0 {
				h.Reset()
				sum = digest.State{}
			}
			sum.Merge(parts[k%len(parts)])
			_, _ = h.Write(b)
			j.Bytes.Add(s.N)
			rep.Bytes += s.N
			if !s.Last {
				return nil
			}
			t := &m.Index.Tensors[s.Number]
			if codec.HashOf(h.Sum128()) != t.Hash {
				return corruptTensor(m, s.Number, "the tensor's bytes differ from those that were saved (XXH3-128 "+
					"mismatch)")
			}
			if d := digests[s.Number]; d != nil && *d != sum.Sum(t.Bytes) {
				return corruptTensor(m, s.Number, "the stored digest does not match the decoded bytes")
			}
			rep.Tensors++
			j.Tensors.Add(1)
			return nil
		})
}

// verifyAliases verifies aliases and empty tensors. It compares an alias with the tensor that it refers to.
func verifyAliases(j *job.Job, m *stored.Model, digests []*digest.Sum, rep *Report) error {
	for i := range m.Index.Tensors {
		t := &m.Index.Tensors[i]
		s := &m.Index.Sources[t.Source]
		if d := digests[i]; d != nil &&
			(t.Alias >= 0 && *d != *digests[t.Alias] || t.Bytes == 0 && *d != digest.Of(nil)) {
			return corruptTensor(m, i, "the stored digest does not match its bytes")
		}
		switch {
		case checks[s.Format].counts:
			continue
		case !s.Overwire():
			rep.Tensors++
		case t.Alias >= 0:
			if t.Hash != m.Index.Tensors[t.Alias].Hash {
				return corruptTensor(m, i, "the hash of this alias differs from the hash of its tensor")
			}
			rep.Tensors++
			rep.Bytes += t.Bytes
			j.Bytes.Add(t.Bytes)
		case t.Bytes == 0:
			if t.Hash != codec.HashOf(xxh3.Hash128(nil)) {
				return corruptTensor(m, i, "the hash of this empty tensor is not the hash of zero bytes")
			}
			rep.Tensors++
		default:
			continue
		}
		j.Tensors.Add(1)
	}
	return nil
}

func corruptTensor(m *stored.Model, i int, what string) error {
	t := &m.Index.Tensors[i]
	return errs.Place("verify", m.Index.Sources[t.Source].URI, t.Name, t.Off, errs.New(errs.ErrCorrupt, "%s", what))
}

// A check verifies the files of one format.
type check struct {
	// sums compares the checksums of source k that were not compared when it was opened. It is nil for formats without
	// checksums.
	sums   func(ctx context.Context, j *job.Job, m *stored.Model, k int, rep *Report) error
	counts bool // sums also checks and counts the tensors
}

// checks maps the name of a format to its check.
var checks = map[string]check{
	tensorizer.Format:     {sums: verifyTensors, counts: true},
	tensor.FormatOverwire: {sums: checkZeros},
}

// checkZeros checks that the padding of source k is zero.
func checkZeros(ctx context.Context, _ *job.Job, m *stored.Model, k int, _ *Report) error {
	return stored.CheckPadding(ctx, m.Sources[k], m.Index, k)
}

func verifyTensors(ctx context.Context, j *job.Job, m *stored.Model, k int, rep *Report) error {
	var mu sync.Mutex
	return tensorizer.Verify(ctx, m.Sources[k], tensorizer.Proof{
		Workers: knob.Workers(0), InOrder: m.Sources[k].Facts().Concurrency > 0,
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

// Inspect describes files by their headers and indexes. It reads no tensor bytes.
func Inspect(ctx context.Context, uris []string, access format.Access) (*Inspection, error) {
	m, others, err := openOrList(ctx, uris, access, false)
	if err != nil {
		return nil, errs.Ended(ctx, err)
	}
	out := &Inspection{}
	if m != nil {
		defer m.Close()
		out.addModel(m)
	}
	out.Sources = append(out.Sources, others...)
	out.sumUp()
	return out, nil
}

// hubSum returns the SHA-256 that the Hub reported for a local file, or "" if it is unknown. As in huggingface_hub, it
// is unknown if the file was written to after the download. huggingface_hub stores it in both of its layouts: a cache
// uses it as the name of the blob, and a local folder has it in .cache/huggingface/download/FILE.metadata (three lines:
// commit, ETag, time of the download).
func hubSum(path string) string {
	path, err := filepath.Abs(path)
	if err != nil {
		return ""
	}
	blob, err := filepath.EvalSymlinks(path)
	if err != nil {
		return ""
	}
	if dir, name := filepath.Split(blob); filepath.Base(dir) == "blobs" && isSum(name) {
		return name
	}
	info, err := os.Stat(path)
	if err != nil {
		return ""
	}
	for dir := filepath.Dir(path); ; dir = filepath.Dir(dir) {
		name, _ := filepath.Rel(dir, path)
		text, err := regular.Read(filepath.Join(dir, ".cache", "huggingface", "download", name+".metadata"), 4<<10)
		lines := strings.Fields(string(text))
		if err == nil && len(lines) == 3 {
			seconds, err := strconv.ParseFloat(lines[2], 64)
			if err == nil && isSum(lines[1]) && float64(info.ModTime().UnixNano())/float64(time.Second)-1 <= seconds {
				return lines[1]
			}
			return ""
		}
		if dir == filepath.Dir(dir) {
			return ""
		}
	}
}

// isSum reports whether text is a SHA-256. The Hub's ETags of small files are Git hashes, which are shorter.
func isSum(text string) bool {
	_, err := hex.DecodeString(text)
	return err == nil && len(text) == 2*sha256.Size && text == strings.ToLower(text)
}

// compareHubSum compares a file with the SHA-256 that the Hub reported for it, and records the result in the report. If
// the SHA-256 is unknown, it does nothing. Memory use does not depend on the file's size.
func compareHubSum(ctx context.Context, j *job.Job, src source.Source, rep *Report, f *VerifiedFile) error {
	want := src.Facts().SHA256
	if path, local := source.Local(src.URI()); local {
		want = hubSum(path)
	}
	if want == "" {
		return nil
	}
	j.TotalBytes.Add(f.Bytes)
	sum := sha256.New()
	err := original.ReadBlocks(ctx, src, 0, src.Size(), func(b []byte) {
		avx.Clear()
		_, _ = sum.Write(b)
	})
	if err != nil {
		return err
	}
	if got := hex.EncodeToString(sum.Sum(nil)); got != want {
		return errs.Place("verify", src.URI(), "", -1, errs.New(errs.ErrCorrupt,
			"the file differs from the one on the Hub: its SHA-256 is %s, expected %s: download it again", got, want))
	}
	f.Checked, f.SHA256 = "contents", want
	rep.Bytes += f.Bytes
	j.Bytes.Add(f.Bytes)
	return nil
}

const formatGGUF = "gguf"

// openOrList describes the GGUF files among uris, and opens the others as a model. At first it looks for GGUF only in
// files with the GGUF extension, so most files are opened only once. The model is nil if all files are GGUF.
func openOrList(
	ctx context.Context, uris []string, access format.Access, unlisted bool,
) (*stored.Model, []InspectedFile, error) {
	dial := open.With(access.Options).OpenLike
	isGGUF := func(uri string) bool { return strings.HasSuffix(source.Name(uri), "."+formatGGUF) }
	files, others, err := listGGUFs(ctx, uris, dial, isGGUF)
	if err != nil || len(others) == 0 && len(files) > 0 {
		return nil, files, err
	}
	m, err := stored.OpenNamed(ctx, others, access, unlisted)
	if !errors.Is(err, errs.ErrFormat) {
		return m, files, err
	}
	more, others, fault := listGGUFs(ctx, others, dial, func(uri string) bool { return !isGGUF(uri) })
	switch files = append(files, more...); {
	case fault != nil:
		return nil, nil, fault
	case len(more) == 0:
		return nil, files, err
	case len(others) == 0:
		return nil, files, nil
	}
	m, err = stored.OpenNamed(ctx, others, access, unlisted)
	return m, files, err
}

// listGGUFs describes the GGUF files for which may returns true, and lists the others, including unreadable files.
func listGGUFs(
	ctx context.Context, uris []string, dial format.Opener, may func(uri string) bool,
) (files []InspectedFile, others []string, err error) {
	for _, uri := range uris {
		if may(uri) {
			if file, is, err := inspectGGUF(ctx, uri, dial); is && err != nil {
				return nil, nil, err
			} else if is {
				files = append(files, file)
				continue
			}
		}
		others = append(others, uri)
	}
	return files, others, nil
}

// inspectGGUF describes a GGUF file. is reports whether the file begins like a GGUF file.
func inspectGGUF(ctx context.Context, uri string, dial format.Opener) (file InspectedFile, is bool, err error) {
	src, err := dial(ctx, uri, source.Outline{})
	if err != nil {
		return file, false, err
	}
	defer src.Close()
	head, err := source.Head(ctx, src)
	if err != nil || !gguf.Is(head) {
		return file, false, err
	}
	h, err := gguf.ReadHeader(ctx, src)
	if err == nil {
		err = source.Unwritten(src)
	}
	file = InspectedFile{
		URI: errs.RedactURI(uri), Format: formatGGUF, Size: src.Size(), Header: h.Header, Metadata: h.Metadata,
		Tensors: make([]InspectedTensor, len(h.Tensors)), opened: uri,
	}
	for i, t := range h.Tensors {
		shape := t.Shape
		if shape == nil {
			shape = []int64{}
		}
		size, coding := t.Bytes, "plain"
		if size == gguf.Unsized {
			size, coding = 0, CodingUnknown
		}
		file.Tensors[i] = InspectedTensor{
			Name: t.Name, DType: t.Type, Shape: shape, Bytes: size, Stored: size, Ratio: 1, Coding: coding,
		}
	}
	return file, true, err
}

// IsUnknown reports whether a dtype is an unknown GGUF type. The sizes of such tensors are unknown.
func IsUnknown(dtype string) bool { return strings.HasSuffix(dtype, gguf.NotKnown) }
