package regular

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// A network, FUSE or unknown file system makes the result false. Mounts below /proc and the kernel's own file
// systems do not.
func TestKernelTypes(t *testing.T) {
	const own = "27 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n" +
		"25 24 0:23 / /dev/shm rw,relatime shared:3 master:1 - tmpfs tmpfs rw\n"
	for line, want := range map[string]bool{
		"": true,
		"30 1 0:40 / /mnt rw - nfs4 server:/a rw\n":                       false,
		"30 1 0:40 / /mnt rw shared:2 - fuse.sshfs user@server:/ rw\n":    false,
		"30 1 0:40 / /mnt rw - virtiofs share rw\n":                       false,
		"30 1 0:40 / /mnt rw - 9p share rw\n":                             false,
		"30 1 0:40 / /mnt rw - autofs systemd-1 rw\n":                     false,
		"30 1 0:40 / /proc/sys/fs/binfmt_misc rw - autofs systemd-1 rw\n": true,
		"30 1 0:40 / /var/lib rw - overlay overlay rw,lowerdir=/a\n":      true,
		"30 1 0:40 / /a\\040-\\040b rw - fusectl fusectl rw\n":            true,
		"30 1 0:40 / /mnt rw - newfs share rw\n":                          false,
		"30 1 0:40 / /mnt rw\n":                                           false,
		"30 1 0:40 / /mnt rw - \n":                                        false,
		"30 1 0:40 / /mnt\n":                                              false,
	} {
		if got := areKernelTypes(own + line); got != want {
			t.Errorf("%q: %v", line, got)
		}
	}
}

// The list of mounts is opened once, even if its descriptor is 0 because the process has no stdin.
func TestMountsWithoutStdin(t *testing.T) {
	stdin, err := unix.FcntlInt(0, unix.F_DUPFD_CLOEXEC, 3)
	if err != nil {
		t.Skip("there is no stdin")
	}
	if err := unix.Close(0); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := errors.Join(unix.Dup2(stdin, 0), unix.Close(stdin)); err != nil {
			t.Fatal(err)
		}
	}()
	var m mountTable
	isLocal, fd := m.areLocal(), m.fd
	if fd != 0 || m.areLocal() != isLocal || m.fd != fd {
		t.Errorf("first opened as %d, then as %d", fd, m.fd)
	}
}

// Only small regular files are quick, whether or not the list of mounts was read before.
func TestQuick(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "x")
	if err := os.WriteFile(path, make([]byte, 100), 0o600); err != nil {
		t.Fatal(err)
	}
	mounts.areLocal()
	isLocal := mounts.areLocal()
	for name, want := range map[string]bool{path: isLocal, dir: false, dir + "/absent": false, "/dev/null": false} {
		if got := IsQuick(name, 100); got != want {
			t.Errorf("%s: %v", name, got)
		}
	}
	if IsQuick(path, 99) {
		t.Error("a file above the limit is quick")
	}
}

// IsInMemory is true for files in a memory file system, and false for links and special files.
func TestIsInMemory(t *testing.T) {
	const memory = "/dev/shm"
	if of, err := IdentifyFolder(memory); err != nil || of.Kind != InMemory {
		t.Skip("this machine has no memory file system")
	}
	dir, err := os.MkdirTemp(memory, "overwire")
	if err != nil {
		t.Skip(err)
	}
	defer os.RemoveAll(dir)
	if err := errors.Join(os.WriteFile(dir+"/x", nil, 0o600), os.Symlink("/proc/self/status", dir+"/link")); err != nil {
		t.Fatal(err)
	}
	isLocal := mounts.areLocal()
	for path, want := range map[string]bool{dir + "/x": isLocal, dir + "/absent": isLocal, dir + "/link": false,
		dir: false, dir + "/no/folder": false, "/proc/self/status": false} {
		if got := IsInMemory(path); got != want {
			t.Errorf("%s: %v", path, got)
		}
	}
	for path, want := range map[string]bool{dir + "/x": true, "/proc/self/status": false} {
		f, err := os.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		if got := SyncsAtOnce(int(f.Fd())); got != want {
			t.Errorf("%s, open: %v", path, got)
		}
		_ = f.Close()
	}
}
