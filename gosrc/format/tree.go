package format

// This file finds the models of a folder and its subfolders.

import (
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/modelfiles"
	"github.com/overwire/overwire/gosrc/internal/regular"
	"github.com/overwire/overwire/gosrc/source"
)

// maxDepth is how many levels of subfolders are searched.
const maxDepth = 8

// A Branch is a folder in a tree of models: a diffusers pipeline has one for each part.
type Branch struct {
	Path    string // relative to the tree's top folder; "" is that folder itself
	Weights bool   // whether a model is in it
}

// Tree returns the subfolders of dir that contain files, and dir itself last, because
// what names the others (model_index.json) is written last. Hidden folders, links and
// avoid, the folder that is written, are omitted. Folders more than maxDepth below dir
// are refused. If dir is not a local folder, there are no branches.
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
				_, weights := modelfiles.ParseName(e.Name())
				b.Weights = b.Weights || weights
			}
		}
		if files || rel == "" {
			out = append(out, b)
		}
		return nil
	}
	return out, walk("", 0)
}

// RemoteTree is Tree for the remote folder dir, with these files in it and its
// subfolders.
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
		_, weights := modelfiles.ParseName(path.Base(f.Name))
		b := add(rel)
		b.Weights = b.Weights || weights
	}
	last := *add("")
	out = slices.DeleteFunc(out, func(b Branch) bool { return b.Path == "" })
	slices.SortFunc(out, func(a, b Branch) int { return strings.Compare(a.Path, b.Path) })
	return append(out, last), nil
}

func tooDeep(dir string, depth int) error {
	return errs.New(errs.ErrNotSupported, "this folder is %d levels below %s, but at most %d are searched", depth,
		errs.RedactURI(dir), maxDepth)
}
