package format

// This file selects the model among the files of a folder, by the rules of docs/folders.md, finds the models in its
// subfolders, and suggests what a user may have meant by a missing path or by a folder without a model.

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/modelfiles"
	"github.com/overwire/overwire/gosrc/internal/near"
	"github.com/overwire/overwire/gosrc/internal/regular"
	"github.com/overwire/overwire/gosrc/source"
)

// A family is one model in a folder: an index, a single file, or shards without an index.
type family struct {
	modelfiles.Name // name of the first file
	paths           []string
	numbers         []int // shard numbers
}

// divideFamilies divides the files of a folder into families. unlisted contains the files that are marked as parts of
// a save but are in no index; they are not models.
func divideFamilies(paths []string) (all []*family, unlisted []string) {
	by := map[modelfiles.Name]*family{}
	for _, path := range paths {
		n, ok := modelfiles.ParseName(source.Name(path))
		switch {
		case !ok:
			continue
		case n.Marked && !n.Index:
			unlisted = append(unlisted, path)
			continue
		}
		key := n
		key.Number = 0
		f := by[key]
		if f == nil || n.Index { // each index is a model
			f = &family{Name: n}
			by[key] = f
			all = append(all, f)
		}
		f.paths, f.numbers = append(f.paths, path), append(f.numbers, n.Number)
	}
	return all, unlisted
}

// lackingShards describes the missing shards of a family without an index, or returns "" if it is complete.
func (f *family) lackingShards() string {
	if f.Index || f.Of == 0 {
		return ""
	}
	from := 1
	if slices.Contains(f.numbers, 0) {
		from = 0 // some writers count from 0
	}
	var numbers []string
	for n := from; n < from+f.Of && len(numbers) < 5; n++ {
		if !slices.Contains(f.numbers, n) {
			numbers = append(numbers, fmt.Sprint(n))
		}
	}
	if len(numbers) == 0 && len(f.numbers) == f.Of {
		return ""
	}
	if len(numbers) == 0 {
		return fmt.Sprintf("the folder has %d shards, but according to their names there are %d", len(f.numbers), f.Of)
	}
	noun, verb := "shard", "is"
	if len(numbers) > 1 {
		noun, verb = "shards", "are"
	}
	return fmt.Sprintf("it has only %d of %d shards: %s %s %s missing", len(f.numbers), f.Of, noun,
		strings.Join(numbers, ", "), verb)
}

// preferDefaults drops variants if their default is present, shards without an index if the same model is present as
// a single file, and consolidated weights if "model" is present.
func preferDefaults(all []*family) []*family {
	has := func(of func(f *family) bool) bool { return slices.ContainsFunc(all, of) }
	return slices.DeleteFunc(slices.Clone(all), func(f *family) bool {
		return f.Variant != "" && has(func(o *family) bool { return o.Stem == f.Stem && o.Variant == "" }) ||
			f.Of > 0 && has(func(o *family) bool {
				return o.Stem == f.Stem && o.Variant == f.Variant && o.Of == 0 && !o.Index
			}) ||
			f.Stem == "consolidated" && has(func(o *family) bool { return o.Stem == "model" })
	})
}

// chooseModel selects the model among the files of a folder. It sets Files.Index to an index.json that the caller
// must read, or sets Files.URIs.
func chooseModel(dir string, names []string) (Files, error) {
	all, unlisted := divideFamilies(names)
	some := preferDefaults(all)
	var indexes, sharded []*family
	var files []string
	variants := map[string]bool{}
	for _, f := range some {
		switch {
		case f.Index:
			indexes = append(indexes, f)
		case f.Of > 0:
			sharded = append(sharded, f)
		}
		if f.Variant != "" {
			variants[f.Variant] = true
		}
		if !f.Index {
			files = append(files, f.paths...)
		}
	}
	for _, name := range names {
		if modelfiles.IsPart(source.Name(name)) && len(indexes) == 0 {
			return Files{}, placeError(dir, errs.New(errs.ErrNotSupported, "%s", modelfiles.KindOfFolder(names)))
		}
	}
	switch {
	case len(indexes) > 1, len(indexes) == 0 && (len(variants) > 1 || len(sharded) > 1):
		var names []string
		for _, f := range some {
			names = append(names, f.paths[0])
		}
		return Files{}, placeError(dir, errs.New(errs.ErrArgument, "the folder contains several models; name one "+
			"of them: %s",
			strings.Join(names, ", ")))
	case len(indexes) == 1:
		return Files{Index: indexes[0].paths[0]}, nil
	case len(files) == 0 && len(unlisted) > 0:
		return Files{}, placeError(dir, errs.New(errs.ErrFormat,
			"%s is a shard of an unfinished save, or its index.json is missing: save or fetch the model again",
			filepath.Base(unlisted[0])))
	case len(files) == 0:
		return Files{}, placeError(dir, errs.New(errs.ErrNotFound, "no %s file in this folder%s", suffix,
			foldersBelow(dir, names)))
	}
	for _, f := range sharded {
		if why := f.lackingShards(); why != "" {
			return Files{}, placeError(dir, errs.New(errs.ErrFormat,
				"%s has no index.json, and %s: fetch the model again", filepath.Base(f.paths[0]), why))
		}
	}
	slices.Sort(files)
	return Files{URIs: files, listed: true}, nil
}

// A Model is one model of a local folder. Names are the paths that open it. Paths are its files, including the index.
type Model struct{ Names, Paths []string }

// ofLibraries are the base names that libraries look for, regardless of other files in the folder.
var ofLibraries = []string{
	"model", "diffusion_pytorch_model", "consolidated", "adapter_model", "pytorch_lora_weights",
}

// Models returns the models of a folder; the folder's default model is last. The other models are those with their own
// index, variants, and models with a name in ofLibraries. names are the files of a remote folder; nil means that the
// folder is local.
func Models(ctx context.Context, dir string, names []string, open Opener) (_ []Model, err error) {
	if names == nil {
		if names, err = namesOf(dir); err != nil {
			return nil, err
		}
	}
	main, err := chooseFiles(ctx, dir, names, open)
	if err != nil {
		return nil, err
	}
	sets := []Files{main}
	all, _ := divideFamilies(names)
	for _, f := range all {
		if f.Index && f.paths[0] != main.Index {
			set, err := readShards(ctx, source.LocationOf(f.paths[0]), open)
			if err != nil {
				return nil, err
			}
			sets = append(sets, set)
		}
	}
	for _, f := range all {
		known := slices.Contains(ofLibraries, f.Stem) || main.Index == "" && f.Variant != ""
		known = known && !f.Index && f.lackingShards() == ""
		for _, set := range sets {
			known = known && !slices.ContainsFunc(f.paths, func(path string) bool {
				return slices.Contains(set.URIs, path)
			})
		}
		if known {
			sets = append(sets, Files{URIs: f.paths})
		}
	}
	var models []Model
	for _, set := range append(sets[1:], main) {
		m := Model{Names: set.URIs, Paths: slices.Clone(set.URIs)}
		if set.Index != "" {
			m.Names, m.Paths = []string{set.Index}, append(m.Paths, set.Index)
		}
		models = append(models, m)
	}
	return models, nil
}

// maxDepth is the number of subfolder levels that are searched.
const maxDepth = 8

// A Branch is a folder in a tree of models. A diffusers pipeline has one branch for each component.
type Branch struct {
	Path    string // relative to the tree's top folder; "" is that folder itself
	Weights bool   // whether it contains a model
	// Parts means that it contains the files that torch joined into the weights in the parent folder.
	Parts bool
}

// Tree returns the subfolders of dir that contain files, and dir itself last, because the file that refers to the
// others (model_index.json) must be written last. It omits hidden folders, links, and avoid, which is the folder that
// is being written. Folders more than maxDepth levels below dir are refused. If dir is not a local folder, there are
// no branches.
func Tree(dir, avoid string) ([]Branch, error) {
	if source.Remote(dir) {
		return nil, nil
	}
	dir = source.WithoutScheme(dir)
	if st, err := regular.FindTarget(dir); st == nil || !st.IsDir() {
		return nil, errs.In("open", dir, err)
	}
	if hint := nameSnapshots(dir); hint != "" {
		return nil, placeError(dir, errs.New(errs.ErrArgument, "%s", hint))
	}
	here, _ := os.Stat(avoid)
	var out []Branch
	var walk func(rel string, depth int) error
	walk = func(rel string, depth int) error {
		entries, err := os.ReadDir(filepath.Join(dir, rel))
		if err != nil {
			return placeError(filepath.Join(dir, rel), errs.FromOS(err))
		}
		b, files := Branch{Path: rel}, false
		for _, e := range entries {
			below := filepath.Join(rel, e.Name())
			switch hidden := strings.HasPrefix(e.Name(), "."); {
			case e.IsDir() && !hidden && depth == maxDepth:
				return placeError(filepath.Join(dir, below), tooDeep(dir, depth+1))
			case e.IsDir() && !hidden:
				if st, err := e.Info(); err == nil && here != nil && os.SameFile(st, here) {
					continue
				}
				if err := walk(below, depth+1); err != nil {
					return err
				}
			case !e.IsDir() && !hidden:
				files = true
				b.addFile(e.Name())
			}
		}
		if files || rel == "" {
			out = append(out, b)
		}
		return nil
	}
	err := walk("", 0)
	return markParts(out), err
}

// RemoteTree is Tree for the remote folder dir, given all files in it and its subfolders.
func RemoteTree(dir, avoid string, files []source.Entry) (out []Branch, err error) {
	by := map[string]int{}
	add := func(rel string) *Branch {
		if _, ok := by[rel]; !ok {
			by[rel] = len(out)
			out = append(out, Branch{Path: rel})
		}
		return &out[by[rel]]
	}
	for _, f := range files {
		rel := strings.TrimPrefix(path.Dir(f.Name), ".")
		hidden := strings.HasPrefix(f.Name, ".") || strings.Contains(f.Name, "/.")
		if hidden || avoid != "" && strings.HasPrefix(source.Beside(dir, f.Name), avoid) {
			continue
		}
		if depth := strings.Count(f.Name, "/"); depth > maxDepth {
			return nil, placeError(source.Below(dir, rel), tooDeep(dir, depth))
		}
		add(rel).addFile(path.Base(f.Name))
	}
	last := *add("")
	out = slices.DeleteFunc(out, func(b Branch) bool { return b.Path == "" })
	slices.SortFunc(out, func(a, b Branch) int { return strings.Compare(a.Path, b.Path) })
	return markParts(append(out, last)), nil
}

func (b *Branch) addFile(name string) {
	_, weights := modelfiles.ParseName(name)
	b.Weights = b.Weights || weights
	b.Parts = b.Parts || modelfiles.IsPart(name)
}

// markParts clears Parts except for folders called "sharded" in a folder with weights. Elsewhere, the parts are the
// only copy of the weights.
func markParts(branches []Branch) []Branch {
	weights := map[string]bool{}
	for _, b := range branches {
		weights[b.Path] = b.Weights && !b.Parts
	}
	for i := range branches {
		b := &branches[i]
		above := strings.TrimSuffix(strings.TrimSuffix(b.Path, "sharded"), "/")
		b.Parts = b.Parts && path.Base(b.Path) == "sharded" && weights[above]
		b.Weights = b.Weights && !b.Parts
	}
	return branches
}

func tooDeep(dir string, depth int) error {
	return errs.New(errs.ErrNotSupported, "this folder is %d levels below %s, but at most %d are searched", depth,
		errs.RedactURI(dir), maxDepth)
}

// siblings is the maximum number of names that are read from a folder.
const siblings = 4096

// missingPath returns an error with a suggestion for a local path that does not exist, or nil if it exists.
func missingPath(path string) error {
	if _, err := os.Lstat(path); !errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	hint := ""
	switch dir := filepath.Dir(path); {
	case strings.HasPrefix(path, "~") || strings.Contains(path, "/~"):
		hint = "; ~ is not expanded here: write the full path, or use os.path.expanduser(path)"
	case strings.ContainsAny(path, "*?["):
		hint = "; patterns are not expanded here: list the files one by one"
	case !isDir(dir):
		for !isDir(filepath.Dir(dir)) {
			dir = filepath.Dir(dir)
		}
		hint = "; no such folder: " + dir
		if mayBeRepository(path) {
			hint += "; for a model on the Hugging Face Hub, use hf://" + filepath.Base(dir) + "/" + filepath.Base(path)
		}
	case isFile(path + modelfiles.IndexSuffix):
		hint = "; it was saved in shards: name " + path + modelfiles.IndexSuffix + ", or the folder"
	default:
		if best := near.Best(filepath.Base(path), namesIn(dir)); best != "" {
			hint = "; did you mean " + filepath.Join(dir, best) + "?"
		}
	}
	return placeError(path, errs.New(errs.ErrNotFound, "no such file or directory%s", hint))
}

func isFile(path string) bool {
	st, err := os.Stat(path)
	return err == nil && st.Mode().IsRegular()
}

func isDir(path string) bool {
	st, err := os.Stat(path)
	return err == nil && st.IsDir()
}

// mayBeRepository reports whether a path, relative to the working folder, looks like a Hub repository: owner/name.
func mayBeRepository(path string) bool {
	if filepath.IsAbs(path) {
		here, err := os.Getwd()
		if err != nil {
			return false
		}
		if path, err = filepath.Rel(here, path); err != nil {
			return false
		}
	}
	return strings.Count(path, "/") == 1 && !strings.HasPrefix(path, ".") && !strings.HasSuffix(path, suffix)
}

// namesIn returns at most siblings names of a folder.
func namesIn(dir string) []string {
	d, err := os.Open(dir)
	if err != nil {
		return nil
	}
	defer d.Close()
	names, _ := d.Readdirnames(siblings) // after an error, those read so far
	return names
}

// foldersBelow describes what a folder without a model contains instead: files of another program, or direct
// subfolders with weights, such as those of a diffusers pipeline. names are the folder's files.
func foldersBelow(dir string, names []string) string {
	if hint := nameSnapshots(dir); hint != "" {
		return ": " + hint
	}
	if kind := modelfiles.KindOfFolder(names); kind != nil {
		return ": it holds " + kind.String()
	}
	found, _ := filepath.Glob(source.EscapeGlob(strings.TrimSuffix(dir, "/")) + "/*/*" + suffix)
	var below []string
	for _, path := range found { // sorted by name
		if name := filepath.Base(filepath.Dir(path)); len(below) == 0 || below[len(below)-1] != name {
			below = append(below, name)
		}
	}
	if len(below) == 0 {
		return ofTorch(dir)
	}
	return ": open one of its subfolders (" + strings.Join(below[:min(len(below), 8)], ", ") + ")"
}

// ofTorch returns a hint that names a file in the folder that torch.save may have written, or "".
func ofTorch(dir string) string {
	names := namesIn(dir)
	slices.Sort(names)
	for _, name := range names {
		if slices.Contains([]string{".bin", ".pt", ".pth", ".ckpt"}, filepath.Ext(name)) {
			return "; it has " + name + ": if it is a torch.save file, `overwire compress` and `convert` " +
				"(overwire.convert) can read it"
		}
	}
	return ""
}

// nameSnapshots says which path to use instead of a model's top folder in a Hugging Face cache. It returns "" for
// other folders.
func nameSnapshots(dir string) string {
	if !isDir(filepath.Join(dir, "blobs")) || !isDir(filepath.Join(dir, "snapshots")) {
		return ""
	}
	hint := "this is a model's top folder in a Hugging Face cache: name one of its snapshots"
	if names := namesIn(filepath.Join(dir, "snapshots")); len(names) > 0 {
		hint += ", such as " + filepath.Join(dir, "snapshots", names[0])
	}
	return hint
}
