package convert

import (
	"errors"
	"os"
	"testing"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/save"
)

// The output folder is created if it is missing. In a world-writable folder, another user's link to a folder is
// refused, but the current user's link is followed.
func TestMake(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root may give files away")
	}
	shared, home := t.TempDir(), t.TempDir()
	if err := errors.Join(os.Chmod(shared, 0o777|os.ModeSticky), os.Symlink(home, shared+"/theirs"),
		os.Lchown(shared+"/theirs", 1234, 0), os.Symlink(home, shared+"/mine"),
		os.WriteFile(shared+"/file", nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"/theirs", "/theirs/", "/theirs//"} {
		if _, err := makeFolder((save.Target{}).At(shared + name)); !errors.Is(err, errs.ErrPermission) {
			t.Errorf("%s: %v", name, err)
		}
	}
	for name, isNew := range map[string]bool{"/mine": false, "/mine/": false, "/new": true, "/": false} {
		if made, err := makeFolder((save.Target{}).At(shared + name)); err != nil || (made != "") != isNew {
			t.Errorf("%s: %q, %v", name, made, err)
		}
	}
	for _, name := range []string{"/file", "/no/such"} {
		if _, err := makeFolder((save.Target{}).At(shared + name)); err == nil {
			t.Errorf("%s is a folder", name)
		}
	}
}
