package peers

// This file watches the processes of the other ranks. It does not use locks or sockets for this, because a
// forked child shares them with its parent and may outlive the parent.

import (
	"bytes"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/overwire/overwire/gosrc/errs"
)

// A process is a watched process. It keeps /proc/PID/stat open, which refers to that process even if its number
// is reused. nil means no process.
type process struct{ fd int }

// watchProcess begins to watch a process.
func watchProcess(number int) (*process, error) {
	fd, err := unix.Open(fmt.Sprintf("/proc/%d/stat", number), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, errs.New(errs.ErrNotSupported, "cannot watch process %d: %v", number, err)
	}
	return &process{fd}, nil
}

// isAlive reports whether the process has not ended. A zombie counts as ended.
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
		// The state follows the name, which is in parentheses and may contain parentheses.
		at := bytes.LastIndex(b[:n], []byte(") "))
		return at < 0 || at+2 >= n || (b[at+2] != 'Z' && b[at+2] != 'X')
	}
}

func (p *process) close() {
	if p != nil {
		_ = unix.Close(p.fd)
	}
}
