package peers

// This file shares memory between processes: unnamed files that others open through their descriptors.

import (
	"bytes"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/overwire/overwire/gosrc/errs"
)

const (
	tokenBytes = 16
	pageBytes  = 4096 // the first page holds the token; the memory follows

	// lasting fixes the file's size. If the file could shrink, an access would kill processes that have mapped it.
	lasting = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW
)

// A sharedMemory is shared memory that is mapped in this process. nil means none.
type sharedMemory struct {
	fd   int
	raw  unsafe.Pointer
	base unsafe.Pointer
	n    int64 // bytes of the mapping
}

func pid() int { return os.Getpid() }

// newShared creates shared memory of n zero bytes.
func newShared(n int64, token []byte) (*sharedMemory, error) {
	fd, err := unix.MemfdCreate("overwire", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, errs.New(errs.ErrIO, "cannot create shared memory: %v", err)
	}
	size := pageBytes + n
	if err = unix.Ftruncate(fd, size); err == nil {
		_, err = unix.Pwrite(fd, token, 0)
	}
	if err == nil {
		_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, lasting|unix.F_SEAL_SEAL)
	}
	if err != nil {
		_ = unix.Close(fd)
		return nil, errs.New(errs.ErrIO, "cannot create shared memory of %d bytes: %v", n, err)
	}
	return mapShared(fd, size)
}

func mapShared(fd int, size int64) (*sharedMemory, error) {
	raw, err := unix.MmapPtr(fd, 0, nil, uintptr(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		_ = unix.Close(fd)
		return nil, errs.New(errs.ErrIO, "cannot map shared memory of %d bytes: %v", size, err)
	}
	// A forked child does not need the memory.
	_ = unix.Madvise(unsafe.Slice((*byte)(raw), size), unix.MADV_DONTFORK)
	return &sharedMemory{fd: fd, raw: raw, base: unsafe.Add(raw, pageBytes), n: size}, nil
}

// openShared maps n bytes of another process's memory, or maps this process's memory again.
func openShared(o *Offer, number int, n int64) (*sharedMemory, error) {
	refuse := func(why any) (*sharedMemory, error) {
		return nil, errs.New(errs.ErrNotSupported, "cannot open the shared memory of process %d: %v", o.Process,
			why)
	}
	fd, err := unix.Open(fmt.Sprintf("/proc/%d/fd/%d", o.Process, number),
		unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK|unix.O_NOCTTY, 0)
	if err != nil {
		return refuse(err)
	}
	// In another PID namespace, the number may belong to another process, so the token is compared.
	var st unix.Stat_t
	token := make([]byte, tokenBytes)
	if err = unix.Fstat(fd, &st); err == nil && (st.Mode&unix.S_IFMT != unix.S_IFREG || st.Size != pageBytes+n) {
		err = io.ErrUnexpectedEOF
	}
	if err == nil {
		if seals, e := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0); e != nil || seals&lasting != lasting {
			err = errors.New("its size can change")
		}
	}
	if err == nil {
		_, err = unix.Pread(fd, token, 0)
	}
	want, _ := hex.DecodeString(o.Token)
	if err == nil && !bytes.Equal(token, want) {
		err = os.ErrNotExist
	}
	if err != nil {
		_ = unix.Close(fd)
		return refuse(err)
	}
	s, err := mapShared(fd, pageBytes+n)
	if err != nil {
		return refuse(err)
	}
	return s, nil
}

func (s *sharedMemory) close() {
	if s == nil || s.raw == nil {
		return
	}
	_ = unix.MunmapPtr(s.raw, uintptr(s.n))
	_ = unix.Close(s.fd)
	s.raw = nil
}
