package safetensors

// This file reads model.safetensors.index.json.

import (
	"bytes"
	"maps"
	"path/filepath"
	"slices"
	"sort"
	"strconv"
	"strings"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/tensor"
)

// Shards is the contents of a model.safetensors.index.json, which lists the file of each tensor of a sharded model.
type Shards struct {
	Files     []string // sorted file names in the folder of the index
	Weights   []Weight // in the order of the index
	TotalSize int64    // bytes of all tensors, or -1 if unknown
	// Metadata holds the other entries of "metadata". Each value is JSON text.
	Metadata map[string]string
}

// A Weight is a tensor: its name, and the number of its file in Shards.Files.
type Weight struct {
	Name string
	File int
}

// ReadIndexJSON parses and checks an index. File names must refer to files in the index's own folder, without a path,
// "..", drive, scheme or NUL; a leading "./" is dropped. A tensor must not occur twice. Invalid input is
// errs.ErrFormat.
func ReadIndexJSON(uri string, b []byte) (Shards, error) {
	if len(b) > tensor.MaxHeader {
		return Shards{}, locateError(uri, "", 0, errs.New(errs.ErrFormat,
			"the index.json has %d bytes, but at most %d are allowed", len(b), tensor.MaxHeader))
	}
	r := shardReader{parser: parser{scanner: scanner{b: b}}, files: map[string]int{}, out: Shards{TotalSize: -1}}
	if i := invalidUTF8(b); i >= 0 {
		return Shards{}, locateError(uri, "", int64(i), errs.New(errs.ErrFormat, "the index.json is not UTF-8"))
	}
	if !r.readIndex() {
		return Shards{}, locateError(uri, r.tensor, int64(r.bad), r.err)
	}
	out := r.out
	// Sort the files, so that a source's number does not depend on the order in the JSON.
	files := slices.Clone(out.Files)
	slices.Sort(files)
	place := make([]int, len(files))
	for i, name := range files {
		place[r.files[name]] = i
	}
	for i := range out.Weights {
		out.Weights[i].File = place[out.Weights[i].File]
	}
	out.Files = files
	return out, nil
}

type shardReader struct {
	parser
	files map[string]int
	out   Shards
	seen  map[string]struct{}
}

func (r *shardReader) readIndex() bool {
	weights := false
	base := len(r.keys)
	for more := r.openList('{', '}'); more; more = r.hasMore('}') {
		key, ok := r.readKey()
		if !ok {
			return false
		}
		name := string(key)
		if !r.takeByte(':') {
			return false
		}
		switch name {
		case "metadata":
			ok = r.readMetadata()
		case "weight_map":
			if weights {
				return r.failWith("duplicate key %q", name)
			}
			weights, ok = true, r.readWeights()
		default:
			ok = r.skipValue(2)
		}
		if !ok {
			return false
		}
	}
	if r.err != nil || !r.checkDistinct(base) {
		return false
	}
	if r.space() != 0 || r.p < len(r.b) {
		return r.failWith("bytes after the index's object")
	}
	if !weights {
		return r.failWith("missing field `weight_map`")
	}
	return true
}

func (r *shardReader) readMetadata() bool {
	if r.space() != '{' {
		return r.skipValue(2) // some exporters write null
	}
	if r.out.Metadata != nil {
		return r.failWith("duplicate key \"metadata\"")
	}
	r.out.Metadata = map[string]string{}
	said := false
	for more := r.openList('{', '}'); more; more = r.hasMore('}') {
		key, ok := r.readString()
		if !ok {
			return false
		}
		name := string(key)
		if _, twice := r.out.Metadata[name]; twice || said && name == "total_size" {
			return r.failWith("duplicate key %q", name)
		}
		if !r.takeByte(':') {
			return false
		}
		r.space()
		from := r.p
		if !r.skipValue(3) {
			return false
		}
		text := string(r.b[from:r.p])
		if name == "total_size" {
			said, r.out.TotalSize = true, readTotal(text)
		} else {
			r.out.Metadata[name] = text
		}
		if len(r.out.Metadata) > maxMetadata {
			return r.failWith("more than %d entries of metadata", maxMetadata)
		}
	}
	return r.err == nil
}

// readTotal reads total_size, which some writers write as a float. It is only informative, so an invalid value is -1.
func readTotal(text string) int64 {
	if n, err := strconv.ParseInt(text, 10, 64); err == nil && n >= 0 {
		return n
	}
	if f, err := strconv.ParseFloat(text, 64); err == nil && f >= 0 && f < 1<<62 {
		return int64(f)
	}
	return -1
}

func (r *shardReader) readWeights() bool {
	r.seen = map[string]struct{}{}
	for more := r.openList('{', '}'); more; more = r.hasMore('}') {
		key, ok := r.readString()
		if !ok {
			return false
		}
		r.tensor = r.internName(key)
		r.seen[r.tensor] = struct{}{}
		if len(r.seen) != len(r.out.Weights)+1 {
			return r.failWith("the index lists this tensor twice")
		}
		if !r.takeByte(':') {
			return false
		}
		file, ok := r.readString()
		if !ok {
			return false
		}
		for bytes.HasPrefix(file, here) {
			file = file[len(here):]
		}
		n, isKnown := r.files[string(file)]
		if !isKnown {
			if why := notSibling(string(file)); why != "" {
				return r.failWith("file name %q %s", errs.RedactURI(string(file)), why)
			}
			n = len(r.out.Files)
			r.files[string(file)] = n
			r.out.Files = append(r.out.Files, string(file))
		}
		r.out.Weights = append(r.out.Weights, Weight{r.tensor, n})
	}
	r.tensor, r.seen = "", nil
	return r.err == nil
}

// here is an optional prefix of file names in an index.
var here = []byte("./")

// notSibling returns why name is not the name of a file in the index's folder, or "".
func notSibling(name string) string {
	switch {
	case name == "" || name == ".":
		return "is empty"
	case strings.ContainsAny(name, `/\`):
		return "is not directly in the index's folder"
	case strings.ContainsAny(name, "\x00:"):
		return "contains a NUL or a colon"
	case !filepath.IsLocal(name):
		return "is not local"
	}
	return ""
}

// Select returns the tensors that an index lists, each from the file that it names. Files[i] is source i of ix. Other
// tensors in the files do not belong to the model. A tensor that is missing from its file gives errs.ErrFormat.
func (s *Shards) Select(ix *tensor.Index) (*tensor.Index, error) {
	if len(ix.Sources) != len(s.Files) {
		return nil, errs.New(errs.ErrArgument, "got %d files, but the index names %d", len(ix.Sources), len(s.Files))
	}
	find, isListed := ix.Finder(), make([]bool, len(ix.Tensors))
	for _, w := range s.Weights {
		i := find(w.File, w.Name)
		if i < 0 {
			return nil, locateError(ix.Sources[w.File].URI, w.Name, -1,
				errs.New(errs.ErrFormat, "the index.json lists this tensor, but it is not in the file"))
		}
		isListed[i] = true
	}
	if len(s.Weights) == len(ix.Tensors) {
		return ix, nil
	}
	return ix.Select(isListed)
}

// Only returns an index of the files that contain one of the named tensors, with all tensors in these files. If the
// index lacks a name, the result has all files.
func (s *Shards) Only(names []string) Shards {
	wanted := make(map[string]bool, len(names)) // true once found
	for _, name := range names {
		wanted[name] = false
	}
	missing := len(wanted)
	has := make([]bool, len(s.Files))
	for _, w := range s.Weights {
		if met, ok := wanted[w.Name]; ok {
			has[w.File] = true
			if !met {
				wanted[w.Name] = true
				missing--
			}
		}
	}
	if missing > 0 {
		return *s
	}
	few := Shards{TotalSize: s.TotalSize, Metadata: s.Metadata}
	place := make([]int, len(s.Files))
	for i, name := range s.Files {
		if has[i] {
			place[i] = len(few.Files)
			few.Files = append(few.Files, name)
		}
	}
	for _, w := range s.Weights {
		if has[w.File] {
			few.Weights = append(few.Weights, Weight{w.Name, place[w.File]})
		}
	}
	return few
}

// AppendIndexJSON appends an index in the format of transformers: indented by two spaces, with sorted names and a
// final newline. Names must be UTF-8.
func AppendIndexJSON(dst []byte, s Shards) []byte {
	about := map[string]string{}
	maps.Copy(about, s.Metadata)
	if s.TotalSize >= 0 {
		about["total_size"] = strconv.FormatInt(s.TotalSize, 10)
	}
	dst = append(dst, "{\n  \"metadata\": {"...)
	for i, key := range slices.Sorted(maps.Keys(about)) {
		dst = appendLine(dst, i, key)
		dst = append(dst, about[key]...)
	}
	dst = closeLines(dst, len(about))
	dst = append(dst, ",\n  \"weight_map\": {"...)
	weights := slices.Clone(s.Weights)
	sort.Slice(weights, func(i, k int) bool { return weights[i].Name < weights[k].Name })
	for i, w := range weights {
		dst = appendLine(dst, i, w.Name)
		dst = AppendString(dst, s.Files[w.File])
	}
	return append(closeLines(dst, len(weights)), "\n}\n"...)
}

func appendLine(dst []byte, i int, key string) []byte {
	if i > 0 {
		dst = append(dst, ',')
	}
	dst = append(dst, "\n    "...)
	return append(AppendString(dst, key), ": "...)
}

func closeLines(dst []byte, n int) []byte {
	if n > 0 {
		dst = append(dst, "\n  "...)
	}
	return append(dst, '}')
}
