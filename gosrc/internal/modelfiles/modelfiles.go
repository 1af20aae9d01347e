// Package modelfiles parses the names of weights: a single file, the shards of a
// family, variants, and the index.json of shards.
//
//	model.safetensors                          a single file
//	model-00001-of-00004.safetensors           a shard
//	model.safetensors.index.json               the index of shards
//	model.fp16.safetensors                     a variant, for stems that libraries have them of,
//	model.fp16-00001-of-00004.safetensors      its shards,
//	model-00001-of-00004.fp16.safetensors      the same in another writing,
//	model.safetensors.index.fp16.json          and their index
//	model-ow0123abcd-00001-of-00004.safetensors  a shard of a save over an earlier set
package modelfiles

import (
	"crypto/rand"
	"encoding/hex"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

const (
	// Extension ends the names of weights.
	Extension = ".safetensors"
	// IndexSuffix ends the names of indexes, after the name of the file that they divide.
	IndexSuffix = ".index.json"
)

// withVariants are the base names for which libraries write variants (fp16), which are
// separate models. In other base names, a dot is part of the name.
var withVariants = []string{"model", "diffusion_pytorch_model"}

// A Name is the parsed name of a weights file or an index.
type Name struct {
	Stem       string
	Variant    string // "": the default one
	Number, Of int    // of a shard; Of is 0 for a single file
	Marked     bool   // see Mark
	Index      bool
}

var (
	indexName = regexp.MustCompile(`^(.+)\.safetensors(?:\.([^.]+))?\.index(?:\.([^.]+))?\.json$`)
	shardName = regexp.MustCompile(`^(.*)-(\d{1,9})-of-(\d{1,9})(?:\.([^.]+))?$`)
	partName  = regexp.MustCompile(`^shard-\d{1,9}-model-\d{1,9}-of-\d{1,9}\.safetensors$`)
	markedEnd = regexp.MustCompile(`-ow[0-9a-f]{8}$`)
)

// ParseName parses a name. ok is false for names of other files, and for hidden ones.
func ParseName(name string) (n Name, ok bool) {
	if strings.HasPrefix(name, ".") {
		return n, false
	}
	if m := indexName.FindStringSubmatch(name); m != nil {
		n = stemOf(m[1])
		n.Index = true
		if n.Variant == "" {
			n.Variant = m[2] + m[3]
		}
		return n, true
	}
	base, ok := strings.CutSuffix(name, Extension)
	if !ok {
		return n, false
	}
	if m := shardName.FindStringSubmatch(base); m != nil {
		shard := stemOf(m[1])
		shard.Number, _ = strconv.Atoi(m[2])
		shard.Of, _ = strconv.Atoi(m[3])
		if m[4] != "" && shard.Variant == "" {
			shard.Variant = m[4]
		}
		if shard.Of > 0 && (m[4] == "" || slices.Contains(withVariants, shard.Stem)) {
			return shard, true
		}
	}
	return stemOf(base), true
}

// IsPart reports whether a name is that of a file of torch's HuggingFaceStorageWriter that holds
// parts of tensors: shard-RANK-model-FILE-of-FILES.safetensors.
func IsPart(name string) bool { return partName.MatchString(name) }

// stemOf removes the mark and the variant from a stem.
func stemOf(base string) (n Name) {
	n.Marked = markedEnd.MatchString(base)
	n.Stem = markedEnd.ReplaceAllString(base, "")
	for _, stem := range withVariants {
		if variant, ok := strings.CutPrefix(n.Stem, stem+"."); ok && variant != "" {
			n.Stem, n.Variant = stem, variant
		}
	}
	return n
}

// Mark returns a new mark. A save over an earlier set marks the names of its files, so that
// none has the name of an old one, and both sets are complete until the index is replaced.
// Without an index that lists it, a marked file belongs to no model.
func Mark() string {
	var r [4]byte
	_, _ = rand.Read(r[:]) // cannot fail
	return "-ow" + hex.EncodeToString(r[:])
}

// WithMark returns the name with another mark, or without one.
func WithMark(name, mark string) string {
	stem, rest, ok := divideName(name)
	if !ok {
		return name
	}
	return stem + mark + rest
}

// Family returns what tells the files of one model from others: their names without
// mark, number and extension. A variant has the same family in both spellings.
func Family(name string) string {
	stem, rest, ok := divideName(name)
	if !ok {
		return name
	}
	if n, _ := ParseName(stem + Extension); n.Variant == "" {
		if n, _ = ParseName(stem + rest); n.Variant != "" {
			return stem + "." + n.Variant
		}
	}
	return stem
}

// divideName splits the name of a weights file at its mark.
func divideName(name string) (stem, rest string, ok bool) {
	n, ok := ParseName(name)
	if !ok || n.Index {
		return name, "", false
	}
	base := strings.TrimSuffix(name, Extension)
	stem = base
	if m := shardName.FindStringSubmatch(base); m != nil && n.Of > 0 {
		stem = m[1]
	}
	return markedEnd.ReplaceAllString(stem, ""), name[len(stem):], true
}
