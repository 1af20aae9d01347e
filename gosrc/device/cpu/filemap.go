package cpu

import (
	"errors"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/fault"
)

// MapFile maps a whole file of the given size, private and writable: writes
// stay in memory and never reach the file. The mapping has n holders; Memory
// of parts of it is made with the returned block. It survives the closing and
// the unlinking of the file, not its truncation by another program, which
// makes reads of the lost pages fatal (SIGBUS): that is what mapping means.
//
// With alone, every byte has one holder at most, and one that goes drops its
// pages, changed ones too.
func MapFile(fd int, size int64, n int64, alone bool) (unsafe.Pointer, *device.Block, error) {
	if err := StillHas(fd, size); err != nil {
		return nil, nil, err
	}
	length := (size + page - 1) &^ (page - 1)
	// Reserve one page more, for the block, then lay the file over the front.
	base, err := unix.MmapPtr(-1, 0, nil, uintptr(length+page), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		return nil, nil, fault.New(fault.ErrMemory, "mapping %d bytes: %v", size, err)
	}
	if _, err := unix.MmapPtr(fd, 0, base, uintptr(length), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_FIXED); err != nil {
		_ = unix.MunmapPtr(base, uintptr(length+page))
		return nil, nil, fault.FromOS(err)
	}
	kind := int64(device.KindMap)
	if alone {
		kind = device.KindRegion
	}
	block := device.NewBlock(unsafe.Add(base, length), n, base, uint64(length+page), kind)
	return base, block, nil
}

// Announce tells the kernel that the pages of [p, p+n) of a mapped file will be
// wanted soon; it starts to read them and does not wait. It is advice.
func Announce(p unsafe.Pointer, n int64) {
	head := int64(uintptr(p) & (page - 1))
	_ = unix.Madvise(unsafe.Slice((*byte)(unsafe.Add(p, -head)), n+head), unix.MADV_WILLNEED)
}

// StillHas refuses a file that has become shorter than size; the error is a
// fault.At with the offset where it ends now.
func StillHas(fd int, size int64) error {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return fault.FromOS(err)
	}
	if st.Size < size {
		return &fault.At{Verb: "map", Chunk: -1, Offset: st.Size,
			Err: fault.New(fault.ErrCorrupt, "truncated: the file had %d bytes when it was opened, now %d", size, st.Size)}
	}
	return nil
}

// Populate reads the pages of [p, p+n) of a mapped file in; a disk that fails
// does so here, as an error. On kernels before 5.14 it does nothing: pages then
// come in when they are first touched.
func Populate(p unsafe.Pointer, n int64) error {
	const populateRead = 22 // MADV_POPULATE_READ
	head := int64(uintptr(p) & (page - 1))
	b := unsafe.Slice((*byte)(unsafe.Add(p, -head)), n+head)
	for {
		err := unix.Madvise(b, populateRead)
		switch {
		case err == nil, errors.Is(err, unix.EINVAL):
			return nil
		case errors.Is(err, unix.EINTR), errors.Is(err, unix.EAGAIN):
		case errors.Is(err, unix.EFAULT):
			return fault.New(fault.ErrIO, "the file cannot be read, or has been truncated")
		default:
			return fault.FromOS(err)
		}
	}
}
