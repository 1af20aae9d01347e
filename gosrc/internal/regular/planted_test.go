package regular

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/overwire/overwire/gosrc/errs"
)

// A link or file that another user created in a world-writable folder is refused, even if it is a parent folder
// of the path. Links and files of this user, root and the folder's owner are not refused.
func TestPlanted(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root can change the owner of a file")
	}
	for _, c := range []struct {
		mode          fs.FileMode
		folder, owner int
		planted       bool
	}{
		{0o777 | fs.ModeSticky, 0, 1234, true},
		{0o777, 0, 1234, true},
		{0o777, 4321, 1234, true},
		{0o777, 1234, 1234, false},
		{0o777, 4321, 0, false},
		{0o775, 4321, 1234, false}, // the folder's owner has permitted this user to write
		{0o700, 0, 1234, false},
	} {
		dir := filepath.Join(t.TempDir(), "d")
		if err := errors.Join(os.Mkdir(dir, 0o700), os.Chown(dir, c.folder, 0), os.Chmod(dir, c.mode),
			os.WriteFile(dir+"/file", []byte("text"), 0o600), os.Symlink("/etc/hostname", dir+"/link"),
			os.Mkdir(dir+"/folder", 0o700), os.WriteFile(dir+"/folder/x", nil, 0o600)); err != nil {
			t.Fatal(err)
		}
		for _, name := range []string{"file", "link", "folder"} {
			if err := os.Lchown(dir+"/"+name, c.owner, 0); err != nil {
				t.Fatal(err)
			}
			for path, check := range map[string]func(string) error{
				"": RefusePlanted, "/": RefusePlantedEntry, "/x": RefusePlanted, "/no/such": RefusePlanted,
				"/.././/x/": RefusePlanted,
			} {
				err := check(dir + "/" + name + map[bool]string{true: path}[path != "/"])
				if errors.Is(err, errs.ErrPermission) != c.planted || err == nil == c.planted {
					t.Errorf("%+v %s%s: %v", c, name, path, err)
				}
			}
		}
		if text, err := ReadTrusted(dir+"/file", 10); errors.Is(err, errs.ErrPermission) != c.planted ||
			!c.planted && string(text) != "text" {
			t.Errorf("%+v: %q, %v", c, text, err)
		}
	}
	dir := t.TempDir()
	if err := errors.Join(os.WriteFile(dir+"/f", nil, 0o600), os.Chmod(dir+"/f", 0o606)); err != nil {
		t.Fatal(err)
	}
	var st unix.Stat_t
	if err := unix.Stat(dir+"/f", &st); err != nil || IsTrusted(dir+"/f", &st) {
		t.Errorf("a world-writable file is trusted (%v)", err)
	}
}
