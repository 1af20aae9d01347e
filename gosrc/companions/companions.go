// Package companions finds and copies the auxiliary files of a weights folder: config.json, a
// tokenizer, subfolders of a pipeline without weights.
//
// A symbolic link is copied as a plain file if it leads to a file in the same folder, or from a snapshot in a Hugging
// Face cache to the cache's blobs. Other links are not copied, because an untrusted folder could use them to copy other
// files of this machine. Hidden files are not copied. The caller gets the names of files that were not copied.
package companions

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/modelfiles"
	"github.com/overwire/overwire/gosrc/internal/regular"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/source/file"
)

// MaxOther is the maximum size of copied files with extensions of other weight formats.
// Small files often contain no weights, e.g. training_args.bin.
const MaxOther = 64 << 20

// OtherWeights are the extensions of other weight formats.
var OtherWeights = []string{
	".bin", ".ckpt", ".gguf", ".ggml", ".h5", ".keras", ".mlmodel", ".msgpack", ".nemo", ".npz", ".onnx", ".onnx_data",
	".ot", ".pb", ".pdparams", ".pkl", ".pt", ".pth", ".tensors", ".tflite",
}

// OtherFiles are the extensions of auxiliary files, which never have weights.
var OtherFiles = []string{".jinja", ".json", ".md", ".py", ".txt", ".yaml", ".yml"}

// A Folder describes where to look for auxiliary files.
type Folder struct {
	Path string
	// Root is the folder that links may lead into; "" means Path.
	Root string
	// Avoid is the folder that is being written. If it is Path, there are no files to copy.
	Avoid string
	// Below means that the caller handles the subfolders of Path.
	Below bool
	// Open opens the files of a remote folder. Files lists the files in the folder and its subfolders.
	Open  func(ctx context.Context, uri string) (source.Source, error)
	Files []source.Entry
}

// A File is one auxiliary file.
type File struct {
	Name string
	Path string // symbolic links are resolved
	Size int64
	Mode fs.FileMode // permissions; 0 for a remote file, which has none

	open func(ctx context.Context, uri string) (source.Source, error) // only set for a remote file
}

// Find lists the auxiliary files of a folder, except those in taken, and the paths of
// files that are not copied. If the path is not a folder, both lists are empty.
func Find(in Folder, taken map[string]bool) (found []File, left []string, err error) {
	if source.Remote(in.Path) {
		found, left = in.remote(taken)
		return found, left, nil
	}
	here, _ := os.Stat(in.Avoid)
	st, err := regular.FindTarget(in.Path)
	if st == nil || !st.IsDir() || here != nil && os.SameFile(st, here) {
		return nil, nil, errs.In("read", in.Path, err)
	}
	entries, err := os.ReadDir(in.Path)
	if err != nil {
		return nil, nil, errs.In("read", in.Path, errs.FromOS(err))
	}
	root := in.Root
	if root == "" {
		root = in.Path
	}
	for _, e := range entries {
		path := strings.TrimSuffix(in.Path, "/") + "/" + e.Name() // not cleaned: the system resolves ".."
		switch {
		case taken[e.Name()]:
		case e.IsDir():
			if st, err := e.Info(); err == nil && here != nil && os.SameFile(st, here) {
				continue
			}
			if !in.Below || strings.HasPrefix(e.Name(), ".") {
				left = append(left, path)
			}
		default:
			f, ok, err := findCompanion(root, path)
			if err != nil {
				return nil, nil, errs.In("read", path, err)
			}
			if ok {
				found = append(found, f)
			} else {
				left = append(left, path)
			}
		}
	}
	return found, left, nil
}

// remote is Find for a remote folder.
func (in Folder) remote(taken map[string]bool) (found []File, left []string) {
	if in.Path == source.Directory(in.Avoid) {
		return nil, nil
	}
	below := map[string]bool{}
	for _, e := range in.Files {
		first, _, deep := strings.Cut(e.Name, "/")
		uri := source.Beside(in.Path, first)
		switch {
		case deep && (in.Below && !strings.HasPrefix(first, ".") || below[first] ||
			source.Remote(in.Avoid) && strings.HasPrefix(uri+"/", source.Directory(in.Avoid))):
		case deep:
			below[first] = true
			left = append(left, uri+"/")
		case taken[first]:
		case strings.HasPrefix(first, ".") || isWeights(first) || !fits(first, e.Size):
			left = append(left, uri)
		default:
			found = append(found, File{Name: first, Path: uri, Size: e.Size, open: in.Open})
		}
	}
	return found, left
}

// isWeights reports whether a name is that of a weights file or its index.
func isWeights(name string) bool {
	_, ok := modelfiles.ParseName(strings.TrimLeft(name, "."))
	return ok
}

// OtherFormat returns the extension of a name if it belongs to another weight format or to an auxiliary file.
// Otherwise it returns "".
func OtherFormat(name string) string {
	ext := strings.ToLower(filepath.Ext(name))
	if slices.Contains(OtherWeights, ext) || slices.Contains(OtherFiles, ext) {
		return ext
	}
	return ""
}

// fits reports whether a file is small enough to be copied.
func fits(name string, size int64) bool {
	return size <= MaxOther || !slices.Contains(OtherWeights, strings.ToLower(filepath.Ext(name)))
}

// findCompanion finds the file that a name in the folder leads to. ok is false if it must not be copied.
func findCompanion(root, path string) (f File, ok bool, err error) {
	f = File{Name: filepath.Base(path), Path: path}
	if strings.HasPrefix(f.Name, ".") || isWeights(f.Name) {
		return f, false, nil
	}
	st, err := os.Lstat(path)
	if err == nil && st.Mode()&fs.ModeSymlink != 0 {
		if f.Path, ok, err = followWithin(root, path); err == nil {
			if !ok || isWeights(filepath.Base(f.Path)) {
				return f, false, nil
			}
			st, err = os.Stat(f.Path)
		}
	}
	if err != nil {
		return f, false, faultOf(err)
	}
	f.Size, f.Mode = st.Size(), st.Mode().Perm()
	return f, st.Mode().IsRegular() && fits(f.Name, f.Size), nil
}

// faultOf returns err if the disk failed or memory is exhausted. It returns nil if the file
// is only missing or unreadable for this user.
func faultOf(err error) error {
	fault := errs.FromOS(err)
	if _, system := errors.AsType[syscall.Errno](err); system &&
		(errors.Is(fault, errs.ErrIO) || errors.Is(fault, errs.ErrMemory)) {
		return fault
	}
	return nil
}

// followWithin resolves a link. ok is false if it leads neither into the folder root nor, if
// root is a snapshot in a Hugging Face cache, to the cache's blobs.
func followWithin(root, link string) (real string, ok bool, err error) {
	if real, err = filepath.EvalSymlinks(link); err != nil {
		return "", false, err
	}
	dir, err := filepath.EvalSymlinks(root)
	if err != nil {
		return "", false, err
	}
	if real, err = filepath.Abs(real); err != nil {
		return "", false, err
	}
	if dir, err = filepath.Abs(dir); err != nil {
		return "", false, err
	}
	if strings.HasPrefix(real, strings.TrimSuffix(dir, "/")+"/") {
		return real, true, nil
	}
	cache, _, isSnapshot := strings.Cut(dir+"/", "/snapshots/")
	return real, isSnapshot && filepath.Dir(real) == cache+"/blobs", nil
}

// step is how many bytes Copy reads at a time.
const step = 1 << 20

// CopyFile passes the bytes of f to write. It fails if the file's size has changed since Find,
// or if the file is written to during the copy.
func CopyFile(ctx context.Context, f File, write func(p []byte, off int64) error) error {
	open := f.open
	if open == nil {
		open = func(_ context.Context, path string) (source.Source, error) { return file.Open(path) }
	}
	s, err := open(ctx, f.Path)
	if err != nil {
		return err
	}
	defer s.Close()
	if s.Size() != f.Size {
		return errs.In("read", f.Path, errs.New(errs.ErrCorrupt, "the file changed while it was copied: copy it again"))
	}
	block := make([]byte, min(step, f.Size))
	for off := int64(0); off < f.Size; off += step {
		p := block[:min(step, f.Size-off)]
		if err := s.ReadAt(ctx, p, off); err != nil {
			return err
		}
		if err := write(p, off); err != nil {
			return err
		}
	}
	return source.Unwritten(s)
}
