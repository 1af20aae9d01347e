package save

// This file cuts a model into shards and names them.

import (
	"fmt"
	"path/filepath"
	"strings"
	"unicode/utf8"

	"github.com/overwire/overwire/gosrc/format/safetensors"
)

// extension is what shard names keep at their end; a path without it gets it
// appended to its shards' names.
const extension = ".safetensors"

// shards cuts tensors, in their given order, into files of at most spec.Shard
// bytes. Aliases go where their bytes are. What fits in one file is one file,
// under the path itself.
func shards(spec Spec, items []*item) []part {
	one := []part{{path: spec.Path, metadata: spec.Metadata, items: items}}
	if spec.Shard == 0 {
		return one
	}
	in := map[*item]int{} // shard of each tensor with bytes of its own
	n, size := 0, int64(0)
	for _, t := range items {
		if t.form == alias {
			continue
		}
		if size > 0 && t.bytes > spec.Shard-size {
			n, size = n+1, 0
		}
		in[t] = n
		size += t.bytes
	}
	if n == 0 {
		return one
	}
	n++
	dir, stem := stemOf(spec.Path)
	parts := make([]part, n, n+1)
	for k := range parts {
		parts[k].path = join(dir, fmt.Sprintf("%s-%05d-of-%05d%s", stem, k+1, n, extension))
		parts[k].metadata = spec.Metadata
	}
	for _, t := range items {
		k := in[t]
		if t.form == alias {
			k = in[t.of]
		}
		parts[k].items = append(parts[k].items, t)
	}
	return append(parts, part{
		path: indexPath(spec.Path),
		blob: shardIndex(parts, nil),
	})
}

func stemOf(path string) (dir, stem string) {
	dir, name := filepath.Split(path)
	return dir, strings.TrimSuffix(name, extension)
}

// indexPath is where the index of the shards of a path stands.
func indexPath(path string) string {
	dir, stem := stemOf(path)
	return join(dir, stem+extension+".index.json")
}

// listable refuses files whose names no index.json can list: JSON is UTF-8.
func listable(parts []part) error {
	if last := parts[len(parts)-1]; !strings.HasSuffix(last.path, ".index.json") {
		return nil
	}
	for _, p := range parts {
		if name := filepath.Base(p.path); p.blob == nil && !utf8.ValidString(name) {
			return badArgument(p.path, "", "the name is not UTF-8, and an index.json lists shards as UTF-8: choose another name, or save one file")
		}
	}
	return nil
}

// shardIndex is the index.json of some files; metadata are what a rewritten
// one said beside its total_size.
func shardIndex(parts []part, metadata map[string]string) []byte {
	s := safetensors.Shards{Metadata: metadata}
	for k, p := range parts {
		s.Files = append(s.Files, filepath.Base(p.path))
		for _, t := range p.items {
			s.TotalSize += t.bytes
			s.Weights = append(s.Weights, safetensors.Weight{Name: t.name, File: k})
		}
	}
	return safetensors.AppendIndexJSON(nil, s)
}
