package serve

// This file distinguishes the states of a file, so that no response mixes bytes of different states.

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

// A state identifies the bytes of a file. A program can set size and modification time to those of another
// file, but not both the inode and the change time.
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

// The clock resolution of file systems: two changes within one tick have the same time. The kernel's ticks last
// some milliseconds. Those of servers, and of formats like FAT, last up to two seconds.
const fineTick, coarseTick = 50 * time.Millisecond, 3 * time.Second

// settledState returns the state of a file, and whether every later change will alter it. It waits if one tick
// of the kernel's clock is enough to ensure that.
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

// entityTag returns the ETag of a state. It is weak if the file could change without a change of its state.
func (s state) entityTag(settled bool) string {
	tag := fmt.Sprintf(`"%x-%x-%x-%x-%x"`, s.size, s.modified, s.changed, s.inode, s.device)
	if !settled {
		tag = "W/" + tag
	}
	return tag
}

var errChanged = errors.New("the file has changed since its ETag was sent")

// A content reads a file in one state. Its reads fail once the state has changed.
type content struct {
	*os.File
	opened state
	err    error // error of the first read that failed
}

func (c *content) Read(p []byte) (int, error) {
	n, err := c.File.Read(p)
	return c.checkRead(n, err)
}

// ReadAt is like Read, at an offset.
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

// endSpoiled closes the connection if the response cannot be completed. Otherwise the client of a chunked
// response would not notice that bytes are missing.
func (c *content) endSpoiled() {
	if c.err != nil {
		panic(http.ErrAbortHandler) // net/http recovers it and closes the connection
	}
}
