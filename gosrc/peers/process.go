package peers

// A watch on the processes of the others. A child that one of them has forked does
// not count: it has the memory and the descriptors of its parent, and outlives it.

import (
	"bytes"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/overwire/overwire/gosrc/errs"
)

// A process is one that is watched: its /proc/PID/stat, which stays that process's when its
// number is given to another. nil is none.
type process struct{ fd int }

// watchProcess begins to watch a process.
func watchProcess(number int) (*process, error) {
	fd, err := unix.Open(fmt.Sprintf("/proc/%d/stat", number), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, errs.New(errs.ErrNotSupported, "process %d cannot be reached: %v", number, err)
	}
	return &process{fd}, nil
}

// isAlive reports whether it has not ended. A zombie counts as ended.
func (p *process) isAlive() bool {
	b := make([]byte, 256)
	for {
		n, err := unix.Pread(p.fd, b, 0)
		if err == unix.EINTR {
			continue
		}
		if err != nil || n <= 0 {
			return err != unix.ESRCH && n != 0
		}
		// The state comes behind the name, which is in parentheses and may have others.
		at := bytes.LastIndex(b[:n], []byte(") "))
		return at < 0 || at+2 >= n || (b[at+2] != 'Z' && b[at+2] != 'X')
	}
}

func (p *process) close() {
	if p != nil {
		_ = unix.Close(p.fd)
	}
}
