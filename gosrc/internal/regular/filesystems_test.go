package regular

import (
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

// The number from statfs determines the name and the kind.
func TestNameFileSystem(t *testing.T) {
	for number, want := range map[uint32]FileSystem{0x6969: {"nfs", Network}, 0x65735546: {"fuse", Network},
		0xef53: {"ext4", Disk}, 0x01021994: {"tmpfs", InMemory}, 0xff534d42: {"cifs", Network},
		0x786f4256: {"0x786f4256", Unknown}, 0x58465342: {"xfs", Disk}, 0x794c7630: {"overlay", Disk},
		0x958458f6: {"hugetlbfs", InMemory}, 0x858458f6: {"ramfs", InMemory}} {
		if got := nameFileSystem(number); got != want {
			t.Errorf("%#x: %v, want %v", number, got, want)
		}
	}
}

// A file in memory syncs immediately, with or without a name.
func TestMemoryFilesSyncAtOnce(t *testing.T) {
	for _, flags := range []int{unix.MFD_CLOEXEC, unix.MFD_CLOEXEC | unix.MFD_HUGETLB} {
		fd, err := unix.MemfdCreate("x", flags)
		if err != nil {
			t.Logf("flags %#x: %v", flags, err)
			continue
		}
		f := os.NewFile(uintptr(fd), "x")
		if !SyncsAtOnce(fd) {
			t.Errorf("flags %#x: SyncsAtOnce is false", flags)
		}
		_ = f.Close()
	}
}
