package save

// This file divides a model into shards and names them.

import (
	"fmt"
	"path/filepath"
	"strings"
	"unicode/utf8"

	"github.com/overwire/overwire/gosrc/format/safetensors"
)

// extension is kept at the end of shard names; it is appended if the path lacks it.
const extension = ".safetensors"

// divideShards divides tensors, in their given order, into files of at most spec.Shard
// bytes. Aliases go to the file that has their bytes.
func divideShards(spec Spec, items []*item) []outputFile {
	if spec.Shard == 0 {
		return []outputFile{{path: spec.Path, metadata: spec.Metadata, items: items}}
	}
	in := map[*item]int{} // shard of each tensor that has bytes
	n, size := 1, int64(0)
	for _, t := range items {
		if t.form == alias {
			continue
		}
		if size > 0 && t.bytes > spec.Shard-size {
			n, size = n+1, 0
		}
		in[t] = n - 1
		size += t.bytes
	}
	parts := make([]outputFile, n)
	for k := range parts {
		parts[k].metadata = spec.Metadata
	}
	for _, t := range items {
		k := in[t]
		if t.form == alias {
			k = in[t.of]
		}
		parts[k].items = append(parts[k].items, t)
	}
	return nameParts(spec.Path, parts)
}

// nameParts gives one part the path itself, and several the names of its shards, with an
// index.
func nameParts(path string, parts []outputFile) []outputFile {
	if len(parts) == 1 {
		parts[0].path = path
		return parts
	}
	dir, stem := stemOf(path)
	for k := range parts {
		parts[k].path = joinName(dir, fmt.Sprintf("%s-%05d-of-%05d%s", stem, k+1, len(parts), extension))
	}
	return append(parts, indexOf(indexPath(path), shardIndex(parts), parts))
}

func stemOf(path string) (dir, stem string) {
	dir, name := filepath.Split(path)
	return dir, strings.TrimSuffix(name, extension)
}

// indexPath is the path of the index of a path's shards.
func indexPath(path string) string {
	dir, stem := stemOf(path)
	return joinName(dir, stem+extension+".index.json")
}

// checkListable refuses files whose names no index.json can list: JSON is UTF-8.
func checkListable(parts []outputFile) error {
	if last := parts[len(parts)-1]; !strings.HasSuffix(last.path, ".index.json") {
		return nil
	}
	for _, p := range parts[:len(parts)-1] {
		if name := filepath.Base(p.path); !p.copied && !utf8.ValidString(name) {
			return badArgument(p.path, "",
				"the name is not UTF-8, and an index.json lists shards as UTF-8: choose another name, or save one file")
		}
	}
	return nil
}

// shardIndex lists some files.
func shardIndex(parts []outputFile) *safetensors.Shards {
	s := &safetensors.Shards{}
	for k, p := range parts {
		s.Files = append(s.Files, filepath.Base(p.path))
		for _, t := range p.items {
			s.TotalSize += t.bytes
			s.Weights = append(s.Weights, safetensors.Weight{Name: t.name, File: k})
		}
		if p.laid != nil {
			s.TotalSize += p.laid.Tensors
			for _, name := range p.laid.Names {
				s.Weights = append(s.Weights, safetensors.Weight{Name: name, File: k})
			}
		}
	}
	return s
}
