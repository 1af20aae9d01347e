package save

// This file divides a model into files and names them.

import (
	"fmt"
	"path/filepath"

	"github.com/overwire/overwire/gosrc/format/safetensors"
	"github.com/overwire/overwire/gosrc/save/original"
	"github.com/overwire/overwire/gosrc/save/publish"
)

// A File is one file that a save writes. It contains either Items or the Content of publish.File.
type File struct {
	publish.File
	Metadata map[string]string
	Items    []*Item
	Original *original.File // the plain file with exactly these tensors and metadata, if known
}

// estimate sets the sizes that the publication needs.
func (f *File) estimate() {
	f.Most = 256 << 20 // maximum size of header and index
	if f.Content != nil {
		f.Expected = float64(f.Content.Bytes)
		f.Most += f.Content.Bytes
	}
	for _, t := range f.Items {
		switch t.form {
		case plain:
			f.Expected += float64(t.bytes)
		case compressed:
			f.Expected += float64(t.bytes) * t.expect * 0.97
		}
		f.Most += t.bytes + t.bytes/128 + 8192 // data may be aligned to a page
	}
}

// divideShards divides tensors, in the given order, into files of at most `most` bytes (0 means no limit). An alias is
// in the same file as its bytes.
func divideShards(path string, most int64, metadata map[string]string, items []*Item) []File {
	if most == 0 {
		return []File{{File: publish.File{Path: path}, Metadata: metadata, Items: items}}
	}
	in := map[*Item]int{} // the shard of each tensor, except aliases
	n, size := 1, int64(0)
	for _, t := range items {
		if t.form == alias {
			continue
		}
		if size > 0 && t.bytes > most-size {
			n, size = n+1, 0
		}
		in[t] = n - 1
		size += t.bytes
	}
	files := make([]File, n)
	for k := range files {
		files[k].Metadata = metadata
	}
	for _, t := range items {
		k := in[t]
		if t.form == alias {
			k = in[t.of]
		}
		files[k].Items = append(files[k].Items, t)
	}
	return NameFiles(path, files)
}

// NameFiles names the files of a model. A single file gets the path; several get shard names, and an index is added.
func NameFiles(path string, files []File) []File {
	if len(files) == 1 {
		files[0].Path = path
		return files
	}
	dir, stem := publish.SplitStem(path)
	for k := range files {
		files[k].Path = publish.JoinName(dir, fmt.Sprintf("%s-%05d-of-%05d%s", stem, k+1, len(files),
			publish.Extension))
	}
	return AddIndex(publish.IndexPath(path), files)
}

// AddIndex adds an index.json that lists files as its shards.
func AddIndex(path string, files []File) []File {
	s := &safetensors.Shards{}
	for k := range files {
		f := &files[k]
		f.Shard = true
		s.Files = append(s.Files, filepath.Base(f.Path))
		for _, t := range f.Items {
			s.TotalSize += t.bytes
			s.Weights = append(s.Weights, safetensors.Weight{Name: t.name, File: k})
		}
		if f.Content != nil {
			s.TotalSize += f.Content.Tensors
			for _, name := range f.Content.Names {
				s.Weights = append(s.Weights, safetensors.Weight{Name: name, File: k})
			}
		}
	}
	return append(files, File{File: publish.IndexOf(path, s)})
}
