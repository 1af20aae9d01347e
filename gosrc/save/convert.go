package save

// This file has the verb Convert.

import (
	"cmp"
	"context"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/overwire/overwire/gosrc/companions"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/format"
	"github.com/overwire/overwire/gosrc/internal/atomicfile"
	"github.com/overwire/overwire/gosrc/internal/modelfiles"
	"github.com/overwire/overwire/gosrc/internal/regular"
	"github.com/overwire/overwire/gosrc/job"
	"github.com/overwire/overwire/gosrc/save/folders"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/source/open"
)

// Convert reads tensors from anything that can be opened (files, folders, an
// index.json; plain or compressed) and writes them as spec says, a window of chunks
// at a time: never the whole model in memory.
//
// A container keeps what is needed to write the plain file that it was made from
// again, byte for byte, if that file becomes one container with the same metadata;
// when such a container becomes one plain file, it is that file.
//
// If dst is a folder, every file keeps its name (if dst has a set of these names already,
// see modelfiles.Mark), its tensors and its metadata; the
// index.json and the other files of a source folder are copied (see package
// companions); dst must not have other weights. Every model of a folder is converted: its
// variants, too. Otherwise all tensors go into the
// file dst (or its shards, if spec says so), with the metadata of all sources, the
// first one's where they differ. dst is a folder if it is one, if it ends in a
// slash, or if the source is a folder or has several files and dst does not end in
// .safetensors or .tensors. spec.Path is ignored; spec.Metadata override the
// sources'.
//
// If src is one folder, here or in a store that lists its files, the folders below it are
// converted and copied in the same way: a diffusers pipeline stays one. The files of the folder itself, which
// refer to the others, are written last.
//
// A new file can be read by no more users than the file that it is made from; one
// that replaces a file keeps that file's mode, as always.
//
// Converting a file onto itself is safe: it is read until the new one is complete.
func Convert(ctx context.Context, j *job.Job, src []string, dst string, spec Spec) (Report, error) {
	start := time.Now()
	rep, err := convertAll(ctx, j, src, dst, spec)
	if err != nil {
		return Report{}, errs.Ended(ctx, err)
	}
	rep.Seconds = time.Since(start).Seconds()
	rep.hideUsers()
	return rep, nil
}

func convertAll(ctx context.Context, j *job.Job, src []string, dst string, spec Spec) (Report, error) {
	spec.Path = dst
	if err := spec.checkSpec(); err != nil {
		return Report{}, err
	}
	dst = spec.Path // without its scheme
	if ext := companions.OtherFormat(dst); ext != "" && !namesFile(dst) {
		return Report{}, badArgument(dst, "",
			"%s files are not written, only %s and .tensors files, and folders of them", ext, extension)
	}
	if source.Remote(dst) && !namesFile(dst) {
		stores := open.With(spec.Storage.Options)
		dst = cmp.Or(format.RemoteFolder(ctx, source.LocationOf(dst), stores.Open,
			format.Options{List: stores.List}), dst)
	}
	if len(src) != 1 {
		return convertOne(ctx, j, src, dst, spec, companionOptions{})
	}
	dir, how := source.WithoutScheme(src[0]), companionOptions{}
	if remote, files, err := remoteFolder(ctx, src[0], spec.Storage.Options); err != nil {
		return Report{}, err
	} else if remote != "" {
		dir, how.files, src = remote, files, []string{remote}
	}
	if isFolder(dst, src, 1) {
		branches, err := branchesOf(dir, dst, how.files)
		if err != nil {
			return Report{}, err
		}
		if len(branches) > 1 && slices.ContainsFunc(branches, func(b format.Branch) bool { return b.Weights }) {
			return convertTree(ctx, j, dir, dst, branches, spec, how)
		}
		if len(branches) > 0 {
			return convertFolder(ctx, j, dir, dst, spec, how)
		}
	}
	return convertOne(ctx, j, src, dst, spec, how)
}

// convertOne converts what is opened as one model.
func convertOne(ctx context.Context, j *job.Job, src []string, dst string, spec Spec, how companionOptions) (Report,
	error) {
	spec.Path = dst
	from := spec.Storage
	if more := formatOf(dst).settings; len(more) > 0 {
		more = maps.Clone(more)
		maps.Copy(more, from.Decrypt)
		from.Decrypt = more
	}
	files := spec.Shard == 0 && isFolder(dst, src, 2) // each as it is, with tensors that an index.json does not list
	m, err := openModel(ctx, src, from, files)
	if err != nil {
		return Report{}, err
	}
	folder := isFolder(dst, src, len(m.srcs))
	if files && !folder {
		m.closeSources()
		if m, err = openModel(ctx, src, from, false); err != nil {
			return Report{}, err
		}
	}
	defer m.closeSources()
	w := newWriter(spec, j)
	w.complete, w.ours = m.refuseWritten, how.ours
	items := m.items(w.threads)
	if folder && len(spec.Storage.Encrypt) > 0 {
		return Report{}, badArgument(dst, "", "only single .tensors files are encrypted, not folders")
	}
	groups := [][]*item{items}
	if folder && spec.Shard == 0 {
		// Files stay separate: aliases must not refer from one to another.
		groups = nil
		for k := range m.srcs {
			groups = append(groups, m.of(k, items))
		}
	}
	for _, g := range groups {
		if err := checkItems(dst, g); err != nil {
			return Report{}, err
		}
		if err := w.prepareItems(ctx, g); err != nil {
			return Report{}, err
		}
	}
	addLap(&w.clock.plan, w.start)
	w.spec.Path = pathIn(folder, "model", w.spec)
	parts, err := m.parts(ctx, w.spec, dst, src, folder, items)
	if err != nil {
		return Report{}, err
	}
	var rep Report
	if folder {
		own := how.sourceFolders(src)
		from := own
		if how.dir != "" && !how.last {
			from = nil
		}
		rep, err = w.intoFolder(ctx, own, from, dst, parts, how)
	} else {
		rep, err = w.saveAll(ctx, parts)
		rep.Left = listBesides(how.sourceFolders(src), spec, how)
	}
	rep.Anew = m.plainFiles(w.spec, parts, rep.Originals)
	return rep, err
}

// intoFolder writes parts into dst, which is made, beside the companions of the folders
// from. Their own weights may lie in dst if they are among src.
func (w *writer) intoFolder(ctx context.Context, src, from []string, dst string, parts []outputFile,
	how companionOptions) (rep Report, err error) {
	made, err := folders.Make(dst)
	if err != nil {
		return rep, err
	}
	ours := map[string]bool{}
	for _, p := range parts {
		ours[filepath.Base(p.path)] = true
	}
	maps.Copy(ours, how.ours)
	var left []string
	if err = folders.RefuseOthers(ctx, dst, src, w.spec.Shard > 0, ours, w.spec.Storage.Options); err == nil {
		parts, left, err = withCompanions(from, dst, parts, w.spec, how)
	}
	if err == nil {
		rep, err = w.saveAll(ctx, parts)
	}
	if err != nil && made != "" {
		_ = os.Remove(made)
	}
	rep.Left = left
	return rep, err
}

// prepareItems decides how tensors are stored, of files whose tensors may be compressed.
func (w *writer) prepareItems(ctx context.Context, items []*item) error {
	if !w.spec.Compress || !formatOf(w.spec.Path).coded {
		return nil
	}
	return w.classifyItems(ctx, items)
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

// parts are the files of tensors that Convert writes, and their index.
func (m *model) parts(
	ctx context.Context, spec Spec, dst string, src []string, folder bool, items []*item,
) (parts []outputFile, err error) {
	var all map[string]string
	for k := range m.srcs {
		if own := m.metadata(k); own != nil {
			maps.Copy(own, all)
			all = own
		}
	}
	switch {
	case !folder || spec.Shard > 0:
		merged := spec
		merged.Metadata = mergeMetadata(all, spec.Metadata)
		parts = divideShards(merged, items)
		mode, err := m.mode()
		if err != nil {
			return nil, err
		}
		for i := range parts {
			parts[i].mode = mode
		}
		if len(parts) == 1 && len(m.srcs) == 1 {
			if parts[0].original, err = m.original(ctx, spec, 0); err != nil {
				return nil, err
			}
		}
	default:
		seen := map[string]bool{}
		for k, s := range m.srcs {
			name := filepath.Base(source.Path(source.WithoutScheme(s.URI())))
			if filepath.Ext(name) == "" {
				name += extension // without it no one who opens the folder would find the file
			}
			if seen[name] {
				return nil, badArgument(dst, "", "two sources are called %q", name)
			}
			seen[name] = true
			o, err := m.original(ctx, spec, k)
			if err != nil {
				return nil, err
			}
			mode, err := modeOf(s.URI())
			if err != nil {
				return nil, err
			}
			parts = append(parts, outputFile{path: joinName(dst, name),
				metadata: mergeMetadata(m.metadata(k), spec.Metadata),
				items:    m.of(k, items), mode: mode, original: o})
		}
		if len(src) == 1 {
			return m.addIndex(dst, parts)
		}
	}
	return parts, nil
}

// mergeMetadata are metadata with more entries; nil without both.
func mergeMetadata(metadata, more map[string]string) map[string]string {
	if metadata == nil {
		return more
	}
	maps.Copy(metadata, more)
	return metadata
}

// addIndex adds the index.json of the source to its files. Shards without one get one where
// files of their names are: together with it they replace those in one step.
func (m *model) addIndex(dst string, parts []outputFile) ([]outputFile, error) {
	set := m.sets[0]
	mode, err := m.mode()
	if err != nil {
		return nil, err
	}
	if set.Index != "" {
		for k := range parts {
			parts[k].shard = true
		}
		name := filepath.Base(source.Path(source.WithoutScheme(set.Index)))
		return append(parts, outputFile{path: joinName(dst, name), laid: wholeFile(set.Text),
			listing: &listing{Shards: set.Shards}, mode: mode}), nil
	}
	family := ""
	there := false
	for _, p := range parts {
		name := filepath.Base(p.path)
		n, ok := modelfiles.ParseName(name)
		if family == "" {
			family = modelfiles.Family(name)
		}
		if !ok || n.Of == 0 || modelfiles.Family(name) != family {
			return parts, nil
		}
		if source.Remote(dst) {
			continue
		}
		st, err := regular.FindEntry(p.path)
		if err != nil {
			return nil, atomicfile.Failed(p.path, -1, err)
		}
		there = there || st != nil
	}
	if !there || len(parts) < 2 {
		return parts, nil
	}
	index := indexOf(joinName(dst, family+extension+modelfiles.IndexSuffix), shardIndex(parts), parts)
	index.mode = mode
	return append(parts, index), nil
}

// companionOptions says how the other files of a source folder are copied.
type companionOptions struct {
	root    string          // see companions.Folder
	files   []source.Entry  // those of a remote folder, and of those below it
	folders bool            // the folders below are converted, too
	dir     string          // the folder of several models that are converted; "": one is
	ours    map[string]bool // the files of all of them
	last    bool            // this is the last one, with which the other files are copied
}

// sourceFolders are the folders that models are converted from.
func (b companionOptions) sourceFolders(src []string) []string {
	if b.dir != "" {
		return []string{b.dir}
	}
	var out []string
	for _, s := range src {
		if path := source.WithoutScheme(s); !source.Remote(s) && namesIndex(path) {
			s = atomicfile.Folder(path)
		}
		out = append(out, s)
	}
	return out
}

// namesIndex reports whether a path is that of an index.json.
func namesIndex(path string) bool {
	n, ok := modelfiles.ParseName(filepath.Base(path))
	return ok && n.Index
}

// withCompanions puts the other files of source folders before the parts of the
// model, since what refers to others comes last, and lists those that are not
// copied. Weights are opened as every load opens them, through any link: only their
// tensors are copied.
func withCompanions(src []string, dst string, parts []outputFile, spec Spec, how companionOptions) (
	all []outputFile, left []string, err error) {
	taken := map[string]bool{}
	for _, p := range parts {
		taken[filepath.Base(p.path)] = true
		if p.listing != nil {
			for _, name := range p.listing.Files {
				taken[name] = true
			}
		}
	}
	maps.Copy(taken, how.ours)
	for _, s := range src {
		found, skipped, err := companions.Find(how.companionFolder(s, dst, spec), taken)
		if err != nil {
			return nil, nil, err
		}
		for _, f := range found {
			taken[f.Name] = true
			one := outputFile{path: joinName(dst, f.Name), laid: copyOf(f), copied: true}
			if f.Mode != 0 {
				one.mode = f.Mode | 0o600
			}
			all = append(all, one)
		}
		left = append(left, skipped...)
	}
	return append(all, parts...), left, nil
}

// companionFolder is where the companions of a source are looked for.
func (b companionOptions) companionFolder(src, dst string, spec Spec) companions.Folder {
	return companions.Folder{Path: source.WithoutScheme(src), Root: b.root, Avoid: dst, Below: b.folders, Files: b.files,
		Open: open.With(spec.Storage.Options).Open}
}

// listBesides lists what lies beside the weights of source folders that become one file.
func listBesides(src []string, spec Spec, how companionOptions) (left []string) {
	for _, s := range src {
		// what cannot be read is not copied, either
		found, skipped, _ := companions.Find(how.companionFolder(s, "", spec), nil)
		for _, f := range found {
			left = append(left, f.Path)
		}
		left = append(left, slices.DeleteFunc(skipped, func(path string) bool {
			_, weights := modelfiles.ParseName(source.Name(path))
			return weights
		})...)
	}
	return left
}

// mode is the mode that all local files of the model allow; 0 if none is local.
func (m *model) mode() (all fs.FileMode, err error) {
	for _, s := range m.srcs {
		mode, err := modeOf(s.URI())
		if err != nil {
			return 0, err
		}
		if mode != 0 && all != 0 {
			all &= mode
		} else if mode != 0 {
			all = mode
		}
	}
	return all, nil
}

// modeOf is the mode of a local file; 0 if there is none.
func modeOf(uri string) (fs.FileMode, error) {
	if source.Remote(uri) {
		return 0, nil
	}
	st, err := regular.FindTarget(source.WithoutScheme(uri))
	if st == nil {
		return 0, errs.In("open", uri, err)
	}
	return st.Mode().Perm() | 0o600, nil
}

// pathIn is the file to write, or the path that shards are named after.
func pathIn(folder bool, stem string, spec Spec) string {
	if folder {
		return joinName(spec.Path, stem+extension)
	}
	return spec.Path
}

// plainFiles lists the plain files made from containers that are not their originals.
func (m *model) plainFiles(spec Spec, parts []outputFile, originals []Original) (out []string) {
	if spec.Compress || !formatOf(spec.Path).coded {
		return nil
	}
	for _, p := range parts {
		ours := slices.ContainsFunc(p.items, func(t *item) bool { return t.known != nil })
		if ours && !slices.ContainsFunc(originals, func(o Original) bool { return o.File == p.path }) {
			out = append(out, p.path)
		}
	}
	return out
}

// isFolder reports whether dst should be a folder: it is one for several files or
// for a folder, unless its name is that of a file.
func isFolder(dst string, src []string, files int) bool {
	if strings.HasSuffix(dst, string(filepath.Separator)) {
		return true
	}
	if st, err := os.Stat(dst); err == nil && !source.Remote(dst) {
		return st.IsDir()
	}
	if len(src) == 0 || namesFile(dst) {
		return false
	}
	st, err := os.Stat(source.WithoutScheme(src[0]))
	return files > 1 || len(src) == 1 && (err == nil && st.IsDir() || namesIndex(source.Path(src[0])) ||
		source.Remote(src[0]) && source.Folder(src[0]))
}
