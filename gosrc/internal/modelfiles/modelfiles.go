// Package modelfiles parses the names of weights: single files, shards, variants, and the index.json of shards.
//
// model.safetensors a single file model-00001-of-00004.safetensors a shard model.safetensors.index.json the index of
// shards model.fp16.safetensors a variant, for the base names in withVariants model.fp16-00001-of-00004.safetensors a
// shard of a variant model-00001-of-00004.fp16.safetensors the same in another spelling
// model.safetensors.index.fp16.json the index of a variant model-ow0123abcd-00001-of-00004.safetensors a shard of a
// save over an earlier set
package modelfiles

import (
	"crypto/rand"
	"encoding/hex"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
)

const (
	// Extension is the suffix of weights files.
	Extension = ".safetensors"
	// IndexSuffix is the suffix of indexes, after the name of the file that is divided into shards.
	IndexSuffix = ".index.json"
)

// withVariants are the base names for which libraries write variants (fp16), which are separate models. In
// other names, a dot is part of the base name.
var withVariants = []string{"model", "diffusion_pytorch_model"}

// A Name is the parsed name of a weights file or an index.
type Name struct {
	Stem       string
	Variant    string // "" means the default variant
	Number, Of int    // number of a shard and number of shards; 0 for a single file
	Marked     bool   // see Mark
	Index      bool
}

var (
	indexName = newMatcher(".index", `^(.+)\.safetensors(?:\.([^.]+))?\.index(?:\.([^.]+))?\.json$`)
	shardName = newMatcher("-of-", `^(.*)-(\d{1,9})-of-(\d{1,9})(?:\.([^.]+))?$`)
	partName  = newMatcher("shard-", `^shard-\d{1,9}-model-\d{1,9}-of-\d{1,9}\.safetensors$`)
)

// newMatcher returns a function that returns the groups of a pattern in a name, or nil. It compiles the pattern for the
// first name with the given part, so that loads of single files do not wait for it.
func newMatcher(part, pattern string) func(name string) []string {
	regex := sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(pattern) })
	return func(name string) []string {
		if !strings.Contains(name, part) {
			return nil
		}
		return regex().FindStringSubmatch(name)
	}
}

// ParseName parses a name. ok is false for other files and for hidden files.
func ParseName(name string) (n Name, ok bool) {
	if strings.HasPrefix(name, ".") {
		return n, false
	}
	if m := indexName(name); m != nil {
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
	if m := shardName(base); m != nil {
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

// IsPart reports whether a file contains parts of tensors, according to its name. torch's
// HuggingFaceStorageWriter writes such files as shard-RANK-model-FILE-of-FILES.safetensors.
func IsPart(name string) bool { return partName(name) != nil }

// stemOf removes the mark and the variant from a base name.
func stemOf(base string) (n Name) {
	n.Stem, n.Marked = cutMark(base)
	for _, stem := range withVariants {
		if variant, ok := strings.CutPrefix(n.Stem, stem+"."); ok && variant != "" {
			n.Stem, n.Variant = stem, variant
		}
	}
	return n
}

// Mark returns a new mark. A save over an earlier set adds a mark to the names of its files, so that they
// differ from the old names and both sets are complete until the index is replaced. A marked file that no index
// lists belongs to no model.
func Mark() string {
	var r [4]byte
	_, _ = rand.Read(r[:]) // cannot fail
	return "-ow" + hex.EncodeToString(r[:])
}

// WithMark returns the name with the given mark, or without a mark if it is "".
func WithMark(name, mark string) string {
	stem, rest, ok := divideName(name)
	if !ok {
		return name
	}
	return stem + mark + rest
}

// Family returns what the names of one model's files have in common: the name without mark, number and
// extension. The family of a variant is the same in both spellings.
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
	if m := shardName(base); m != nil && n.Of > 0 {
		stem = m[1]
	}
	rest = name[len(stem):]
	stem, _ = cutMark(stem)
	return stem, rest, true
}

// cutMark removes the mark from a base name.
func cutMark(base string) (stem string, ok bool) {
	at := strings.LastIndex(base, "-ow")
	if at < 0 || len(base) != at+len("-ow01234567") || strings.Trim(base[at+len("-ow"):], "0123456789abcdef") != "" {
		return base, false
	}
	return base[:at], true
}
