package cpu

// Maps plain files.

import (
	"errors"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/errs"
)

// MapFile maps a whole file of the given size as private and writable memory: writes never reach the file. The mapping
// has n holders, and Memory for parts of it must refer to the returned block. The mapping stays valid after the file is
// closed or unlinked. If another program truncates the file, reading the lost pages is fatal (SIGBUS), as for any
// mapping.
//
// The mapping of a file of at least a huge page begins at a huge page boundary, so that the kernel can map large
// folios of the page cache as a whole. That reduces page faults to a tenth.
//
// If alone is set, every byte has at most one holder, and releasing a holder drops its pages, including modified ones.
func MapFile(fd int, size int64, n int64, alone bool) (unsafe.Pointer, *device.Block, error) {
	if err := StillHas(fd, size); err != nil {
		return nil, nil, err
	}
	length := (size + page - 1) &^ (page - 1)
	// Reserve an additional page for the block, then map the file over the pages before it.
	base, err := reserve(length + page)
	if err != nil {
		return nil, nil, errs.New(errs.ErrMemory, "cannot map %d bytes: %v", size, err)
	}
	if _, err := unix.MmapPtr(fd, 0, base, uintptr(length), unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_PRIVATE|unix.MAP_FIXED); err != nil {
		_ = unix.MunmapPtr(base, uintptr(length+page))
		return nil, nil, errs.FromOS(err)
	}
	kind := int64(device.KindMap)
	if alone {
		kind = device.KindRegion
	}
	block := device.NewBlock(unsafe.Add(base, length), n, base, uint64(length+page), kind)
	return base, block, nil
}

// Announce asks the kernel to start reading the pages of [p, p+n) of a mapped file. It is only advice and does
// not wait.
func Announce(p unsafe.Pointer, n int64) {
	head := int64(uintptr(p) & (page - 1))
	_ = unix.Madvise(unsafe.Slice((*byte)(unsafe.Add(p, -head)), n+head), unix.MADV_WILLNEED)
}

// StillHas returns an error if a file is now shorter than size. The error is an errs.At with the offset of the
// current end.
func StillHas(fd int, size int64) error {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return errs.FromOS(err)
	}
	if st.Size < size {
		return &errs.At{Verb: "map", Chunk: -1, Offset: st.Size,
			Err: errs.New(errs.ErrCorrupt, "truncated: the file had %d bytes when it was opened, and now has %d", size,
				st.Size)}
	}
	return nil
}

// Populate reads the pages of [p, p+n) of a mapped file, and reports a failing disk as an error. On kernels before
// 5.14, and in sandboxes that forbid the call, it does nothing, and pages are read on first access.
func Populate(p unsafe.Pointer, n int64) error {
	const populateRead = 22 // MADV_POPULATE_READ
	head := int64(uintptr(p) & (page - 1))
	b := unsafe.Slice((*byte)(unsafe.Add(p, -head)), n+head)
	for {
		err := unix.Madvise(b, populateRead)
		switch {
		case err == nil, errors.Is(err, unix.EINVAL), errors.Is(err, unix.EPERM), errors.Is(err, unix.ENOSYS):
			return nil
		case errors.Is(err, unix.EINTR):
		case errors.Is(err, unix.EFAULT):
			return errs.New(errs.ErrIO, "the file cannot be read or was truncated")
		default:
			return errs.FromOS(err)
		}
	}
}
