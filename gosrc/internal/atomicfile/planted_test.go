package atomicfile

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"syscall"
	"testing"

	"github.com/overwire/overwire/gosrc/errs"
)

// A write follows no link that another user created in a world-writable folder, and replaces no other user's
// file in a sticky, world-writable folder.
func TestPlanted(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root can change the owner of a file")
	}
	for _, c := range []struct {
		mode       fs.FileMode
		owner      int
		link, file bool // expected refusals
	}{
		{0o777 | fs.ModeSticky, 1234, true, true},
		{0o777, 1234, true, false}, // users who may rename files there do not need to plant one
		{0o777 | fs.ModeSticky, 0, false, false},
		{0o755, 1234, false, false},
	} {
		dir := t.TempDir()
		aim := put(t, dir+"/private", 0o600)
		shared := dir + "/shared"
		if err := errors.Join(os.Mkdir(shared, 0o700), os.Chmod(shared, c.mode), os.Symlink("../private", shared+"/link"),
			os.Lchown(shared+"/link", c.owner, 0), os.Chown(put(t, shared+"/file", 0o666), c.owner, 0)); err != nil {
			t.Fatal(err)
		}
		before, _ := os.ReadFile(aim)
		err := Write(t.Context(), shared+"/link", []byte("new"))
		after, _ := os.ReadFile(aim)
		if errors.Is(err, errs.ErrPermission) != c.link || c.link != bytes.Equal(before, after) {
			t.Errorf("%+v: the link: %v, and its target contains %q", c, err, after)
		}
		err = Write(t.Context(), shared+"/file", []byte("new"))
		if errors.Is(err, errs.ErrPermission) != c.file || err == nil == c.file {
			t.Errorf("%+v: the file: %v", c, err)
		}
		home := dir + "/home"
		if err := errors.Join(os.Mkdir(home, 0o700), os.Symlink("../home", shared+"/way"),
			os.Lchown(shared+"/way", c.owner, 0)); err != nil {
			t.Fatal(err)
		}
		for what, err := range map[string]error{
			"/file": Write(t.Context(), shared+"/way/file", []byte("new")), "/deep": MakeFolders(shared + "/way/deep"),
		} {
			_, there := os.Stat(home + what)
			if errors.Is(err, errs.ErrPermission) != c.link || (there == nil) == c.link {
				t.Errorf("%+v: through a link, %s: %v, %v", c, what, err, there)
			}
		}
	}
}

// A link of another user that repeatedly appears and disappears is never followed.
func TestLinkThatComesAndGoes(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root can change the owner of a file")
	}
	shared, home := t.TempDir(), t.TempDir()
	path, link := shared+"/file", shared+"/link"
	if err := os.Chmod(shared, 0o777|fs.ModeSticky); err != nil {
		t.Fatal(err)
	}
	stop, ended := make(chan struct{}), make(chan error)
	go func() {
		var err error
		for !isClosed(stop) && err == nil {
			err = errors.Join(os.Symlink(home+"/file", link), os.Lchown(link, 1234, 0), os.Rename(link, path),
				os.Remove(path))
		}
		ended <- err
	}()
	for range 20_000 {
		if place, err := Follow(path); err == nil && place.Path != path {
			t.Errorf("Follow returned the target of the link, %s", place.Path)
			break
		} else if err != nil && !errors.Is(err, errs.ErrPermission) && !errors.Is(err, syscall.ELOOP) {
			t.Error(err)
			break
		}
	}
	close(stop)
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

func isClosed(stop <-chan struct{}) bool {
	select {
	case <-stop:
		return true
	default:
		return false
	}
}

// A new file does not get the owner or mode of a file that another user created in a sticky folder, under the
// new file's name or under its template's.
func TestNewFileIgnoresAnotherUsersFile(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root can change the owner of a file")
	}
	for _, name := range []string{"new", "like"} {
		shared := t.TempDir()
		plant := func() error {
			return errors.Join(os.WriteFile(shared+"/"+name, nil, 0o600), os.Chmod(shared+"/"+name, 0o666),
				os.Chown(shared+"/"+name, 1234, 1234))
		}
		err := os.Chmod(shared, 0o777|fs.ModeSticky)
		if name == "like" {
			err = errors.Join(err, plant())
		}
		if err != nil {
			t.Fatal(err)
		}
		target, err := New(Disk{}, shared+"/new", shared+"/like", 0o600)
		if err != nil {
			t.Fatal(err)
		}
		if name == "new" {
			err = plant()
		}
		if err = errors.Join(err, target.Finish(0), Publish(Disk{}, []*Target{target})); err != nil {
			t.Fatal(err)
		}
		target.Drop()
		st, err := os.Stat(shared + "/new")
		if err != nil {
			t.Fatal(err)
		}
		if own := st.Sys().(*syscall.Stat_t); own.Uid != 0 || own.Gid != 0 || st.Mode() != 0o600 {
			t.Errorf("%s: mode %v, user %d", name, st.Mode(), own.Uid)
		}
	}
}
