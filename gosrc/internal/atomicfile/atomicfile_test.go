package atomicfile

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/spawn/spawntest"
)

// A watch inspects the temporary file after every call, as another process could.
type watch struct {
	Disk
	t    *testing.T
	wide fs.FileMode // permissions that the temporary file must never have
	temp string
	seen int
}

func (w *watch) look(after string) {
	st, err := os.Lstat(w.temp)
	if err != nil {
		return // it has its final name
	}
	w.seen++
	if got := st.Mode().Perm() & w.wide; got != 0 {
		w.t.Errorf("after %s, the temporary file has the permissions %v", after, got)
	}
}

func (w *watch) Create(path string, mode fs.FileMode) (File, error) {
	f, err := w.Disk.Create(path, mode)
	w.temp = path
	w.look("create")
	return &watched{f, w}, err
}

func (w *watch) Rename(from, to string) error {
	w.look("everything")
	return w.Disk.Rename(from, to)
}

type watched struct {
	File
	w *watch
}

func (f *watched) WriteAt(p []byte, off int64) (int, error) {
	defer f.w.look("write")
	return f.File.WriteAt(p, off)
}

func (f *watched) Truncate(n int64) error {
	defer f.w.look("truncate")
	return f.File.Truncate(n)
}

func (f *watched) Chmod(m fs.FileMode) error {
	defer f.w.look("chmod")
	return f.File.Chmod(m)
}

func (f *watched) Chown(uid, gid int) error {
	defer f.w.look("chown")
	return f.File.Chown(uid, gid)
}

func (f *watched) Sync() error {
	defer f.w.look("sync")
	return f.File.Sync()
}

func TestModes(t *testing.T) {
	// A replaced file's mode is preserved. A new file gets the default mode less the umask, or the mode of its
	// template. Links are preserved, and other names still refer to the old bytes. At no time do more users
	// have access to the temporary file than to the finished one.
	for _, mask := range []int{0o022, 0o027, 0o077} {
		old := syscall.Umask(mask)
		for _, c := range []struct {
			name string
			make func(dir string) (path, like string)
			want fs.FileMode
		}{
			{"absent", func(dir string) (string, string) { return dir + "/f", "" }, 0o666 &^ fs.FileMode(mask)},
			{"0600", func(dir string) (string, string) { return put(t, dir+"/f", 0o600), "" }, 0o600},
			{"0640", func(dir string) (string, string) { return put(t, dir+"/f", 0o640), "" }, 0o640},
			{"0666", func(dir string) (string, string) { return put(t, dir+"/f", 0o666), "" }, 0o666},
			{"0755", func(dir string) (string, string) { return put(t, dir+"/f", 0o755), "" }, 0o755},
			{"set-id", func(dir string) (string, string) { return put(t, dir+"/f", 0o755|fs.ModeSetuid), "" }, 0o755},
			{"like 0600", func(dir string) (string, string) { return dir + "/f", put(t, dir+"/g", 0o600) }, 0o600},
			{"like nothing", func(dir string) (string, string) {
				return dir + "/f", dir + "/g"
			}, 0o666 &^ fs.FileMode(mask)},
			{"0640, like 0600", func(dir string) (string, string) {
				return put(t, dir+"/f", 0o640), put(t, dir+"/g", 0o600)
			}, 0o640},
			{"link", func(dir string) (string, string) {
				return link(t, put(t, dir+"/r", 0o600), dir+"/f"), ""
			}, 0o600},
			{"relative link", func(dir string) (string, string) {
				put(t, dir+"/sub/r", 0o600)
				return link(t, "sub/r", dir+"/f"), ""
			}, 0o600},
			{"dangling link", func(dir string) (string, string) {
				return link(t, "sub/r", dir+"/f"), ""
			}, 0o666 &^ fs.FileMode(mask)},
			{"chain of links", func(dir string) (string, string) {
				put(t, dir+"/sub/r", 0o600)
				link(t, "sub/r", dir+"/2")
				link(t, dir+"/2", dir+"/1")
				return link(t, "1", dir+"/f"), ""
			}, 0o600},
			{"link out of a linked folder", func(dir string) (string, string) {
				// dir/here -> dir/sub/deep, which contains l -> ../r: it refers to sub/r, not dir/r
				put(t, dir+"/sub/r", 0o600)
				put(t, dir+"/r", 0o644)
				link(t, "../r", dir+"/sub/deep/l")
				link(t, "sub/deep", dir+"/here")
				return dir + "/here/l", ""
			}, 0o600},
		} {
			dir := filepath.Join(t.TempDir(), "a folder")
			if err := os.MkdirAll(dir+"/sub/deep", 0o777); err != nil {
				t.Fatal(err)
			}
			path, like := c.make(dir)
			before, _ := os.Lstat(path)
			w := &watch{t: t, wide: 0o777 &^ c.want}
			target, err := New(w, path, like, 0)
			if err != nil {
				t.Fatalf("%s: %v", c.name, err)
			}
			if err := errors.Join(target.Write([]byte("new"), 0), target.Finish(3),
				Publish(w, []*Target{target})); err != nil {
				t.Fatalf("%s: %v", c.name, err)
			}
			target.Drop()
			b, _ := os.ReadFile(path)
			st, _ := os.Stat(path)
			if string(b) != "new" || st.Mode() != c.want {
				t.Errorf("umask %o, %s: %q with %v, want %v", mask, c.name, b, st.Mode(), c.want)
			}
			if now, _ := os.Lstat(path); before != nil && now.Mode().Type() != before.Mode().Type() {
				t.Errorf("%s: the mode changed from %v to %v", c.name, before.Mode(), now.Mode())
			}
			if w.seen < 4 {
				t.Errorf("%s: the file was inspected %d times", c.name, w.seen)
			}
			none(t, dir)
			if c.name == "link out of a linked folder" {
				if b, _ := os.ReadFile(dir + "/r"); string(b) != "old" {
					t.Errorf("%s: the wrong file was replaced", c.name)
				}
			}
		}
		if now := syscall.Umask(old); now != mask {
			t.Errorf("the umask changed from %o to %o", mask, now)
		}
	}
}

func put(t *testing.T, path string, mode fs.FileMode) string {
	t.Helper()
	if err := errors.Join(os.WriteFile(path, []byte("old"), 0o600), os.Chmod(path, mode)); err != nil {
		t.Fatal(err)
	}
	return path
}

func link(t *testing.T, to, path string) string {
	t.Helper()
	if err := os.Symlink(to, path); err != nil {
		t.Fatal(err)
	}
	return path
}

// none fails if there is a hidden file below a folder.
func none(t *testing.T, dir string) {
	t.Helper()
	_ = filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err == nil && strings.HasPrefix(d.Name(), ".") {
			t.Errorf("left behind: %s", path)
		}
		return err
	})
}

func TestHardLink(t *testing.T) {
	// Another name of the old file still refers to the old bytes and mode.
	dir := t.TempDir()
	put(t, dir+"/f", 0o600)
	if err := errors.Join(os.Link(dir+"/f", dir+"/other"), Write(t.Context(), dir+"/f", []byte("new"))); err != nil {
		t.Fatal(err)
	}
	b, _ := os.ReadFile(dir + "/other")
	if st, _ := os.Stat(dir + "/f"); string(b) != "old" || st.Mode() != 0o600 {
		t.Fatalf("%q, %v", b, st.Mode())
	}
}

// acl returns a POSIX ACL in the kernel's format: entries of tag, permissions, id.
func acl(entries ...[3]uint32) []byte {
	b := binary.LittleEndian.AppendUint32(nil, 2)
	for _, e := range entries {
		b = binary.LittleEndian.AppendUint16(b, uint16(e[0]))
		b = binary.LittleEndian.AppendUint16(b, uint16(e[1]))
		b = binary.LittleEndian.AppendUint32(b, e[2])
	}
	return b
}

func TestACL(t *testing.T) {
	// Users with access through the old file's ACL retain it, and the group gets no more rights than it had in
	// the ACL. A folder's default ACL does not give more users access to a replaced file.
	const name = "system.posix_acl_access"
	none := uint32(1<<32 - 1)
	dir := t.TempDir()
	for path, what := range map[string]struct {
		acl  []byte
		kind string
	}{
		// owner rw, user 1234 r, group nothing, mask r, others nothing
		put(t, dir+"/f", 0o640): {acl([3]uint32{1, 6, none}, [3]uint32{2, 4, 1234}, [3]uint32{4, 0, none},
			[3]uint32{0x10, 4, none}, [3]uint32{0x20, 0, none}), name},
		dir: {acl([3]uint32{1, 7, none}, [3]uint32{2, 7, 4321}, [3]uint32{4, 7, none},
			[3]uint32{0x10, 7, none}, [3]uint32{0x20, 0, none}), "system.posix_acl_default"},
	} {
		if err := unix.Setxattr(path, what.kind, what.acl, 0); err != nil {
			t.Skip("no ACLs here:", err)
		}
	}
	get := func(path string) []byte {
		b := make([]byte, 1<<12)
		n, err := unix.Getxattr(path, name, b)
		if err != nil {
			return nil
		}
		return b[:n]
	}
	before := get(dir + "/f")
	put(t, dir+"/plain", 0o640)
	if err := unix.Removexattr(dir+"/plain", name); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{dir + "/f", dir + "/plain"} {
		if err := Write(t.Context(), path, []byte("new")); err != nil {
			t.Fatal(err)
		}
	}
	if !bytes.Equal(get(dir+"/f"), before) || before == nil {
		t.Errorf("the ACL changed from %x to %x", before, get(dir+"/f"))
	}
	if got := get(dir + "/plain"); got != nil {
		t.Errorf("the replaced file has an ACL: %x", got)
	}
	if st, _ := os.Stat(dir + "/plain"); st.Mode() != 0o640 {
		t.Error(st.Mode())
	}
}

func TestGroup(t *testing.T) {
	// If the writer is root, the new file has the owner and group of the old one.
	if os.Geteuid() != 0 {
		t.Skip("only root can change the owner of a file")
	}
	path := put(t, t.TempDir()+"/f", 0o640)
	if err := errors.Join(os.Chown(path, 1234, 4321), Write(t.Context(), path, nil)); err != nil {
		t.Fatal(err)
	}
	st, _ := os.Stat(path)
	if own := st.Sys().(*syscall.Stat_t); own.Uid != 1234 || own.Gid != 4321 || st.Mode() != 0o640 {
		t.Fatal(own.Uid, own.Gid, st.Mode())
	}
}

// A stubborn file refuses a change of its group.
type stubborn struct{ File }

func (f stubborn) Chown(int, int) error { return syscall.EPERM }

func TestGroupRefused(t *testing.T) {
	// If the group cannot be preserved, the writer's own group gets no more rights than other users.
	for old, want := range map[fs.FileMode]fs.FileMode{0o660: 0o600, 0o664: 0o644, 0o640: 0o600, 0o604: 0o604,
		0o666: 0o666, 0o600: 0o600} {
		path := put(t, t.TempDir()+"/f", old)
		target, err := New(Disk{}, path, "", 0)
		if err != nil {
			t.Fatal(err)
		}
		target.file = stubborn{target.file}
		err = target.Finish(0)
		if st, _ := os.Lstat(target.temp); err != nil || st.Mode() != want {
			t.Errorf("%o became %o, want %o (%v)", old, st.Mode(), want, err)
		}
		target.Drop()
	}
}

func TestRefused(t *testing.T) {
	// Only regular files are replaced, and a failure leaves no files.
	dir := t.TempDir()
	if err := errors.Join(syscall.Mkfifo(dir+"/fifo", 0o600), os.Symlink("loop", dir+"/loop"),
		os.Symlink("/dev/null", dir+"/null"), os.Mkdir(dir+"/sub", 0o777)); err != nil {
		t.Fatal(err)
	}
	for path, class := range map[string]error{
		dir + "/fifo": errs.ErrArgument, dir + "/loop": errs.ErrArgument, dir + "/null": errs.ErrArgument,
		"/dev/null":  errs.ErrArgument,
		dir + "/sub": errs.ErrArgument, dir + "/no/such": errs.ErrNotFound,
		dir + "/" + strings.Repeat("x", 256): errs.ErrArgument, dir + "/a\x00b": errs.ErrArgument,
	} {
		if err := Write(t.Context(), path, nil); !errors.Is(err, class) {
			t.Errorf("%q: %v", path, err)
		}
	}
	put(t, dir+"/f", 0o600)
	wrong := errors.New("wrong")
	if err := With(dir+"/f", func(f *os.File) error {
		_, _ = f.WriteString("half")
		return wrong
	}); !errors.Is(err, wrong) {
		t.Error(err)
	}
	if b, _ := os.ReadFile(dir + "/f"); string(b) != "old" {
		t.Errorf("%q", b)
	}
	if os.Geteuid() != 0 {
		_ = os.Chmod(dir, 0o500)
		defer func() { _ = os.Chmod(dir, 0o700) }()
		if err := Write(t.Context(), dir+"/f", nil); !errors.Is(err, errs.ErrPermission) {
			t.Error(err)
		}
	}
	none(t, dir)
}

func TestRename(t *testing.T) {
	// A file that another program wrote is published like a file of this package.
	dir := t.TempDir()
	put(t, dir+"/real", 0o600)
	link(t, "real", dir+"/f")
	put(t, dir+"/made", 0o600)
	if err := errors.Join(os.WriteFile(dir+"/made", []byte("new"), 0o600), Rename(dir+"/made", dir+"/f")); err != nil {
		t.Fatal(err)
	}
	b, _ := os.ReadFile(dir + "/real")
	st, _ := os.Lstat(dir + "/f")
	if string(b) != "new" || st.Mode().Type() != fs.ModeSymlink {
		t.Fatalf("%q, %v", b, st.Mode())
	}
	if err := Rename(dir+"/made", dir+"/f"); !errors.Is(err, errs.ErrNotFound) {
		t.Fatal(err)
	}
}

func TestNames(t *testing.T) {
	// Names may consist of any bytes, up to 255.
	dir := t.TempDir()
	names := []string{"caf\xe9", "caf\ufffd", "caf\xe8", " ", "a\nb", "%E9", "-f", "f.", "\xed\xa0\x80",
		strings.Repeat("\xff", 255), strings.Repeat("ü", 127), strings.Repeat("x", 254) + "\xc3"}
	for _, name := range names {
		if err := Write(t.Context(), dir+"/"+name, []byte(name)); err != nil {
			t.Errorf("%q: %v", name, err)
		}
	}
	es, _ := os.ReadDir(dir)
	var got []string
	for _, e := range es {
		b, _ := os.ReadFile(dir + "/" + e.Name())
		if string(b) != e.Name() {
			t.Errorf("%q contains %q", e.Name(), b)
		}
		got = append(got, e.Name())
	}
	slices.Sort(names)
	if !slices.Equal(got, names) {
		t.Errorf("%q", got)
	}
}

func TestOrphans(t *testing.T) {
	// The next save into a folder removes temporary files of killed saves. Those of running saves and of other
	// programs remain.
	dir := t.TempDir()
	p := filepath.Join(dir, "m")
	other := strings.Map(func(r rune) rune { return '0' + (r+1)%10 }, bootTag()) // as on another machine
	if other == bootTag() {
		t.Fatal(other)
	}
	here := func(name, digits string) string { return name + tempMark + bootTag() + digits }
	foreign := func(name, digits string) string { return name + tempMark + other + digits }
	hour, days := time.Hour, 48*time.Hour
	for _, f := range []struct {
		name string
		age  time.Duration
		held bool
		goes bool
	}{
		{name: here(".m", "89abcdef"), age: hour, goes: true},
		{name: here(".m", "76543210")}, // just created
		{name: here(".m", "00000000"), age: hour, held: true},
		{name: here(".other", "89abcdef"), age: hour, goes: true},
		{name: here("."+strings.Repeat("x", 200), "89abcdef"), age: hour, goes: true},
		{name: here(".other", "aaaaaaaa"), age: 2 * lockTime, goes: true},
		{name: here(".other", "76543210")},
		{name: here(".other", "00000000"), age: days, held: true},
		{name: foreign(".m", "11111111"), age: hour, goes: true},
		{name: foreign(".other", "89abcdef"), age: hour},
		{name: foreign(".other", "76543210"), age: days, goes: true},
		{name: foreign(".other", "00000000"), age: days, held: true},
		{name: ".m" + tempMark + "notes", age: days},
		{name: ".m" + tempMark + "0123456789abcdeF", age: days},
		{name: here("m", "89abcdef"), age: days},
		{name: ".m.tmp-0123456789abcdef", age: days},
		{name: "0123456789abcdef", age: days},
		{name: "a", age: days},
	} {
		q := filepath.Join(dir, f.name)
		if err := os.WriteFile(q, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		_ = os.Chtimes(q, time.Now(), time.Now().Add(-f.age))
		if f.held {
			held, err := os.Open(q)
			if err != nil {
				t.Fatal(err)
			}
			defer held.Close()
			if err := syscall.Flock(int(held.Fd()), syscall.LOCK_EX); err != nil {
				t.Skip("no locks here:", err)
			}
		}
		defer func() {
			if _, err := os.Stat(q); (err == nil) == f.goes {
				t.Errorf("%+v: %v", f, err)
			}
		}()
	}
	// Folders and links with such names are not removed.
	folder, link := filepath.Join(dir, here(".f", "89abcdef")), filepath.Join(dir, here(".l", "89abcdef"))
	if err := errors.Join(os.Mkdir(folder, 0o700), os.Symlink("a", link)); err != nil {
		t.Fatal(err)
	}
	if err := Write(t.Context(), p, nil); err != nil {
		t.Fatal(err)
	}
	for _, q := range []string{folder, link} {
		if _, err := os.Lstat(q); err != nil {
			t.Error(err)
		}
	}
}

// Files in the blobs folder of a Hugging Face cache are not written, neither by their names nor through a
// snapshot's link. Other links are followed.
func TestBlobsOfACache(t *testing.T) {
	top := t.TempDir()
	cache := filepath.Join(top, "models--a--b")
	snapshot := filepath.Join(cache, "snapshots", "rev")
	blobs := filepath.Join(cache, "blobs")
	lone := filepath.Join(top, "other", "blobs")
	for _, err := range []error{
		os.MkdirAll(snapshot, 0o700), os.Mkdir(blobs, 0o700), os.MkdirAll(lone, 0o700),
		os.WriteFile(filepath.Join(blobs, "aa"), []byte("blob"), 0o600),
		os.Symlink("../../blobs/aa", filepath.Join(snapshot, "m")),
		os.Symlink("../../blobs/none", filepath.Join(snapshot, "new")),
		os.Symlink(filepath.Join(snapshot, "m"), filepath.Join(top, "twice")),
		os.Symlink(blobs, filepath.Join(top, "folder")),
		os.Symlink(filepath.Join(lone, "aa"), filepath.Join(snapshot, "lone")),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, path := range []string{
		filepath.Join(snapshot, "m"), filepath.Join(snapshot, "new"), filepath.Join(top, "twice"),
		filepath.Join(top, "folder", "aa"), filepath.Join(blobs, "bb"),
	} {
		if err := Write(t.Context(), path, []byte("x")); !errors.Is(err, errs.ErrArgument) ||
			!strings.Contains(err.Error(), "Hugging Face") {
			t.Errorf("%s: %v", path, err)
		}
	}
	if b, err := os.ReadFile(filepath.Join(blobs, "aa")); err != nil || string(b) != "blob" {
		t.Errorf("%q %v", b, err)
	}
	if names, _ := os.ReadDir(blobs); len(names) != 1 {
		t.Error(names)
	}
	for _, path := range []string{filepath.Join(snapshot, "plain"), filepath.Join(lone, "bb"),
		filepath.Join(snapshot, "lone")} {
		if err := Write(t.Context(), path, []byte("x")); err != nil {
			t.Error(err)
		}
	}
	t.Chdir(blobs)
	if err := Write(t.Context(), "cc", []byte("x")); !errors.Is(err, errs.ErrArgument) {
		t.Error(err)
	}
}

// If the context of a write has ended, the old file remains, and no other file is left.
func TestWriteEnds(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "a")
	if err := Write(t.Context(), path, []byte("old")); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := Write(ctx, path, bytes.Repeat([]byte("new"), 100)); !errors.Is(err, errs.ErrCancelled) {
		t.Error(err)
	}
	// The same holds if the context ends during the sync.
	target, err := New(Disk{}, path, "", 0)
	if err != nil {
		t.Fatal(err)
	}
	slow := &slowFile{File: target.file, sync: make(chan struct{})}
	target.file = slow
	if err := target.FinishUnless(ctx, 3); !errors.Is(err, errs.ErrCancelled) {
		t.Error(err)
	}
	target.Drop()
	close(slow.sync)
	if left := spawntest.Left(); len(left) != 0 {
		t.Error(left)
	}
	entries, _ := os.ReadDir(dir)
	if b, err := os.ReadFile(path); err != nil || string(b) != "old" || len(entries) != 1 {
		t.Error(string(b), err, entries)
	}
}

// A slowFile waits in Sync until the channel sync is closed.
type slowFile struct {
	File
	sync chan struct{}
}

func (f *slowFile) Sync() error { <-f.sync; return f.File.Sync() }

// If a file's mode cannot be determined, the mode from the umask is not used instead, because more users might
// then be able to read the replacement.
func TestUnknownModeIsAnError(t *testing.T) {
	dir := t.TempDir()
	unknown := dir + "/loop/file"
	if err := os.Symlink("loop", dir+"/loop"); err != nil {
		t.Fatal(err)
	}
	if _, err := New(Disk{}, dir+"/new", unknown, 0); !errors.Is(err, syscall.ELOOP) {
		t.Errorf("a template with an unknown mode: %v", err)
	}
	if err := os.WriteFile(dir+"/old", []byte("old"), 0o600); err != nil {
		t.Fatal(err)
	}
	target, err := New(Disk{}, dir+"/old", "", 0)
	if err != nil {
		t.Fatal(err)
	}
	target.Path = unknown
	if err := target.Finish(0); !errors.Is(err, syscall.ELOOP) {
		t.Errorf("an unknown mode in Finish: %v", err)
	}
	target.Drop()
	if names, _ := os.ReadDir(dir); len(names) != 2 {
		t.Errorf("the folder contains %v", names)
	}
}
