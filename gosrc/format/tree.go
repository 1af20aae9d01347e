package format

// This file finds the models in a folder and its subfolders.

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
