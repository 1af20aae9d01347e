package atomicfile

import (
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"
)

// callAsUser calls fn in a thread that acts as another user for file access. The thread then ends.
func callAsUser(t *testing.T, user int, fn func() error) error {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("only root can act as another user")
	}
	done := make(chan error)
	go func() {
		runtime.LockOSThread()
		_, err := unix.SetfsuidRetUid(user)
		if err == nil {
			err = fn()
		}
		done <- err
	}()
	return <-done
}

// Files and sets of files can be written and replaced in another user's folder that is writable but not
// listable (a drop box).
func TestFolderThatMayNotBeListed(t *testing.T) {
	const user = 1234
	folder, err := os.MkdirTemp("/tmp", "overwire")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(folder)
	if err := os.Chmod(folder, 0o733); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(folder, "x")
	err = callAsUser(t, user, func() error {
		if _, err := os.ReadDir(folder); !errors.Is(err, os.ErrPermission) {
			t.Errorf("listing the folder: %v", err)
		}
		for _, text := range []string{"old", "new"} {
			fill := func(f *os.File) error {
				_, err := f.WriteString(text)
				return err
			}
			if err := With(path, fill); err != nil {
				return err
			}
			if got, err := os.ReadFile(path); err != nil || string(got) != text {
				t.Errorf("%q, %v", got, err)
			}
		}
		var set []*Target
		for _, name := range []string{"1", "2"} {
			f, err := New(Disk{}, filepath.Join(folder, name), "", 0)
			if err != nil {
				return err
			}
			defer f.Drop()
			f.New = name == "1"
			if err := f.Finish(0); err != nil {
				return err
			}
			set = append(set, f)
		}
		return Publish(Disk{}, set)
	})
	if err != nil {
		t.Fatal(err)
	}
	if names, err := filepath.Glob(folder + "/*"); err != nil || len(names) != 3 {
		t.Errorf("%v, %v", names, err)
	}
}
