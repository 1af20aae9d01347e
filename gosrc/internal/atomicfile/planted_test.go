package atomicfile

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"testing"

	"github.com/overwire/overwire/gosrc/errs"
)

// A write follows no link that another user has put into a folder that everyone may write, and replaces no
// file that waits there for it in a sticky one: neither elsewhere, nor for another owner.
func TestPlanted(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root may give files away")
	}
	for _, c := range []struct {
		mode       fs.FileMode
		owner      int
		link, file bool // refused
	}{
		{0o777 | fs.ModeSticky, 1234, true, true},
		{0o777, 1234, true, false}, // who may rename there needs no file to wait
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
			t.Errorf("%+v: the link: %v, and its file is %q", c, err, after)
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
