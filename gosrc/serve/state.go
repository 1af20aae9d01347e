package serve

// This file tells the states of a file apart, so that no answer has bytes of two.

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/overwire/overwire/gosrc/internal/regular"
)

// A state identifies the bytes of a file. A program may set size and time of modification to
// those of another file, but not the inode together with the time of the last change.
type state struct {
	device, inode uint64
	size          int64
	modified      int64 // ns since 1970
	changed       int64 // ns since 1970
	mode          uint32
}

func stateOf(f *os.File) (state, error) {
	var st unix.Stat_t
	if err := regular.Again(func() error { return unix.Fstat(int(f.Fd()), &st) }); err != nil {
		return state{}, err
	}
	return state{uint64(st.Dev), st.Ino, st.Size, st.Mtim.Nano(), st.Ctim.Nano(), st.Mode & unix.S_IFMT}, nil
}

// Ticks of the clocks by which file systems note changes: two changes within one tick leave one time. The kernel's
// own have some milliseconds; those of servers, and of formats like FAT, up to two seconds.
const fineTick, coarseTick = 50 * time.Millisecond, 3 * time.Second

// settledState is the state of a file, and whether a later change is certain to change it. It waits for that where a tick of
// the kernel's clock is enough.
func settledState(f *os.File) (s state, settled bool, err error) {
	tick := coarseTick
	kind, kindErr := regular.IdentifyFile(int(f.Fd()))
	for waited := false; ; waited = true {
		if s, err = stateOf(f); err != nil {
			return s, false, err
		}
		isLocal := kindErr == nil && (kind.Kind == regular.Disk || kind.Kind == regular.InMemory)
		if isLocal && s.changed%int64(time.Second) != 0 {
			tick = fineTick
		}
		age := time.Since(time.Unix(0, s.changed))
		if age >= tick || age < 0 || waited || tick != fineTick {
			return s, age >= tick, nil
		}
		time.Sleep(tick - age)
	}
}

// entityTag is the ETag of a state: weak where the file could change without a change of it.
func (s state) entityTag(settled bool) string {
	tag := fmt.Sprintf(`"%x-%x-%x-%x-%x"`, s.size, s.modified, s.changed, s.inode, s.device)
	if !settled {
		tag = "W/" + tag
	}
	return tag
}

var errChanged = errors.New("the file is no longer the one that its ETag names")

// A content reads a file that is in one state. Its reads fail once the file has another one.
type content struct {
	*os.File
	opened state
	err    error // of the first read that failed
}

func (c *content) Read(p []byte) (int, error) {
	n, err := c.File.Read(p)
	return c.checkRead(n, err)
}

// ReadAt is Read at an offset.
func (c *content) ReadAt(p []byte, off int64) (int, error) {
	n, err := c.File.ReadAt(p, off)
	return c.checkRead(n, err)
}

func (c *content) checkRead(n int, err error) (int, error) {
	if now, stateErr := stateOf(c.File); stateErr != nil || now != c.opened {
		err = errChanged
	}
	if err != nil && err != io.EOF {
		c.err, n = err, 0
	}
	return n, err
}

// endSpoiled cuts the connection of an answer that has begun and cannot go on: its length alone does not show
// that in an answer in chunks.
func (c *content) endSpoiled() {
	if c.err != nil {
		panic(http.ErrAbortHandler) // net/http recovers it, and closes the connection
	}
}
