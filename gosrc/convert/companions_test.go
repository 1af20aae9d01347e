package convert

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/overwire/overwire/gosrc/companions"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/format"
	"github.com/overwire/overwire/gosrc/save"
	"github.com/overwire/overwire/gosrc/stored"
)

// Links within the folder and into the blobs of a Hugging Face cache are copied as plain files. Other links are not
// copied, and are listed.
func TestCompanionLinks(t *testing.T) {
	top := t.TempDir()
	secret := filepath.Join(top, "secret")
	put(t, top, map[string]string{"secret": "of this machine", "hub/blobs/aa": "blob", "hub/refs/main": "no blob", "hub/blobs/deep/aa": "no blob"})
	src := filepath.Join(top, "hub", "snapshots", "rev")
	put(t, src, map[string]string{
		"config.json": "{}", "inside.json": "-> config.json", "unet/up.json": "-> ../config.json", "unet/twice.json": "-> ../inside.json",
		"blob.json": "-> ../../blobs/aa", "unet/blob.json": "-> ../../../blobs/aa",
		"out.json": "-> " + secret, "up.json": "-> ../../../secret", "unet/twice out.json": "-> ../out.json", "ref.json": "-> ../../refs/main",
		"deep.json": "-> ../../blobs/deep/aa", "folder": "-> unet", "passwd": "-> /etc/passwd", "none": "-> nowhere", ".hidden": "x",
		"weights.json": "-> model.safetensors", "unet/.git/config": "x",
	})
	in := some(newRand(t))
	made := filepath.Join(top, "made.safetensors") // a save would add an extension
	write(t, save.Spec{Path: made}, in)
	if err := os.Rename(made, filepath.Join(top, "hub", "blobs", "bb")); err != nil {
		t.Fatal(err)
	}
	put(t, src, map[string]string{"unet/model.safetensors": "-> ../../../blobs/bb", "model.safetensors": "-> unet/model.safetensors"})
	dst := filepath.Join(top, "out")
	rep := convert(t, []string{src}, dst, save.Spec{Compress: true})
	want := []string{"blob.json", "config.json", "inside.json", "unet/blob.json", "unet/twice.json", "unet/up.json"}
	want = append(want, "weights.json") // copied like any other link within the folder
	slices.Sort(want)
	if got := names(dst, rep.Copied); !slices.Equal(got, want) {
		t.Errorf("copied %q", got)
	}
	left := []string{".hidden", "deep.json", "folder", "none", "out.json", "passwd", "ref.json", "unet/.git", "unet/twice out.json", "up.json"}
	if got := names(src, rep.Left); !slices.Equal(got, left) {
		t.Errorf("left %q", got)
	}
	_ = filepath.WalkDir(dst, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.Type()&fs.ModeSymlink != 0 {
			t.Error(path, err)
		}
		return nil
	})
	same(t, in, read(t, filepath.Join(dst, "unet")))

	// If the folder blobs is itself a link, it does not count as the blobs of a cache.
	put(t, top, map[string]string{"bad/blobs": "-> .."})
	src = filepath.Join(top, "bad", "snapshots", "rev")
	put(t, src, map[string]string{"out.json": "-> ../../blobs/secret"})
	write(t, save.Spec{Path: filepath.Join(src, "model.safetensors")}, in)
	if rep = convert(t, []string{src}, filepath.Join(top, "out2"), save.Spec{}); len(rep.Copied) != 0 ||
		len(rep.Left) != 1 {
		t.Errorf("%+v", rep)
	}
}

// The cache folder of a Hugging Face model is refused. The error names the snapshot to use instead.
func TestConvertWholeCache(t *testing.T) {
	src, dst := t.TempDir(), filepath.Join(t.TempDir(), "out")
	put(t, src, map[string]string{"blobs/aa": "large", "refs/main": "rev", "snapshots/rev/config.json": "-> ../../blobs/aa"})
	write(t, save.Spec{Path: filepath.Join(src, "snapshots", "rev", "model.safetensors")}, some(newRand(t)))
	_, err := Convert(bg, nil, []string{src}, dst, save.Spec{Compress: true})
	if !errors.Is(err, errs.ErrArgument) || !strings.Contains(err.Error(), filepath.Join(src, "snapshots", "rev")) {
		t.Error(err)
	}
	if _, err := os.Stat(dst); err == nil {
		t.Error("something was written")
	}
	if _, err := stored.Open(bg, []string{src}, format.Access{}, false); err == nil ||
		!strings.Contains(err.Error(), filepath.Join(src, "snapshots", "rev")) {
		t.Error(err)
	}
}

// A converted file has no more permissions than its source, and the umask restricts them further. A replaced file keeps
// its mode.
func TestConvertModes(t *testing.T) {
	old := syscall.Umask(0o027)
	defer syscall.Umask(old)
	src, dst := t.TempDir(), filepath.Join(t.TempDir(), "out")
	at := func(name string) string { return filepath.Join(src, name) }
	put(t, src, map[string]string{"private.json": "{}", "open.json": "{}", "read only.json": "{}", "sub/program": "#!"})
	in := some(newRand(t))
	write(t, save.Spec{Path: at("model.safetensors"), Shard: 700000}, in)
	shards, _ := filepath.Glob(at("*-of-*"))
	modes := map[string]fs.FileMode{
		"private.json": 0o600, "open.json": 0o666, "read only.json": 0o444, "sub/program": 0o755,
		filepath.Base(shards[0]): 0o600, filepath.Base(shards[1]): 0o644, "model.safetensors.index.json": 0o644,
	}
	for name, mode := range modes {
		if err := os.Chmod(at(name), mode); err != nil {
			t.Fatal(err)
		}
	}
	check := func(want map[string]fs.FileMode) {
		t.Helper()
		for name, mode := range want {
			if st, err := os.Stat(filepath.Join(dst, name)); err != nil || st.Mode().Perm() != mode {
				t.Errorf("%s: %v %v, want %v", name, st.Mode(), err, mode)
			}
		}
	}
	want := map[string]fs.FileMode{
		"private.json": 0o600, "open.json": 0o640, "read only.json": 0o640, "sub/program": 0o640,
		filepath.Base(shards[0]): 0o600, filepath.Base(shards[1]): 0o640, "model.safetensors.index.json": 0o600,
	}
	convert(t, []string{src}, dst, save.Spec{Compress: true})
	check(want)
	if err := os.Chmod(filepath.Join(dst, "private.json"), 0o664); err != nil {
		t.Fatal(err)
	}
	for k, name := range filesOf(t, dst, convert(t, []string{src}, dst+"/", save.Spec{Compress: true})) {
		if old := filepath.Base(shards[k]); want[old] != 0 {
			want[name] = want[old]
			delete(want, old)
		}
	}
	want["private.json"] = 0o664
	check(want)
	one := filepath.Join(dst, "one.safetensors")
	convert(t, []string{src}, one, save.Spec{Compress: true, Beside: true})
	check(map[string]fs.FileMode{"one.safetensors": 0o600}) // its first shard is private
}

// filesOf returns the shards that a report has written into a folder, by name.
func filesOf(t *testing.T, dir string, rep save.Report) (out []string) {
	t.Helper()
	for _, path := range rep.Files {
		if strings.Contains(path, "-of-") {
			out = append(out, filepath.Base(path))
		}
	}
	if found, _ := filepath.Glob(filepath.Join(dir, "*-of-*")); len(found) != len(out) {
		t.Fatalf("the folder has %q, the model %q", found, out)
	}
	return out
}

// An auxiliary file may have any size. If it changes while it is copied, the save fails. Large weights of other formats
// are not copied.
func TestCompanionSizes(t *testing.T) {
	src, dst := t.TempDir(), filepath.Join(t.TempDir(), "out")
	write(t, save.Spec{Path: filepath.Join(src, "model.safetensors")}, some(newRand(t)))
	text := strings.Repeat("odd ", 1<<19) + "end"
	put(t, src, map[string]string{"vocab.json": text, "empty.txt": "", "args.bin": "small", "large.bin": "", "other.PT": "", "step.txt": text[:1<<20]})
	for _, name := range []string{"large.bin", "other.PT"} {
		if err := os.Truncate(filepath.Join(src, name), 64<<20+1); err != nil {
			t.Fatal(err)
		}
	}
	rep := convert(t, []string{src}, dst, save.Spec{})
	if got := names(dst, rep.Copied); !slices.Equal(got, []string{"args.bin", "empty.txt", "step.txt", "vocab.json"}) {
		t.Errorf("copied %q", got)
	}
	if got := names(src, rep.Left); !slices.Equal(got, []string{"large.bin", "other.PT"}) {
		t.Errorf("left %q", got)
	}
	for name, want := range map[string]string{"vocab.json": text, "empty.txt": "", "step.txt": text[:1<<20]} {
		if b, err := os.ReadFile(filepath.Join(dst, name)); err != nil || string(b) != want {
			t.Errorf("%s: %d bytes, %v", name, len(b), err)
		}
	}
	for _, size := range []int64{int64(len(text)) - 1, int64(len(text)) + 1} {
		spec := save.Spec{Path: filepath.Join(dst, "changed")}
		to, err := save.Resolve(spec.Path, &spec)
		if err != nil {
			t.Fatal(err)
		}
		f := copyOf(companions.File{Path: filepath.Join(src, "vocab.json"), Size: size}, spec.Path)
		_, err = save.NewWriter(to, &spec, nil).Write(bg, []save.File{{File: f}})
		if !errors.Is(err, errs.ErrCorrupt) ||
			!strings.Contains(err.Error(), "vocab.json") {
			t.Error(err)
		}
	}
	noTemps(t, dst)
}

// Folders below the depth limit are refused, not dropped.
func TestConvertDepth(t *testing.T) {
	src := t.TempDir()
	write(t, save.Spec{Path: filepath.Join(src, "model.safetensors")}, some(newRand(t)))
	put(t, src, map[string]string{strings.Repeat("d/", 8) + "x": "8"})
	convert(t, []string{src}, filepath.Join(t.TempDir(), "out"), save.Spec{})
	put(t, src, map[string]string{strings.Repeat("d/", 9) + "x": "9"})
	if _, err := Convert(bg, nil, []string{src}, filepath.Join(t.TempDir(), "out"),
		save.Spec{}); !errors.Is(err, errs.ErrNotSupported) {
		t.Error(err)
	}
}
