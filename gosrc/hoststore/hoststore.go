// Package hoststore keeps the stored bytes of model files in memory for all processes of one user on one machine.
//
// A store is a process that owns sealed memfds, which no process can change, and maps names to them. A client sends
// commands over a Unix socket and receives a descriptor; the bytes never cross the socket. The name of a file is the
// digest of its identity and of what it begins with: its header, and for a container its index. A header and checksums
// do not prove the other bytes, because anyone can write another file with the same ones. The name of a container of
// sleeping tensors, which has no file, is the SHA-256 of all its bytes.
//
// If the store does not have a file, a client can put it there: it asks for a writable memfd, copies the file into it,
// and asks the store to seal it. The store then verifies all checksums before it gives the file to any client. The
// store allocates the memory, so the client's control group is not charged for it.
//
// Running loads never depend on the store: a client that has a descriptor keeps the bytes when the store ends, and a
// client that loses the store reads the file. Entries that a connection has fetched are in use until the connection
// ends. Entries in use are never evicted. Clients and stores accept only processes of their own user.
package hoststore

import (
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/regular"
	"github.com/overwire/overwire/gosrc/knob"
)

// The values of OVERWIRE_HOST that are not paths.
const (
	off  = "off"
	auto = "auto"
)

// Socket returns the path of a store's socket. "" and "auto" stand for the user's own store.
func Socket(path string) (string, error) {
	if path == "" || path == auto {
		return filepath.Join(defaultFolder(), "host.sock"), nil
	}
	path, err := filepath.Abs(path)
	if err != nil {
		return "", errs.FromOS(err)
	}
	return path, nil
}

// defaultFolder returns the folder of the user's own store: below XDG_RUNTIME_DIR if that is a folder of this user,
// otherwise below /tmp.
func defaultFolder() string {
	if dir := knob.RuntimeFolder(); filepath.IsAbs(dir) && checkFolder(dir, 0o022) == nil {
		return filepath.Join(dir, "overwire")
	}
	return filepath.Join("/tmp", fmt.Sprintf("overwire-%d", os.Geteuid()))
}

// makeFolder creates the folder of a socket if it is the default one, and checks that no other user can replace
// the socket.
func makeFolder(dir string) error {
	if dir != defaultFolder() {
		return regular.RefusePlanted(dir)
	}
	if err := unix.Mkdir(dir, 0o700); err != nil && err != unix.EEXIST {
		return errs.FromOS(&os.PathError{Op: "mkdir", Path: dir, Err: err})
	}
	return checkFolder(dir, 0o077)
}

// checkFolder refuses a path that is not a folder of this user, is a link, or has one of the mode bits in open.
func checkFolder(dir string, open uint32) error {
	var st unix.Stat_t
	if err := regular.Again(func() error { return unix.Lstat(dir, &st) }); err != nil {
		return errs.FromOS(&os.PathError{Op: "stat", Path: dir, Err: err})
	}
	if st.Mode&unix.S_IFMT != unix.S_IFDIR || st.Uid != uint32(os.Geteuid()) || st.Mode&open != 0 {
		return errs.New(errs.ErrPermission, "%s must be a folder, not a link, that belongs to this user and that "+
			"other users cannot access (owner %d, mode %o)", dir, st.Uid, st.Mode&0o777)
	}
	return nil
}
