package file

// This file asks the kernel for the kind of a file's file system and for the share of the file in the page cache.

import (
	"errors"
	"sync/atomic"
	"unsafe"

	"github.com/overwire/overwire/gosrc/internal/regular"
	"golang.org/x/sys/unix"
)

// kindOf returns the kind of file system that holds a file.
func kindOf(fd int) regular.Kind {
	of, err := regular.IdentifyFile(fd)
	if err != nil {
		return regular.Network // unknown: read through the page cache
	}
	return of.Kind
}

// noCachestat is set once the kernel has answered that it lacks cachestat, which is new in Linux 6.5.
var noCachestat atomic.Bool

// residentShare returns the share of the pages of [off, off+n) that are in the page cache. known is false if the kernel
// does not report it. For a file that the user may not write, the kernel reports that every page is resident.
func residentShare(fd int, off, n int64) (share float64, known bool) {
	if n <= 0 {
		return 1, true
	}
	first, last := off/page, (off+n-1)/page
	pages := float64(last - first + 1)
	if !noCachestat.Load() {
		const sysCachestat = 451
		span := struct{ off, n uint64 }{uint64(off), uint64(n)}
		var st struct{ cached, dirty, writeback, evicted, recently uint64 }
		_, _, e := unix.Syscall6(sysCachestat, uintptr(fd), uintptr(unsafe.Pointer(&span)),
			uintptr(unsafe.Pointer(&st)), 0, 0, 0)
		if e == 0 {
			return min(1, float64(st.cached)/pages), true
		}
		if errors.Is(e, unix.ENOSYS) {
			noCachestat.Store(true)
		}
	}
	return mincoreShare(fd, first*page, int(last-first+1))
}

// mincoreShare implements residentShare with mincore(2) on a mapping.
func mincoreShare(fd int, off int64, pages int) (float64, bool) {
	m, err := unix.MmapPtr(fd, off, nil, uintptr(pages)*page, unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return 0, false
	}
	defer func() { _ = unix.MunmapPtr(m, uintptr(pages)*page) }()
	vec := make([]byte, pages)
	if _, _, e := unix.Syscall(unix.SYS_MINCORE, uintptr(m), uintptr(pages)*page,
		uintptr(unsafe.Pointer(&vec[0]))); e != 0 {
		return 0, false
	}
	in := 0
	for _, v := range vec {
		in += int(v & 1)
	}
	return float64(in) / float64(pages), true
}
