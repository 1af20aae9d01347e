package regular

// This file identifies file systems by the number that statfs returns.

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// A Kind of file system says where its files are. It determines how best to read them, and whether a sync waits.
type Kind int

// The kinds of file systems.
const (
	Unknown  Kind = iota // like Disk, but perhaps on a server
	Disk                 // on a disk of this machine, through the kernel's page cache
	Network              // on a server, or with its own cache: direct I/O has no benefit
	InMemory             // only in memory: no call and no sync waits for a disk
)

// A FileSystem is the file system of a file.
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
