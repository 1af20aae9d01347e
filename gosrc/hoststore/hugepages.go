package hoststore

// This file moves the bytes of entries to huge pages. A load to an H200 reads a memfd of 4 KiB pages at about half of
// the link's speed, and one of huge pages at nine tenths of it (bench/gpu/device_host_ways.py). Most systems give a
// memfd no huge pages by default, but Linux 6.1 and later does so on request.

import (
	"context"
	"unsafe"

	"golang.org/x/sys/unix"
)

const hugePage = 2 << 20

// useHugePages moves the bytes of a sealed entry to huge pages, and returns the number of bytes that it has moved. That
// takes about 1 s per GB. Processes may read the bytes meanwhile. It stops early if the kernel cannot do it, if memory
// is short, or if the entry is dropped.
func useHugePages(ctx context.Context, t *table, e *entry) (moved int64) {
	t.moving.Lock() // one entry at a time, because loads need the cores
	defer t.moving.Unlock()
	t.mu.Lock()
	fd, err := -1, error(unix.EBADF)
	if !e.isDropped {
		fd, err = unix.FcntlInt(uintptr(e.fd), unix.F_DUPFD_CLOEXEC, 0)
	}
	t.mu.Unlock()
	if err != nil {
		return 0
	}
	defer func() { _ = unix.Close(fd) }()
	for off := int64(0); off+hugePage <= e.size && ctx.Err() == nil && mayMove(t, e); off += hugePage {
		if movePage(fd, off) != nil {
			break
		}
		moved += hugePage
	}
	return moved
}

func mayMove(t *table, e *entry) bool {
	t.mu.Lock()
	isDropped := e.isDropped
	t.mu.Unlock()
	return !isDropped && t.available() > spare
}

// movePage moves the bytes of a descriptor at an offset to one huge page. It maps them at an aligned address meanwhile.
func movePage(fd int, off int64) error {
	space, err := unix.MmapPtr(-1, 0, nil, 2*hugePage, unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return err
	}
	defer func() { _ = unix.MunmapPtr(space, 2*hugePage) }()
	at := unsafe.Add(space, -uintptr(space)%hugePage)
	if _, err = unix.MmapPtr(fd, off, at, hugePage, unix.PROT_READ, unix.MAP_PRIVATE|unix.MAP_FIXED); err != nil {
		return err
	}
	return unix.Madvise(unsafe.Slice((*byte)(at), hugePage), unix.MADV_COLLAPSE)
}
