// Package companions finds and copies the auxiliary files of a folder of weights:
// config.json, a tokenizer, the folders of a pipeline that hold no weights.
//
// A link is followed to a file of the folder itself, and from a snapshot of a Hugging
// Face cache to that cache's blobs; the copy is a plain file. Other links are not
// copied: a folder from a stranger must not copy files of this machine. Neither are hidden files.
// The caller gets the names of files that were not copied.
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

// MaxOther is the size up to which weights in other formats are copied along: the
// small ones are often no weights (training_args.bin).
const MaxOther = 64 << 20

// OtherWeights are the extensions of weights in other formats.
var OtherWeights = []string{
	".bin", ".ckpt", ".gguf", ".ggml", ".h5", ".keras", ".mlmodel", ".msgpack", ".nemo", ".npz", ".onnx", ".onnx_data",
	".ot", ".pb", ".pdparams",
	".pkl", ".pt", ".pth", ".tensors", ".tflite",
}

// A Folder says where companions are looked for.
type Folder struct {
	Path string
	// Root is the folder that links may lead into; "": Path.
	Root string
	// Avoid is the folder that is written; it may be Path itself, which then has none.
	Avoid string
	// Below says that the caller visits the folders below Path.
	Below bool
	// Open opens the files of a remote folder, and Files are those in it and below it.
	Open  func(ctx context.Context, uri string) (source.Source, error)
	Files []source.Entry
}

// A File is one companion.
type File struct {
	Name string
	Path string // links followed
	Size int64
	Mode fs.FileMode // of permissions; 0: of a remote one, which has none

	open func(ctx context.Context, uri string) (source.Source, error) // of a remote one
}

// Find lists the companions of a folder, those named in taken left out, and the paths
// of files that are not copied. Only a folder has any.
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
		path := strings.TrimSuffix(in.Path, "/") + "/" + e.Name() // ".." stays, as the system takes it
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

// isWeights reports whether a name is that of weights or of their index.
func isWeights(name string) bool {
	_, ok := modelfiles.ParseName(strings.TrimLeft(name, "."))
	return ok
}

// OtherFormat is the extension of a name that is one of weights in another format; "" for
// any other name.
func OtherFormat(name string) string {
	if ext := strings.ToLower(filepath.Ext(name)); slices.Contains(OtherWeights, ext) {
		return ext
	}
	return ""
}

// fits reports whether a file is not too long to be copied along.
func fits(name string, size int64) bool { return size <= MaxOther || OtherFormat(name) == "" }

// findCompanion finds the file that a name in the folder leads to; ok is false if it
// must not be copied.
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

// faultOf is the error of a disk or of memory; nil if a file is absent or not readable for this user.
func faultOf(err error) error {
	fault := errs.FromOS(err)
	if _, system := errors.AsType[syscall.Errno](err); system &&
		(errors.Is(fault, errs.ErrIO) || errors.Is(fault, errs.ErrMemory)) {
		return fault
	}
	return nil
}

// followWithin follows a link to a file of the folder root, or of the blobs of the Hugging
// Face cache that root is a snapshot of.
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

// step is how many bytes of a copied file are in memory.
const step = 1 << 20

// Copy passes the bytes of f to write. It fails if the size has changed since
// f was found, or the bytes change while they are read.
func Copy(ctx context.Context, f File, write func(p []byte, off int64) error) error {
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
