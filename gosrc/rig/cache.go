package main

// This file drops files from the page cache, counts what stays, and reads around it.

import (
	"errors"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/overwire/overwire/gosrc/errs"
)

// dropPages drops the pages of files from the page cache, and returns which share of
// them is still there. Their bytes are on the disk: saves end with fsync.
func dropPages(files []string) (share float64, err error) {
	var in, all int64
	for _, name := range files {
		f, err := os.Open(name)
		if err != nil {
			return 0, errs.New(errs.ErrIO, "%v", err)
		}
		err = f.Sync()
		if err == nil {
			err = unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED)
		}
		var have, pages int64
		if err == nil {
			have, pages, err = countResident(f)
		}
		f.Close()
		if err != nil {
			return 0, errs.New(errs.ErrIO, "%s: %v", name, err)
		}
		in, all = in+have, all+pages
	}
	if all == 0 {
		return 0, nil
	}
	return float64(in) / float64(all), nil
}

// countResident counts the pages of a file that are in memory, by mincore.
func countResident(f *os.File) (in, pages int64, err error) {
	info, err := f.Stat()
	if err != nil || info.Size() == 0 {
		return 0, 0, err
	}
	m, err := unix.Mmap(int(f.Fd()), 0, int(info.Size()), unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return 0, 0, err
	}
	defer func() { _ = unix.Munmap(m) }()
	page := os.Getpagesize()
	vec := make([]byte, (len(m)+page-1)/page)
	if _, _, e := unix.Syscall(unix.SYS_MINCORE, uintptr(unsafe.Pointer(&m[0])), uintptr(len(m)),
		uintptr(unsafe.Pointer(&vec[0]))); e != 0 {
		return 0, 0, e
	}
	for _, v := range vec {
		in += int64(v & 1)
	}
	return in, int64(len(vec)), nil
}

// openDirect opens a file for reads around the page cache.
func openDirect(name string) (*os.File, error) {
	fd, err := unix.Open(name, unix.O_RDONLY|unix.O_CLOEXEC|unix.O_DIRECT, 0)
	if errors.Is(err, unix.EINVAL) {
		return nil, lackError("the file system of %s knows no O_DIRECT", name)
	}
	if err != nil {
		return nil, errs.New(errs.ErrIO, "%s: %v", name, err)
	}
	return os.NewFile(uintptr(fd), name), nil
}

// readDirect fills p, which is aligned to pages, or reads up to the file's end.
func readDirect(f *os.File, p []byte, off int64) error {
	for {
		n, err := unix.Pread(int(f.Fd()), p, off)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case errors.Is(err, unix.EINVAL):
			return lackError("the file system of %s knows no O_DIRECT", f.Name())
		case err != nil:
			return errs.New(errs.ErrIO, "%s at %d: %v", f.Name(), off, err)
		case n == 0:
			return errs.New(errs.ErrIO, "%s at %d: nothing to read", f.Name(), off)
		}
		return nil
	}
}

// sizeOf is the bytes of files.
func sizeOf(files []string) (n int64, err error) {
	for _, name := range files {
		info, err := os.Stat(name)
		if err != nil {
			return 0, errs.New(errs.ErrIO, "%v", err)
		}
		n += info.Size()
	}
	return n, nil
}
