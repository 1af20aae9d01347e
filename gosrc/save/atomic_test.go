package save_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/overwire/overwire/gosrc/convert"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/format"
	"github.com/overwire/overwire/gosrc/internal/atomicfile"
	"github.com/overwire/overwire/gosrc/internal/spawn/spawntest"
	"github.com/overwire/overwire/gosrc/job"
	"github.com/overwire/overwire/gosrc/save"
	"github.com/overwire/overwire/gosrc/verify"
)

// A faultyFS fails with err at call number `at`, counted from 0.
type faultyFS struct {
	atomicfile.Disk
	mu    sync.Mutex
	at, n int
	err   error
	what  string // the call that failed
	full  bool   // Free reports a full disk
	then  func() // if not nil, runs at that call
}

func (f *faultyFS) fails(what string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.n++
	if f.n-1 != f.at {
		return nil
	}
	f.what = what
	if f.then != nil {
		f.then()
	}
	return f.err
}

func (f *faultyFS) Create(path string, mode fs.FileMode) (atomicfile.File, error) {
	if err := f.fails("create"); err != nil {
		return nil, &fs.PathError{Op: "open", Path: path, Err: err}
	}
	g, err := f.Disk.Create(path, mode)
	return &faultyFile{g, f}, err
}

func (f *faultyFS) Rename(from, to string) error {
	if err := f.fails("rename"); err != nil {
		return &os.LinkError{Op: "rename", Old: from, New: to, Err: err}
	}
	return f.Disk.Rename(from, to)
}

func (f *faultyFS) RenameNew(from, to string) error {
	if err := f.fails("rename"); err != nil {
		return &os.LinkError{Op: "rename", Old: from, New: to, Err: err}
	}
	return f.Disk.RenameNew(from, to)
}

func (f *faultyFS) SyncNames(path string) error {
	if err := f.fails("sync folder"); err != nil {
		return err
	}
	return f.Disk.SyncNames(path)
}

func (f *faultyFS) Free(dir string) (int64, bool) {
	if f.full {
		return 10, true
	}
	return f.Disk.Free(dir)
}

type faultyFile struct {
	atomicfile.File
	fs *faultyFS
}

func (f *faultyFile) WriteAt(p []byte, off int64) (int, error) {
	if err := f.fs.fails("write"); err != nil {
		n, _ := f.File.WriteAt(p[:len(p)/2], off) // like a disk that fills up
		return n, err
	}
	return f.File.WriteAt(p, off)
}

func (f *faultyFile) Truncate(n int64) error {
	if err := f.fs.fails("truncate"); err != nil {
		return err
	}
	return f.File.Truncate(n)
}

func (f *faultyFile) Chmod(m fs.FileMode) error {
	if err := f.fs.fails("chmod"); err != nil {
		return err
	}
	return f.File.Chmod(m)
}

func (f *faultyFile) Sync() error {
	if err := f.fs.fails("sync"); err != nil {
		return err
	}
	return f.File.Sync()
}

func (f *faultyFile) Close() error {
	err := f.File.Close()
	return errors.Join(f.fs.fails("close"), err)
}

func TestDiskFaults(t *testing.T) {
	// If any disk call fails, the error has the path, the old model stays complete, and no unfinished file is left.
	// The test fails one call after another until a save has no more calls. The last call syncs the folder after the
	// rename. If only that call fails, the new model is in place.
	r := newRand(t)
	old := []save.Input{bf16("w", r, 40, 64), bf16("v", r, 40, 64), bf16("u", r, 40, 64)}
	next := []save.Input{bf16("w", r, 40, 64), bf16("v", r, 41, 64), bf16("u", r, 40, 64)}
	for _, c := range []struct {
		name string
		spec save.Spec
	}{
		{"plain", save.Spec{}},
		{"compressed", save.Spec{Compress: true, ChunkBytes: 4096}},
		{"shards", save.Spec{Compress: true, Shard: 6000}},
		{"shards at once", save.Spec{Compress: true, Shard: 6000, Threads: 32}},
		{"staged", save.Spec{Compress: true, Shard: 6000, Threads: 32, Staging: &save.Staging{}}},
	} {
		t.Run(c.name, func(t *testing.T) {
			var seen []string
			for at := 0; ; at++ {
				dir := t.TempDir()
				spec := c.spec
				spec.Path = filepath.Join(dir, "m.safetensors")
				write(t, spec, old)
				main := spec.Path
				if spec.Shard > 0 {
					main += ".index.json"
				}
				sys := &faultyFS{at: at, err: syscall.EIO}
				spec.FS = sys
				_, err := save.Write(bg, nil, spec, next)
				noTemps(t, dir)
				if sys.what == "" {
					if err != nil {
						t.Fatal(err)
					}
					same(t, next, read(t, main))
					if at < 8 || !strings.Contains(strings.Join(seen, " "), "rename") {
						t.Fatalf("only %v failed", seen)
					}
					return
				}
				seen = append(seen, sys.what)
				got := read(t, main)
				late := sys.what == "sync folder" && seen[len(seen)-2] == "rename" && len(seen) > 2
				if late && err != nil && len(got["v"].Shape) > 0 && got["v"].Shape[0] == 41 {
					same(t, next, got)
				} else {
					same(t, old, got)
				}
				var where *errs.At
				if !errors.Is(err, errs.ErrIO) || !errors.As(err, &where) || !strings.HasPrefix(where.Source, dir) {
					t.Fatalf("%s: %v", sys.what, err)
				}
				if sys.what == "write" && where.Offset < 0 {
					t.Fatalf("no offset: %v", err)
				}
			}
		})
	}
}

func TestCancelAtEachCall(t *testing.T) {
	// A save that is cancelled during any disk call leaves the old model or, after the rename, the new model. No
	// unfinished file is left.
	r := newRand(t)
	old := []save.Input{bf16("w", r, 40, 64), bf16("v", r, 40, 64), bf16("u", r, 40, 64)}
	next := []save.Input{bf16("w", r, 40, 64), bf16("v", r, 41, 64), bf16("u", r, 40, 64)}
	for _, spec := range []save.Spec{{}, {Compress: true, Shard: 6000},
		{Compress: true, Shard: 6000, Staging: &save.Staging{}}} {
		stopped := 0
		for at := 0; ; at++ {
			dir := t.TempDir()
			spec.Path = filepath.Join(dir, "m.safetensors")
			spec.FS = nil
			write(t, spec, old)
			main := spec.Path
			if spec.Shard > 0 {
				main += ".index.json"
			}
			ctx, cancel := context.WithCancelCause(bg)
			sys := &faultyFS{at: at, then: func() { cancel(errs.New(errs.ErrCancelled, "Ctrl-C")) }}
			spec.FS = sys
			_, err := save.Write(ctx, nil, spec, next)
			noTemps(t, dir)
			switch {
			case err == nil:
				same(t, next, read(t, main))
			case errors.Is(err, errs.ErrCancelled):
				same(t, old, read(t, main))
				stopped++
			default:
				t.Fatalf("%s: %v", sys.what, err)
			}
			if sys.what == "" {
				break
			}
		}
		if stopped < 6 {
			t.Errorf("only %d saves were stopped", stopped)
		}
	}
}

func TestNoSpace(t *testing.T) {
	// A save that cannot fit is refused with both numbers before anything is written.
	dir := t.TempDir()
	_, err := save.Write(bg, nil, save.Spec{Path: filepath.Join(dir, "m"), FS: &faultyFS{at: -1, full: true}},
		[]save.Input{bf16("w", fixedRand(), 40, 64)})
	if !errors.Is(err, errs.ErrIO) || !errors.Is(err, syscall.ENOSPC) ||
		!strings.Contains(err.Error(), "5120") || !strings.Contains(err.Error(), "10 are free") {
		t.Fatal(err)
	}
	if es, _ := os.ReadDir(dir); len(es) != 0 {
		t.Fatal("the folder was touched")
	}
}

func TestFullDisk(t *testing.T) {
	// If the disk fills up during a save, the error is an I/O error with path and offset, and the old file remains.
	dir := t.TempDir()
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, "size=512k"); err != nil {
		t.Skipf("no small disk here: mounting tmpfs: %v", err)
	}
	defer func() { _ = syscall.Unmount(dir, 0) }()
	r := fixedRand()
	p := filepath.Join(dir, "m")
	old := []save.Input{bf16("w", r, 100, 100)}
	write(t, save.Spec{Path: p}, old)
	// First the free-space check refuses the save; then, without the check, the disk does.
	spec := save.Spec{Path: p, ChunkBytes: 1 << 16, FS: &faultyFS{at: -1}}
	_, err := save.Write(bg, nil, spec, []save.Input{bf16("w", r, 1000, 1000)})
	if !errors.Is(err, errs.ErrIO) || !strings.Contains(err.Error(), "no space") {
		t.Fatal(err)
	}
	spec.FS = blind{atomicfile.Disk{}}
	_, err = save.Write(bg, nil, spec, []save.Input{bf16("w", r, 1000, 1000)})
	var at *errs.At
	if !errors.Is(err, errs.ErrIO) || !errors.Is(err, syscall.ENOSPC) || !errors.As(err, &at) || at.Source != p ||
		at.Offset <= 0 {
		t.Fatal(err)
	}
	same(t, old, read(t, p))
	noTemps(t, dir)
}

// blind is a disk that does not report its free space.
type blind struct{ atomicfile.Disk }

func (blind) Free(string) (int64, bool) { return 0, false }

func TestCancel(t *testing.T) {
	// A cancelled save leaves the old file, no temporary file and no goroutine.
	r := newRand(t)
	dir := t.TempDir()
	p := filepath.Join(dir, "m")
	old := []save.Input{bf16("w", r, 40, 64)}
	write(t, save.Spec{Path: p}, old)
	in := []save.Input{{Name: "w", DType: 15, Shape: []int64{32 << 20}, Data: bytes.Repeat(gaussian(r, 64, 1<<13), 64)}}
	cancelled := 0
	for tries := 0; cancelled < 8; tries++ {
		if tries == 100 {
			t.Fatalf("%d of %d saves were cancelled while they ran", cancelled, tries)
		}
		d := time.Duration(r.IntN(40)) * time.Millisecond
		j := job.Start("save", func(ctx context.Context, j *job.Job) error {
			_, err := save.Write(ctx, j, save.Spec{Path: p, Compress: r.IntN(2) == 0}, in)
			return err
		})
		time.Sleep(d)
		j.Cancel()
		done, err := j.Wait(time.Minute)
		noTemps(t, dir)
		if done && err == nil { // the save was faster
			write(t, save.Spec{Path: p}, old)
			continue
		}
		if !done || !errors.Is(err, errs.ErrCancelled) {
			t.Fatal(done, err)
		}
		cancelled++
		same(t, old, read(t, p))
	}
	if n := spawntest.Left(); len(n) != 0 {
		t.Fatalf("still running: %v", n)
	}
}

func TestMain(m *testing.M) {
	if args := os.Args; len(args) == 4 && args[1] == "save-for-ever" {
		saveForEver(args[2], args[3])
	}
	os.Exit(m.Run())
}

// version returns the model that the killed child writes in round k. Every byte of every tensor is k, so a mix of two
// models is detected.
func version(k byte) []save.Input {
	var in []save.Input
	for _, n := range []string{"a", "b", "c"} {
		in = append(in, save.Input{Name: n, DType: 6, Shape: []int64{300, 1000}, Data: bytes.Repeat([]byte{k}, 300000)})
	}
	return in
}

func saveForEver(path, shard string) {
	n, _ := strconv.ParseInt(shard, 10, 64)
	for k := byte(1); ; k++ {
		if _, err := save.Write(bg, nil, save.Spec{Path: path, Compress: k%2 == 0, Shard: n, ChunkBytes: 1 << 15},
			version(k)); err != nil {
			os.Stdout.WriteString(err.Error())
			os.Exit(3)
		}
		os.Stdout.Write([]byte{k})
	}
}

func TestKill(t *testing.T) {
	// kill -9 at any moment leaves either the old or the new model complete, in one file or in shards, but not a mix.
	// The next save removes unfinished files.
	r := newRand(t)
	rounds := 60
	if testing.Short() {
		rounds = 10
	}
	for _, shard := range []string{"0", "300000"} {
		dir := t.TempDir()
		p := filepath.Join(dir, "m.safetensors")
		main := p
		if shard != "0" {
			main = dir // it has shards, or one file if equal tensors are stored once
		}
		kept, none, temps := 0, 0, []string(nil)
		for round := 0; round < rounds || len(temps) == 0; round++ {
			if round == 20*rounds {
				t.Fatal("no kill came in the middle of a save")
			}
			cmd := exec.Command(os.Args[0], "save-for-ever", p, shard)
			pipe, err := cmd.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			var out []byte
			if round%3 > 0 { // kill after the first save; otherwise during it
				out = make([]byte, 1)
				if _, err := pipe.Read(out); err != nil {
					t.Fatal(err)
				}
			}
			time.Sleep(time.Duration(r.IntN(40000)) * time.Microsecond)
			_ = cmd.Process.Kill()
			more, _ := io.ReadAll(pipe)
			_ = cmd.Wait()
			if out = append(out, more...); bytes.Contains(out, []byte("save ")) {
				t.Fatal(string(out))
			}
			temps, _ = filepath.Glob(filepath.Join(dir, ".*"))
			_, first := os.Stat(p)
			_, second := os.Stat(p + ".index.json")
			if first != nil && second != nil {
				// There is no old file before the first save has ended.
				if none++; kept > 0 {
					t.Fatal("the old file is gone")
				}
				continue
			}
			got := read(t, main)
			same(t, version(got["a"].Data[0]), got)
			if _, err := verify.Verify(bg, nil, []string{main}, format.Access{}, false); err != nil {
				t.Fatal(err)
			}
			kept++
		}
		for _, temp := range temps { // a save removes them only after some time
			_ = os.Chtimes(temp, time.Now(), time.Now().Add(-time.Hour))
		}
		_, err := save.Write(bg, nil, save.Spec{Path: p, ChunkBytes: 1 << 15,
			Shard: map[string]int64{"300000": 300000}[shard]},
			version(1))
		if all, _ := os.ReadDir(dir); err != nil || len(all) != map[string]int{"0": 1, "300000": 4}[shard] {
			t.Errorf("left behind: %v (%v)", all, err)
		}
		same(t, version(1), read(t, dir))
		t.Logf("shard %s: %d kills left a whole model, %d none; %d unfinished files", shard, kept, none, len(temps))
	}
}

func TestTargets(t *testing.T) {
	// Links are followed and stay links. A replaced file keeps its mode, and a new file gets the mode of the umask.
	// Only regular files are replaced.
	r := fixedRand()
	in := []save.Input{bf16("w", r, 40, 64)}
	dir := t.TempDir()
	at := func(n string) string { return filepath.Join(dir, n) }
	_ = os.Mkdir(at("sub"), 0o777)
	_ = os.Symlink("sub/real", at("link"))
	_ = os.Symlink("link", at("link2"))
	_ = os.Symlink("loop", at("loop"))
	write(t, save.Spec{Path: at("link2")}, in)
	same(t, in, read(t, at("sub/real")))
	if st, _ := os.Lstat(at("link")); st.Mode()&fs.ModeSymlink == 0 {
		t.Fatal("the link is gone")
	}
	if err := os.Chmod(at("sub/real"), 0o640); err != nil {
		t.Fatal(err)
	}
	write(t, save.Spec{Path: at("link")}, in)
	if st, _ := os.Stat(at("link")); st.Mode().Perm() != 0o640 {
		t.Fatal(st.Mode())
	}
	mask := syscall.Umask(0o027)
	write(t, save.Spec{Path: at("new")}, in)
	syscall.Umask(mask)
	if st, _ := os.Stat(at("new")); st.Mode().Perm() != 0o640 {
		t.Fatal(st.Mode())
	}
	long := at(strings.Repeat("ü", 127))
	write(t, save.Spec{Path: long}, in)
	same(t, in, read(t, long))
	for path, class := range map[string]error{
		at("sub"): errs.ErrArgument, at("loop"): errs.ErrArgument, at("no/such"): errs.ErrNotFound, "/dev/null": errs.ErrArgument,
	} {
		if _, err := save.Write(bg, nil, save.Spec{Path: path}, in); !errors.Is(err, class) {
			t.Errorf("%s: %v", path, err)
		}
	}
	noTemps(t, dir)
}

// The error of a cancelled save or conversion names the target, whether the cancel comes before it begins or at any
// call of the file system.
func TestCancelNamesTheTarget(t *testing.T) {
	dir := t.TempDir()
	in := []save.Input{bf16("a", newRand(t), 64, 100)}
	from := filepath.Join(dir, "from.safetensors")
	write(t, save.Spec{Path: from}, in)
	path := filepath.Join(dir, "to.safetensors")
	for name, do := range map[string]func(ctx context.Context, spec save.Spec) error{
		"save": func(ctx context.Context, spec save.Spec) error {
			_, err := save.Write(ctx, nil, spec, in)
			return err
		},
		"convert": func(ctx context.Context, spec save.Spec) error {
			_, err := convert.Convert(ctx, nil, []string{from}, path, spec)
			return err
		},
	} {
		for call := -1; ; call++ {
			ctx, cancel := context.WithCancelCause(bg)
			if call < 0 {
				cancel(errs.ErrCancelled)
			}
			fs := &faultyFS{at: call, then: func() { cancel(errs.ErrCancelled) }}
			err := do(ctx, save.Spec{Path: path, Compress: true, FS: fs})
			cancel(nil)
			if err != nil && (!errors.Is(err, errs.ErrCancelled) || !strings.Contains(err.Error(), path)) {
				t.Errorf("%s, cancelled at call %d: %v", name, call, err)
			}
			if fs.what == "" && call >= 0 {
				break
			}
		}
	}
}
