package convert

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/overwire/overwire/gosrc/internal/spawn"
	"github.com/overwire/overwire/gosrc/save"
)

// Only regular auxiliary files are copied, directly or through links. Special files do not block the conversion.
func TestConvertLeavesSpecialFiles(t *testing.T) {
	dir, out := t.TempDir(), filepath.Join(t.TempDir(), "out")
	at := func(n string) string { return filepath.Join(dir, n) }
	write(t, save.Spec{Path: at("model.safetensors")}, some(newRand(t)))
	for _, err := range []error{
		os.WriteFile(at("config.json"), []byte("{}"), 0o600), os.Symlink("config.json", at("linked.json")),
		unix.Mkfifo(at("pipe.json"), 0o600), os.Symlink("pipe.json", at("to pipe.json")), os.Symlink("/dev/zero", at("zero.bin")),
		os.Symlink("loop", at("loop")), os.Symlink(".", at("here")), os.Mkdir(at("folder"), 0o700),
		os.WriteFile(at("huge.bin"), nil, 0o600), os.Truncate(at("huge.bin"), 1<<40),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	var rep save.Report
	ended := make(chan error, 1)
	spawn.Go("test", func() {
		var err error
		rep, err = Convert(bg, nil, []string{dir}, out+"/", save.Spec{Compress: true})
		ended <- err
	})
	select {
	case err := <-ended:
		if err != nil {
			t.Fatal(err)
		}
	case <-time.After(20 * time.Second):
		t.Fatal("hangs")
	}
	names, err := filepath.Glob(filepath.Join(out, "*"))
	if err != nil || len(names) != 3 {
		t.Errorf("%v %v: want the model, config.json and linked.json", names, err)
	}
	if len(rep.Copied) != 2 || len(rep.Left) != 7 {
		t.Errorf("copied %v, left %v", rep.Copied, rep.Left)
	}
}
