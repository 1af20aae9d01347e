package regular

// This file determines whether a file system call may have to wait for a server or another program. It identifies file
// systems by the number that statfs returns.

import (
	"fmt"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// IsQuick reports whether a path is a regular file that is not larger than most, and calls for it can only wait for a
// disk. The latter requires that every visible file system is served by the kernel: a server or program might never
// respond, and a link could lead to its file system.
func IsQuick(path string, most int64) bool {
	if !mounts.areLocal() {
		return false
	}
	var st unix.Stat_t
	return unix.Stat(path, &st) == nil && Check(&st) == nil && st.Size <= most
}

// IsInMemory reports whether writes to a file go only to memory: syncs do not wait for a disk, and calls are as
// quick as in IsQuick. The path must not be a link.
func IsInMemory(path string) bool {
	var st unix.Stat_t
	if !mounts.areLocal() || unix.Lstat(path, &st) == nil && st.Mode&unix.S_IFMT != unix.S_IFREG {
		return false
	}
	of, err := IdentifyFolder(FolderOf(path))
	return err == nil && of.Kind == InMemory
}

// SyncsAtOnce reports whether a sync of an open file does not wait, because the file is only in memory.
func SyncsAtOnce(fd int) bool {
	of, err := IdentifyFile(fd)
	return err == nil && of.Kind == InMemory
}

// kernelTypes are the types of file systems that the kernel serves itself, from memory or disks.
var kernelTypes = " ext2 ext3 ext4 xfs btrfs bcachefs f2fs jfs zfs overlay squashfs erofs iso9660 udf vfat exfat " +
	"ntfs3 tmpfs ramfs rootfs hugetlbfs devtmpfs devpts proc sysfs cgroup cgroup2 mqueue debugfs tracefs securityfs " +
	"pstore bpf configfs fusectl binfmt_misc nsfs efivarfs selinuxfs "

// mounts are the file systems that are visible to the process.
var mounts mountTable

type mountTable struct {
	mu      sync.Mutex
	isOpen  bool
	fd      int  // of the kernel's list, which signals changes; may be 0 if stdin was closed
	isLocal bool // every visible file system is one of kernelTypes
}

// areLocal reports whether the kernel itself serves every visible file system.
func (m *mountTable) areLocal() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.isOpen {
		fd, err := unix.Open("/proc/self/mountinfo", unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			return false
		}
		m.fd, m.isOpen = fd, true
	} else if n, err := unix.Poll([]unix.PollFd{{Fd: int32(m.fd), Events: unix.POLLPRI}}, 0); err == nil && n == 0 {
		return m.isLocal
	}
	text, n := make([]byte, 1<<20), 0
	for n < len(text) {
		count, err := unix.Pread(m.fd, text[n:], int64(n))
		if err != nil {
			n = len(text)
		}
		if count <= 0 {
			break
		}
		n += count
	}
	m.isLocal = n < len(text) && areKernelTypes(string(text[:n]))
	return m.isLocal
}

// CloseMounts closes the kernel's list of mounts. The next call that needs it opens it again.
func CloseMounts() {
	mounts.mu.Lock()
	defer mounts.mu.Unlock()
	if mounts.isOpen {
		_ = unix.Close(mounts.fd)
		mounts.isOpen = false
	}
}

// areKernelTypes reports whether a text in the format of /proc/self/mountinfo lists only kernelTypes. Mounts
// below /proc are ignored, because they contain no user files.
func areKernelTypes(text string) bool {
	for line := range strings.Lines(text) {
		where, what, isWhole := strings.Cut(line, " - ")
		words := strings.Fields(where)
		kind, _, _ := strings.Cut(what, " ")
		if !isWhole || len(words) < 5 || kind == "" ||
			!strings.Contains(kernelTypes, " "+kind+" ") && !strings.HasPrefix(words[4], "/proc/") {
			return false
		}
	}
	return true
}

// The Kind of a file system is where its files are. It determines how best to read them, and whether a sync waits.
type Kind int

// The kinds of file systems.
const (
	Unknown  Kind = iota // like Disk, but perhaps on a server
	Disk                 // on a disk of this machine, through the kernel's page cache
	Network              // on a server, or with its own cache: direct I/O has no benefit
	InMemory             // only in memory: no call and no sync waits for a disk
)

// A FileSystem is the type of a file system.
type FileSystem struct {
	Name string // "ext4", or the number of an unknown file system: "0x786f4256"
	Kind Kind
}

// fileSystems are keyed by the number that statfs returns. Numbers without a name here are missing in package unix.
var fileSystems = map[uint32]FileSystem{
	unix.TMPFS_MAGIC:     {"tmpfs", InMemory}, // includes memfd_create and devtmpfs
	unix.RAMFS_MAGIC:     {"ramfs", InMemory},
	unix.HUGETLBFS_MAGIC: {"hugetlbfs", InMemory},

	unix.EXT4_SUPER_MAGIC:      {"ext4", Disk}, // includes ext2 and ext3
	unix.XFS_SUPER_MAGIC:       {"xfs", Disk},
	unix.BTRFS_SUPER_MAGIC:     {"btrfs", Disk},
	unix.BCACHEFS_SUPER_MAGIC:  {"bcachefs", Disk},
	unix.F2FS_SUPER_MAGIC:      {"f2fs", Disk},
	unix.OVERLAYFS_SUPER_MAGIC: {"overlay", Disk},
	unix.SQUASHFS_MAGIC:        {"squashfs", Disk},
	unix.EROFS_SUPER_MAGIC_V1:  {"erofs", Disk},
	unix.ISOFS_SUPER_MAGIC:     {"iso9660", Disk},
	unix.UDF_SUPER_MAGIC:       {"udf", Disk},
	unix.MSDOS_SUPER_MAGIC:     {"vfat", Disk},
	unix.EXFAT_SUPER_MAGIC:     {"exfat", Disk},

	unix.NFS_SUPER_MAGIC:  {"nfs", Network},
	unix.SMB_SUPER_MAGIC:  {"smb", Network},
	unix.SMB2_SUPER_MAGIC: {"smb2", Network},
	unix.CIFS_SUPER_MAGIC: {"cifs", Network},
	unix.CEPH_SUPER_MAGIC: {"ceph", Network},
	unix.AFS_SUPER_MAGIC:  {"afs", Network},
	unix.AFS_FS_MAGIC:     {"afs", Network},
	unix.CODA_SUPER_MAGIC: {"coda", Network},
	unix.NCP_SUPER_MAGIC:  {"ncp", Network},
	unix.V9FS_MAGIC:       {"9p", Network},
	unix.FUSE_SUPER_MAGIC: {"fuse", Network}, // includes virtiofs
	0x19830326:            {"beegfs", Network},
	0x47504653:            {"gpfs", Network},
	0x0BD00BD0:            {"lustre", Network},
	0x20030528:            {"orangefs", Network},
	0xAAD7AAEA:            {"panfs", Network},
	0x2FC12FC1:            {"zfs", Network},
}

// IdentifyFile returns the file system of an open file.
func IdentifyFile(fd int) (FileSystem, error) {
	var of unix.Statfs_t
	err := Again(func() error { return unix.Fstatfs(fd, &of) })
	return nameFileSystem(uint32(of.Type)), err
}

// IdentifyFolder returns the file system of a folder.
func IdentifyFolder(path string) (FileSystem, error) {
	var of unix.Statfs_t
	err := Again(func() error { return unix.Statfs(path, &of) })
	return nameFileSystem(uint32(of.Type)), err
}

func nameFileSystem(number uint32) FileSystem {
	if of, ok := fileSystems[number]; ok {
		return of
	}
	return FileSystem{Name: fmt.Sprintf("%#x", number)}
}
