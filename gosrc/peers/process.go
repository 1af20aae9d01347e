package peers

// This file watches the processes of the other ranks. A forked child of such a process does not count: it has its
// parent's memory and descriptors, and outlives it.

import (
	"bytes"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/overwire/overwire/gosrc/errs"
)

// A process is a watched process. It holds /proc/PID/stat open, which keeps referring to that process even when
// its number is reused. nil is none.
type process struct{ fd int }

// watchProcess starts to watch a process.
func watchProcess(number int) (*process, error) {
	fd, err := unix.Open(fmt.Sprintf("/proc/%d/stat", number), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, errs.New(errs.ErrNotSupported, "process %d cannot be reached: %v", number, err)
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
