package convert

// This file plans the files of one model, and converts them.

import (
	"context"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/atomicfile"
	"github.com/overwire/overwire/gosrc/internal/modelfiles"
	"github.com/overwire/overwire/gosrc/internal/regular"
	"github.com/overwire/overwire/gosrc/save"
	"github.com/overwire/overwire/gosrc/save/original"
	"github.com/overwire/overwire/gosrc/save/publish"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/stored"
)

func convertModel(ctx context.Context, c *conversion, src []string, to save.Target, in branch) (save.Report, error) {
	decrypt := settingsFor(to, c.spec.Storage.Decrypt)
	// files are converted one by one, so include tensors that an index.json does not list
	asFiles := c.spec.Shard == 0 && isFolder(to, src, 2)
	m, err := stored.OpenIn(ctx, c.stores, src, decrypt, asFiles)
	if err != nil {
		return save.Report{}, err
	}
	isDir := isFolder(to, src, len(m.Sources))
	if asFiles && !isDir {
		m.Close()
		if m, err = stored.OpenIn(ctx, c.stores, src, decrypt, false); err != nil {
			return save.Report{}, err
		}
	}
	defer m.Close()
	if isDir && len(c.spec.Storage.Encrypt) > 0 {
		return save.Report{}, errs.In("save", to.Path,
			errs.New(errs.ErrArgument, "only single .tensors files can be encrypted, not folders"))
	}
	target := pathIn(isDir, to, "model")
	w := save.NewWriter(target, c.spec, c.job)
	w.Complete, w.Others, w.OnPublish = m.RefuseWritten, in.ours, c.wrote.noteObject
	set := modelSet{Model: m, spec: c.spec, target: target, items: save.ItemsOf(m, stored.NewCache(w.Threads()))}
	groups := [][]*save.Item{set.items}
	if isDir && c.spec.Shard == 0 {
		groups = nil // the files stay separate, so no alias may refer to another file
		for k := range m.Sources {
			groups = append(groups, set.itemsOf(k))
		}
	}
	for _, g := range groups {
		if err := w.Classify(ctx, g); err != nil {
			return save.Report{}, err
		}
	}
	w.Plan()
	var files []save.File
	if isDir && c.spec.Shard == 0 {
		files, err = set.filesIn(ctx, to, len(src) == 1)
	} else {
		files, err = set.joinedFiles(ctx, w)
	}
	if err != nil {
		return save.Report{}, err
	}
	folders := in.sourceFolders(src)
	var rep save.Report
	if isDir {
		from := folders
		if in.dir != "" && !in.last {
			from = nil
		}
		rep, err = writeFolder(ctx, c, w, folders, from, to, files, in)
	} else {
		rep, err = w.Write(ctx, files)
		rep.Left = listAuxiliary(c, folders, in)
	}
	rep.Anew = set.plainFiles(files, rep.Originals)
	return rep, err
}

// settingsFor adds the settings with which sources are read for the target's format.
func settingsFor(to save.Target, decrypt map[string]string) map[string]string {
	settings := maps.Clone(to.Settings())
	if settings == nil {
		return decrypt
	}
	maps.Copy(settings, decrypt)
	return settings
}

// writeFolder writes files into a folder, together with the auxiliary files of the folders from. It creates the
// folder if needed. If the target is one of the folders own, it may already contain the model's weights.
func writeFolder(ctx context.Context, c *conversion, w *save.Writer, own, from []string, to save.Target,
	files []save.File, in branch) (rep save.Report, err error) {
	made, err := makeFolder(to)
	if err != nil {
		return rep, err
	}
	ours := map[string]bool{}
	for i := range files {
		ours[filepath.Base(files[i].Path)] = true
	}
	maps.Copy(ours, in.ours)
	var left []string
	if err = refuseOthers(ctx, to, own, c.spec.Shard > 0, ours, c.spec.Storage.Options); err == nil {
		files, left, err = addCompanions(c, from, to, files, in)
	}
	if err == nil {
		rep, err = w.Write(ctx, files)
		c.wrote.note(rep.Files)
	}
	if err != nil && made != "" {
		_ = os.Remove(made)
	}
	rep.Left = left
	return rep, err
}

// A modelSet is an opened model and the target of its conversion.
type modelSet struct {
	*stored.Model
	spec   *save.Spec
	target save.Target
	items  []*save.Item // indexed by tensor
}

// itemsOf returns the tensors of source k.
func (m *modelSet) itemsOf(k int) (items []*save.Item) {
	for i, t := range m.items {
		if int(m.Index.Tensors[i].Source) == k {
			items = append(items, t)
		}
	}
	return items
}

// joinedFiles plans one file, or shards, with all tensors and the metadata of all sources.
func (m *modelSet) joinedFiles(ctx context.Context, w *save.Writer) ([]save.File, error) {
	var all map[string]string
	for k := range m.Sources {
		if own := m.Metadata(k); own != nil {
			maps.Copy(own, all)
			all = own
		}
	}
	files := w.Divide(mergeMetadata(all, m.spec.Metadata), m.items)
	mode, err := m.mode()
	if err != nil {
		return nil, err
	}
	for i := range files {
		files[i].Mode = mode
	}
	if len(files) == 1 && len(m.Sources) == 1 {
		files[0].Original, err = m.original(ctx, 0)
	}
	return files, err
}

// filesIn plans one file in a folder for each source, and adds the source's index.json if indexed is set.
func (m *modelSet) filesIn(ctx context.Context, dir save.Target, indexed bool) (files []save.File, err error) {
	seen := map[string]bool{}
	for k, s := range m.Sources {
		at := source.LocationOf(s.URI())
		name := filepath.Base(at.Path)
		if filepath.Ext(name) == "" {
			name += publish.Extension // otherwise opening the folder would not find the file
		}
		if seen[name] {
			return nil, errs.In("save", dir.Path, errs.New(errs.ErrArgument, "two sources have the name %q", name))
		}
		seen[name] = true
		f := save.File{File: publish.File{Path: publish.JoinName(dir.Path, name)},
			Metadata: mergeMetadata(m.Metadata(k), m.spec.Metadata), Items: m.itemsOf(k)}
		if f.Original, err = m.original(ctx, k); err != nil {
			return nil, err
		}
		if f.Mode, err = modeOf(at); err != nil {
			return nil, err
		}
		files = append(files, f)
	}
	if !indexed {
		return files, nil
	}
	return m.addIndex(dir, files)
}

// addIndex adds the index.json of the source to its files. Shards without an index get one if files with their names
// already exist, because only an index can replace them in one step.
func (m *modelSet) addIndex(dir save.Target, files []save.File) ([]save.File, error) {
	set := m.Sets[0]
	mode, err := m.mode()
	if err != nil {
		return nil, err
	}
	if set.Index != "" {
		for k := range files {
			files[k].Shard = true
		}
		name := filepath.Base(source.LocationOf(set.Index).Path)
		return append(files, save.File{File: publish.File{Path: publish.JoinName(dir.Path, name),
			Content: publish.WholeFile(set.Text), Listing: &publish.Listing{Shards: set.Shards}, Mode: mode}}), nil
	}
	family := modelfiles.Family(filepath.Base(files[0].Path))
	isThere := false
	for i := range files {
		name := filepath.Base(files[i].Path)
		n, ok := modelfiles.ParseName(name)
		if !ok || n.Of == 0 || modelfiles.Family(name) != family {
			return files, nil
		}
		if dir.Remote {
			continue
		}
		st, err := regular.FindEntry(files[i].Path)
		if err != nil {
			return nil, atomicfile.Failed(files[i].Path, -1, err)
		}
		isThere = isThere || st != nil
	}
	if !isThere || len(files) < 2 {
		return files, nil
	}
	files = save.AddIndex(publish.JoinName(dir.Path, family+publish.Extension+modelfiles.IndexSuffix), files)
	files[len(files)-1].Mode = mode
	return files, nil
}

// original returns the plain file that source k is or stores, if the new file should store or restore it. Otherwise it
// returns nil. The new file must be made only from this source.
func (m *modelSet) original(ctx context.Context, k int) (*original.File, error) {
	s := &m.Index.Sources[k]
	if len(m.spec.Metadata) > 0 || s.Unlisted > 0 || !m.target.Coded() || !m.spec.Compress && !s.Overwire() {
		return nil, nil
	}
	return original.Of(ctx, m.Sources[k], s, !m.spec.NoSHA256)
}

// plainFiles lists the plain files that were made from containers without restoring an original.
func (m *modelSet) plainFiles(files []save.File, originals []original.Summary) (out []string) {
	if m.spec.Compress || !m.target.Coded() {
		return nil
	}
	for i := range files {
		f := &files[i]
		if slices.ContainsFunc(f.Items, (*save.Item).IsFromContainer) &&
			!slices.ContainsFunc(originals, func(o original.Summary) bool { return o.File == f.Path }) {
			out = append(out, f.Path)
		}
	}
	return out
}

// mode returns the permissions that all local files of the model have, or 0 if none is local.
func (m *modelSet) mode() (all fs.FileMode, err error) {
	for _, s := range m.Sources {
		mode, err := modeOf(source.LocationOf(s.URI()))
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

// modeOf returns the mode of a local file, or 0 for a remote file.
func modeOf(at source.Location) (fs.FileMode, error) {
	if at.Remote {
		return 0, nil
	}
	st, err := regular.FindTarget(at.Path)
	if st == nil {
		return 0, errs.In("open", at.URI, err)
	}
	return st.Mode().Perm() | 0o600, nil
}

// mergeMetadata adds more to metadata. It returns nil if both are nil.
func mergeMetadata(metadata, more map[string]string) map[string]string {
	if metadata == nil {
		return more
	}
	maps.Copy(metadata, more)
	return metadata
}
