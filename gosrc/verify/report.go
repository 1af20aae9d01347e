package verify

// This file defines the reports of Verify and Inspect.

import (
	"fmt"
	"slices"
	"strings"

	"github.com/overwire/overwire/gosrc/codec"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/save/original"
	"github.com/overwire/overwire/gosrc/stored"
	"github.com/overwire/overwire/gosrc/tensor"
)

// A Report describes what was verified. After an error, its counts cover what was verified before the error.
type Report struct {
	OK      bool           `json:"ok"`
	Tensors int            `json:"tensors"` // verified tensors, including aliases
	Bytes   int64          `json:"bytes"`   // tensor bytes, decoded and hashed
	Stored  int64          `json:"stored"`  // bytes of the files
	Seconds float64        `json:"seconds"`
	Files   []VerifiedFile `json:"files"`
	Note    string         `json:"note,omitempty"` // what could not be verified
}

// A VerifiedFile is one file of a Report.
type VerifiedFile struct {
	URI     string `json:"uri"`
	Format  string `json:"format"`  // as in InspectedFile
	Checked string `json:"checked"` // "contents": every byte; "structure": header and sizes
	Tensors int    `json:"tensors"`
	Bytes   int64  `json:"bytes"`
	Stored  int64  `json:"stored"`
	// SHA256 is the Hub's SHA-256 of the file, if the download recorded it and the file matches.
	SHA256 string `json:"sha256,omitempty"`
	// Original describes the plain file that the container was made from, if its verification was requested.
	Original *original.Summary `json:"original,omitempty"`
}

// addFile adds a GGUF file after a check of its structure. compare compares the file with a known hash, if there is
// one, and then sets Checked.
func (rep *Report) addFile(file InspectedFile, compare func(*VerifiedFile) error) error {
	const note = "GGUF files have no checksums: only their structure was verified"
	v := VerifiedFile{URI: file.URI, Format: file.Format, Checked: "structure", Stored: file.Size}
	var unknown []string
	for i := range file.Tensors {
		t := &file.Tensors[i]
		v.Bytes += t.Bytes
		if t.Coding == CodingUnknown {
			unknown = append(unknown, fmt.Sprintf("%q (%s)", t.Name, t.DType))
		}
	}
	v.Tensors = len(file.Tensors) - len(unknown)
	if err := compare(&v); err != nil {
		return err
	}
	rep.Files = append(rep.Files, v)
	rep.Tensors += v.Tensors
	rep.Stored += v.Stored
	if v.Checked == "structure" && !strings.Contains(rep.Note, note) {
		rep.Note = strings.TrimPrefix(rep.Note+"; "+note, "; ")
	}
	if n := len(unknown); n > 0 {
		rep.Note += fmt.Sprintf("; %s: %d of %d tensors have types that are unknown to this version, and were not "+
			"verified, e.g. %s", file.URI, n, len(file.Tensors), unknown[0])
	}
	return nil
}

// A Copy is a plain file in memory that was made from a file or folder of another library.
type Copy struct {
	Kind  string `json:"kind"`  // the library's format
	Bytes int64  `json:"bytes"` // size of the original file, or of the files in the folder
	// Compared says that the checksums of all bytes of the original were compared when the copy was made.
	Compared bool    `json:"compared"`
	Seconds  float64 `json:"seconds"` // time to make the copy
}

// Copies describes copies by their paths.
type Copies map[string]Copy

// byURI returns the copies by the URIs that reports have.
func (c Copies) byURI() Copies {
	out := make(Copies, len(c))
	for path, one := range c {
		out[errs.RedactURI(path)] = one
	}
	return out
}

// DescribeOriginals replaces facts about copies by those of the originals.
func (rep *Report) DescribeOriginals(copies Copies) {
	copies = copies.byURI()
	isPlain := false
	for i := range rep.Files {
		f := &rep.Files[i]
		c, ok := copies[f.URI]
		if ok {
			rep.Stored += c.Bytes - f.Stored
			rep.Seconds += c.Seconds
			f.Format, f.Stored = c.Kind, c.Bytes
		}
		if ok && c.Compared && f.Checked == "structure" {
			f.Checked = "contents"
			rep.Bytes += f.Bytes
		}
		isPlain = isPlain || f.Checked == "structure" && f.Format != formatGGUF
	}
	if !isPlain {
		rep.Note = strings.TrimPrefix(strings.TrimPrefix(rep.Note, plainNote), "; ")
	}
}

// DescribeOriginals works like Report.DescribeOriginals.
func (in *Inspection) DescribeOriginals(copies Copies) {
	copies = copies.byURI()
	for i := range in.Sources {
		if c, ok := copies[in.Sources[i].URI]; ok {
			in.Sources[i].Format, in.Sources[i].Size = c.Kind, c.Bytes
		}
	}
}

// plainNote is the note for plain files.
const plainNote = "plain files have no checksums: only their structure was verified"

// An Inspection is the result of Inspect: the contents of headers and indexes.
type Inspection struct {
	Sources []InspectedFile `json:"sources"`
	// Totals has one entry per dtype, and "all" for the sum.
	Totals map[string]*stored.Total `json:"totals"`
}

// KeepTensors drops all tensors except those with wanted names, and recomputes the totals.
func (in *Inspection) KeepTensors(wanted func(name string) bool) {
	for i := range in.Sources {
		f := &in.Sources[i]
		f.Tensors = slices.DeleteFunc(f.Tensors, func(t InspectedTensor) bool { return !wanted(t.Name) })
	}
	in.sumUp()
}

func (in *Inspection) sumUp() {
	in.Totals = map[string]*stored.Total{"all": {}}
	for i := range in.Sources {
		for _, t := range in.Sources[i].Tensors {
			if in.Totals[t.DType] == nil {
				in.Totals[t.DType] = &stored.Total{}
			}
			for _, sum := range []*stored.Total{in.Totals["all"], in.Totals[t.DType]} {
				sum.Add(t.Bytes, t.Stored)
			}
		}
	}
}

// An InspectedFile is one file of an Inspection.
type InspectedFile struct {
	URI      string            `json:"uri"`
	Format   string            `json:"format"` // "overwire", "safetensors", "tensors", "gguf", or another kind
	Size     int64             `json:"size"`
	Header   int64             `json:"header"` // bytes before the data section
	Metadata map[string]string `json:"metadata"`
	Tensors  []InspectedTensor `json:"tensors"`

	opened string // the URI that opens it
}

// CodingUnknown is the coding of a tensor of unknown type. Its bytes are reported as 0.
const CodingUnknown = "unknown"

// An InspectedTensor is one tensor. Coding is how its bytes are stored: "plain", "alias", "encrypted" or "zeros" (not
// stored) in .tensors files, "unknown" in GGUF files, or the codec and transform of its chunks, such as "X16/bf16",
// with "+raw" if some chunks are stored raw.
type InspectedTensor struct {
	Name    string  `json:"name"`
	DType   string  `json:"dtype"`
	Shape   []int64 `json:"shape"`
	Bytes   int64   `json:"bytes"`
	Stored  int64   `json:"stored"`
	Ratio   float64 `json:"ratio"`
	Coding  string  `json:"coding"`
	Chunks  int     `json:"chunks"`
	Parts   int     `json:"parts,omitempty"`
	AliasOf string  `json:"alias_of,omitempty"`
}

// addModel adds the files and tensors of a model.
func (in *Inspection) addModel(m *stored.Model) {
	first := len(in.Sources)
	for k := range m.Index.Sources {
		s := &m.Index.Sources[k]
		in.Sources = append(in.Sources, InspectedFile{URI: errs.RedactURI(s.URI), Format: s.Format, Size: s.Size,
			Header: s.Data, Metadata: m.Metadata(k), Tensors: []InspectedTensor{}})
	}
	files := in.Sources[first:]
	for i := range m.Index.Tensors {
		t := &m.Index.Tensors[i]
		f := &files[t.Source]
		it := InspectedTensor{Name: t.Name, DType: t.DType.String(), Shape: t.Shape, Bytes: t.Bytes,
			Stored: t.Stored, Ratio: stored.Ratio(t.Stored, t.Bytes), Coding: codingOf(m, t), Chunks: int(t.Count),
			Parts: int(t.Parts)}
		if it.Shape == nil {
			it.Shape = []int64{}
		}
		if t.Alias >= 0 {
			it.AliasOf = m.Index.Tensors[t.Alias].Name
		}
		f.Tensors = append(f.Tensors, it)
	}
}

func codingOf(m *stored.Model, t *tensor.Tensor) string {
	if t.Alias >= 0 {
		return "alias"
	}
	if coding := m.Sources[t.Source].Facts().Coding; coding != nil {
		return coding(t.Off)
	}
	return codec.Names(m.Index.Chunks[t.First : t.First+t.Count])
}
