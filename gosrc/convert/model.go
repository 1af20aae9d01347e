package convert

// This file converts one model.

import (
	"context"
	"maps"
	"os"
	"path/filepath"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/save"
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
