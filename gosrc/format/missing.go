package format

// This file suggests what a user may have meant by a missing path or by a folder without a model.

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/modelfiles"
	"github.com/overwire/overwire/gosrc/internal/near"
	"github.com/overwire/overwire/gosrc/source"
)

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
