package save

// This file has the verb Convert.

import (
	"context"
	"errors"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/overwire/overwire/gosrc/fault"
	"github.com/overwire/overwire/gosrc/format"
	"github.com/overwire/overwire/gosrc/format/safetensors"
	"github.com/overwire/overwire/gosrc/internal/atomicfile"
	"github.com/overwire/overwire/gosrc/internal/regular"
	"github.com/overwire/overwire/gosrc/job"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/source/open"
	"github.com/overwire/overwire/gosrc/tensor"
)

// maxCompanion is the size up to which other files of a folder (config.json,
// a tokenizer) are copied along.
const maxCompanion = 64 << 20

// Convert reads tensors from anything that can be opened (files, folders, an
// index.json; plain or compressed) and writes them as spec says, a window of
// chunks at a time: never the whole model in memory.
//
// When dst is a folder, every file keeps its name, its tensors and its
// metadata; an index.json is rewritten, and the other files of a source folder
// are copied, up to 64 MiB each; other weights must not be there. Otherwise all tensors go into the file dst
// (or its shards, if spec says so), with the metadata of all sources, the
// first one's where they differ. dst is a folder if it is one, if it ends in a
// slash, or if the source is a folder or has several files and dst does not end in
// .safetensors or .tensors. spec.Path is ignored; spec.Metadata are set over the sources'.
//
// Of one local folder the folders below it are converted and copied likewise: a
// diffusers pipeline stays one. What names them, the files of the folder itself,
// is written last.
//
// Converting a file onto itself is safe: it is read until the new one stands.
func Convert(ctx context.Context, j *job.Job, src []string, dst string, spec Spec) (Report, error) {
	start := time.Now()
	rep, err := convertAll(ctx, j, src, dst, spec)
	if err != nil {
		return Report{}, classed(ctx, err)
	}
	rep.Seconds = time.Since(start).Seconds()
	return rep, nil
}

func convertAll(ctx context.Context, j *job.Job, src []string, dst string, spec Spec) (Report, error) {
	spec.Path = dst
	if err := spec.check(); err != nil {
		return Report{}, err
	}
	dst = spec.Path // without its scheme
	if len(src) == 1 && !remote(dst) && isFolder(dst, src, 1) {
		dir := localPath(src[0])
		branches, err := format.Tree(dir, dst)
		if err != nil {
			return Report{}, err
		}
		if len(branches) > 1 && slices.ContainsFunc(branches, func(b format.Branch) bool { return b.Weights }) {
			return convertTree(ctx, j, dir, dst, branches, spec)
		}
	}
	return convertOne(ctx, j, src, dst, spec)
}

// convertOne converts what is opened as one model.
func convertOne(ctx context.Context, j *job.Job, src []string, dst string, spec Spec) (Report, error) {
	spec.Path = dst
	from := spec.Storage
	if more := formatOf(dst).settings; len(more) > 0 {
		more = maps.Clone(more)
		maps.Copy(more, from.Decrypt)
		from.Decrypt = more
	}
	m, err := openModel(ctx, src, from)
	if err != nil {
		return Report{}, err
	}
	defer m.close()
	w := newWriter(spec, j)
	items := m.items(w.threads)
	folder := isFolder(dst, src, len(m.srcs))
	if folder && len(spec.Storage.Encrypt) > 0 {
		return Report{}, badArgument(dst, "", "only single .tensors files are encrypted, not folders")
	}
	groups := [][]*item{items}
	if folder && spec.Shard == 0 {
		// Files stay what they are: aliases must not reach from one to another.
		groups = nil
		for k := range m.srcs {
			groups = append(groups, m.of(k, items))
		}
	}
	for _, g := range groups {
		if err := checkItems(dst, g); err != nil {
			return Report{}, err
		}
		if err := w.prepare(ctx, g); err != nil {
			return Report{}, err
		}
	}
	made := ""
	if folder {
		if made, err = makeFolder(dst); err != nil {
			return Report{}, err
		}
	}
	w.spec.Path = pathIn(folder, w.spec)
	parts, left, err := m.parts(ctx, w.spec, dst, src, folder, items)
	if err == nil && folder {
		err = alone(ctx, src, dst, w.spec, parts)
	}
	var rep Report
	if err == nil {
		rep, err = w.save(ctx, parts)
	}
	if err != nil && made != "" {
		_ = os.Remove(made)
	}
	rep.Left = left
	return rep, err
}

func (w *writer) prepare(ctx context.Context, items []*item) error {
	if !w.spec.Compress || !formatOf(w.spec.Path).coded {
		return nil
	}
	return w.classify(ctx, items)
}

// of returns the tensors of source k.
func (m *model) of(k int, items []*item) []*item {
	var out []*item
	for i, t := range items {
		if int(m.ix.Tensors[i].Source) == k {
			out = append(out, t)
		}
	}
	return out
}

// parts is what Convert writes, and left the files of source folders that it does not.
func (m *model) parts(
	ctx context.Context, spec Spec, dst string, src []string, folder bool, items []*item,
) (parts []part, left []string, err error) {
	all := map[string]string{}
	for k := range m.srcs {
		for key, v := range m.metadata(k) {
			if _, ok := all[key]; !ok {
				all[key] = v
			}
		}
	}
	switch {
	case !folder || spec.Shard > 0:
		maps.Copy(all, spec.Metadata)
		spec.Metadata = all
		parts = shards(spec, items)
	default:
		seen := map[string]bool{}
		for k, s := range m.srcs {
			name := filepath.Base(source.Path(localPath(s.URI())))
			if seen[name] {
				return nil, nil, badArgument(dst, "", "two sources are called %q", name)
			}
			seen[name] = true
			meta := m.metadata(k)
			if meta == nil {
				meta = map[string]string{}
			}
			maps.Copy(meta, spec.Metadata)
			parts = append(parts, part{path: join(dst, name), metadata: meta, items: m.of(k, items)})
		}
		if name, meta := indexOf(ctx, src, spec.Storage.Options); name != "" {
			parts = append(parts, part{path: join(dst, name), blob: shardIndex(parts, meta)})
		}
	}
	if !folder {
		return parts, nil, nil
	}
	others, left, err := companions(src, dst, parts)
	// What is beside the model comes first, what names it last.
	return append(others, parts...), left, err
}

// pathIn is the file that is written, or that shards have their names from.
func pathIn(folder bool, spec Spec) string {
	if folder {
		return join(spec.Path, "model"+extension)
	}
	return spec.Path
}

// alone refuses a folder that has other weights: opened later, it would be two
// models in one. Files of a source folder that is converted onto itself are
// allowed.
func alone(ctx context.Context, src []string, dst string, spec Spec, parts []part) error {
	ours := map[string]bool{}
	for _, p := range parts {
		ours[filepath.Base(p.path)] = true
	}
	others := func(name string) error {
		if !ours[name] && !strings.HasPrefix(name, ".") &&
			(strings.HasSuffix(name, extension) || strings.HasSuffix(name, extension+".index.json")) {
			return badArgument(dst, "", "the folder holds other weights (%s): choose an empty one", name)
		}
		return nil
	}
	if remote(dst) {
		names, err := open.List(ctx, dst, spec.Storage.Options)
		if errors.Is(err, fault.ErrNotFound) || errors.Is(err, fault.ErrNotSupported) {
			return nil
		}
		for i := 0; i < len(names) && err == nil; i++ {
			if err = others(filepath.Base(names[i])); slices.Contains(src, dst) {
				err = nil // converted onto itself
			}
		}
		return err
	}
	here, err := os.Stat(dst)
	if err != nil {
		return atomicfile.Failed(dst, -1, err)
	}
	for _, s := range src {
		if st, err := os.Stat(localPath(s)); err == nil && os.SameFile(st, here) && spec.Shard == 0 {
			return nil
		}
	}
	names, err := os.ReadDir(dst)
	if err != nil {
		return atomicfile.Failed(dst, -1, err)
	}
	for _, n := range names {
		if err := others(n.Name()); err != nil {
			return err
		}
	}
	return nil
}

// indexOf finds the index.json that a single source was opened by, and what
// its metadata say.
func indexOf(ctx context.Context, src []string, storage source.Options) (name string, metadata map[string]string) {
	if len(src) != 1 {
		return "", nil
	}
	path := localPath(src[0])
	if source.Remote(path) {
		return remoteIndexOf(ctx, path, storage)
	}
	if st, err := os.Stat(path); err == nil && st.IsDir() {
		found, _ := filepath.Glob(join(format.EscapeGlob(path), "*"+extension+".index.json"))
		if len(found) != 1 {
			return "", nil
		}
		path = found[0]
	}
	if !strings.HasSuffix(path, ".index.json") {
		return "", nil
	}
	b, err := regular.Read(path, tensor.MaxHeader)
	if err != nil {
		return "", nil
	}
	s, _ := safetensors.ReadIndexJSON(path, b) // sound: the weights were opened by it
	return filepath.Base(path), s.Metadata
}

// remoteIndexOf is indexOf for a URI; a folder that cannot be listed has the
// usual name.
func remoteIndexOf(ctx context.Context, uri string, storage source.Options) (name string, metadata map[string]string) {
	if source.Folder(uri) {
		uri = source.Beside(uri, "model"+extension+".index.json")
	}
	name = filepath.Base(source.Path(uri))
	if !strings.HasSuffix(name, ".index.json") {
		return "", nil
	}
	s, err := open.With(storage)(ctx, uri)
	if err != nil {
		return "", nil
	}
	defer s.Close()
	b := make([]byte, min(s.Size(), tensor.MaxHeader))
	if err := s.ReadAt(ctx, b, 0); err != nil {
		return "", nil
	}
	x, _ := safetensors.ReadIndexJSON(uri, b) // sound: the weights were opened by it
	return name, x.Metadata
}

// companions reads the small other files of source folders. Large files and
// weights that are not the model's are left, and named; hidden files and links that
// lead nowhere are left without a word.
func companions(src []string, dst string, parts []part) (out []part, left []string, err error) {
	taken := map[string]bool{}
	for _, p := range parts {
		taken[filepath.Base(p.path)] = true
	}
	here, _ := os.Stat(dst)
	for _, s := range src {
		dir := localPath(s)
		st, err := os.Stat(dir)
		if err != nil || !st.IsDir() || (here != nil && os.SameFile(st, here)) {
			continue
		}
		names, err := os.ReadDir(dir)
		if err != nil {
			return nil, nil, atomicfile.Failed(dir, -1, err)
		}
		for _, n := range names {
			path := join(dir, n.Name())
			st, err := os.Stat(path)
			if err != nil || !st.Mode().IsRegular() || taken[n.Name()] || strings.HasPrefix(n.Name(), ".") {
				continue
			}
			if st.Size() > maxCompanion || strings.HasSuffix(n.Name(), extension) || strings.HasSuffix(n.Name(), extension+".index.json") {
				left = append(left, path)
				continue
			}
			b, err := regular.Read(path, maxCompanion)
			if err != nil {
				return nil, nil, atomicfile.Failed(path, -1, err)
			}
			taken[n.Name()] = true
			out = append(out, part{path: join(dst, n.Name()), blob: slices.Clip(append([]byte{}, b...))})
		}
	}
	return out, left, nil
}

// isFolder tells whether dst is to be a folder: one for several files or for a
// folder, unless its name says that it is a file.
func isFolder(dst string, src []string, files int) bool {
	if strings.HasSuffix(dst, string(filepath.Separator)) {
		return true
	}
	if st, err := os.Stat(dst); err == nil && !remote(dst) {
		return st.IsDir()
	}
	st, err := os.Stat(localPath(src[0]))
	return (files > 1 || len(src) == 1 && err == nil && st.IsDir()) && !namesFile(dst)
}

// makeFolder makes dst if it is not there, and returns it if it was made.
// Stores need no folders.
func makeFolder(dst string) (made string, err error) {
	if remote(dst) {
		return "", nil
	}
	err = os.Mkdir(dst, 0o777)
	if err == nil {
		return dst, nil
	}
	if st, serr := os.Stat(dst); serr == nil && st.IsDir() {
		return "", nil
	}
	if os.IsExist(err) {
		err = &fs.PathError{Op: "mkdir", Path: dst, Err: fs.ErrExist}
	}
	return "", atomicfile.Failed(dst, -1, err)
}

func localPath(uri string) string {
	if open.Scheme(uri) == "file" {
		if p, err := open.FilePath(uri); err == nil {
			return p
		}
	}
	return uri
}
