package hoststore

// This file names files, copies them, checks their contents, and moves them to huge pages.

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"hash"
	"runtime"
	"slices"
	"unsafe"

	"github.com/overwire/overwire/gosrc/codec"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/format"
	"github.com/overwire/overwire/gosrc/internal/crc32c"
	"github.com/overwire/overwire/gosrc/internal/regular"
	"github.com/overwire/overwire/gosrc/internal/spawn"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/source/file"
	"github.com/overwire/overwire/gosrc/tensor"
	"github.com/zeebo/xxh3"
	"golang.org/x/sys/unix"
)

// block is the unit in which files are copied and plain files are summed.
const block = 4 << 20

// maxHeader is the largest header of a safetensors file.
const maxHeader = 100_000_000

// A label is the name of a file's bytes.
type label struct {
	name     string
	identity string // see request.Identity
}

// labelOf names the bytes of a file. ok is false if they cannot have a name: the file is not safetensors, has no
// identity, or could change without a change of its name. It reads only what the name covers.
func labelOf(ctx context.Context, src source.Source) (l label, ok bool, err error) {
	f := src.Facts()
	if !f.Identity.Known() {
		return label{}, false, nil
	}
	id := f.Identity
	text := sha256.Sum256(fmt.Appendf(nil, "%d %d %d %d %d %q %q", id.Device, id.Inode, id.Size, id.Modified,
		id.Changed, id.Object, id.Pin))
	l, isContainer, err := labelAs(ctx, src, hex.EncodeToString(text[:]))
	return l, l.name != "" && showsChanges(f, isContainer), err
}

// showsChanges reports whether each change of a file changes its name. Writes to a mapping do not change the times of
// a file in memory, but a container then has another index. Images have inode numbers and times that their builder
// chose. The identity of a remote file does not say which store it is from, so only containers, which the user has put
// into the store explicitly, may be remote.
func showsChanges(f source.Facts, isContainer bool) bool {
	if f.File == nil {
		return isContainer
	}
	var on regular.FileSystem
	err := f.File.WithFD(func(fd int) (err error) {
		on, err = regular.IdentifyFile(fd)
		return err
	})
	images := []string{"squashfs", "erofs", "iso9660", "udf", "vfat", "exfat"}
	return err == nil && (isContainer || f.Settled && on.Kind != regular.InMemory) && !slices.Contains(images, on.Name)
}

// labelAs names the bytes of a source with an identity. The name covers the identity, the header, and the index of a
// container. These do not prove the other bytes: anyone can write another file with the same header and checksums, but
// not one with the same identity. The name is "" if the file is not safetensors.
func labelAs(ctx context.Context, src source.Source, identity string) (l label, isContainer bool, err error) {
	head, err := source.Head(ctx, src)
	if err != nil || len(head) < 9 || head[8] != '{' {
		return label{}, false, err
	}
	data := 8 + int64(min(binary.LittleEndian.Uint64(head), maxSize))
	if data > 8+maxHeader || data > src.Size() {
		return label{}, false, nil
	}
	end := data
	var frame [40]byte // the start of a container's index, with the index's size
	if src.Size() >= data+int64(len(frame)) {
		if err := src.ReadAt(ctx, frame[:], data); err != nil {
			return label{}, false, err
		}
	}
	if isContainer = string(frame[:4]) == "OWIX"; isContainer {
		n := binary.LittleEndian.Uint64(frame[32:])
		if n > tensor.MaxIndex || int64(n) > src.Size()-data {
			return label{}, false, nil
		}
		end += int64(n)
	}
	sum := sha256.New()
	fmt.Fprintf(sum, "overwire host %d %q %d %d\n", protocol, identity, src.Size(), end)
	_, _ = sum.Write(head[:min(int64(len(head)), end)])
	if err := addRest(ctx, src, sum, int64(len(head)), end); err != nil {
		return label{}, false, err
	}
	return label{hex.EncodeToString(sum.Sum(nil)), identity}, isContainer, nil
}

// addRest adds the bytes from off to end to a digest.
func addRest(ctx context.Context, src source.Source, sum hash.Hash, off, end int64) error {
	buf := make([]byte, max(0, min(1<<20, end-off)))
	for ; off < end; off += int64(len(buf)) {
		buf = buf[:min(int64(len(buf)), end-off)]
		if err := src.ReadAt(ctx, buf, off); err != nil {
			return err
		}
		_, _ = sum.Write(buf)
	}
	return nil
}

// contentName returns the name of a container that does not come from a file: the SHA-256 of the SHA-256 of each block.
func contentName(ctx context.Context, src source.Source) (string, error) {
	hash := func(b []byte) []byte {
		sum := sha256.Sum256(b)
		return sum[:]
	}
	return sumBlocks(ctx, src, nil, hash, func([]byte, int64) error { return nil })
}

// quickSum returns the XXH3-128 of a block, which shows errors of a copy.
func quickSum(b []byte) []byte {
	sum := codec.HashOf(xxh3.Hash128(b))
	return sum[:]
}

// copyInto copies the bytes of a source to a memfd, and returns their sum. p may be nil.
func copyInto(ctx context.Context, fd int, src source.Source, done func(n int64), p *pace) (string, error) {
	return sumBlocks(ctx, src, p, quickSum, func(b []byte, off int64) error {
		for len(b) > 0 {
			n := 0
			err := regular.Again(func() (err error) {
				n, err = unix.Pwrite(fd, b, off)
				return err
			})
			if err != nil {
				return errs.FromOS(err)
			}
			b, off = b[n:], off+int64(n)
			done(int64(n))
		}
		return nil
	})
}

// sumBlocks reads all bytes of a source on several workers, and returns the SHA-256 of the hash of each block. use gets
// each block. p may be nil.
func sumBlocks(ctx context.Context, src source.Source, p *pace, hash func(b []byte) []byte,
	use func(b []byte, off int64) error) (string, error) {
	sums := make([][]byte, (src.Size()+block-1)/block)
	workers := min(8, runtime.GOMAXPROCS(0))
	free := make(chan []byte, workers)
	for range workers {
		free <- nil
	}
	sumBlock := func(i int) error {
		b := <-free
		if b == nil {
			b = make([]byte, block)
		}
		defer func() { free <- b }()
		off := int64(i) * block
		b = b[:min(block, src.Size()-off)]
		defer func() { b = b[:block] }()
		if err := src.ReadAt(ctx, b, off); err != nil {
			return err
		}
		sums[i] = hash(b)
		return use(b, off)
	}
	first := 0
	isAhead, err := p.awaitCore()
	for ; isAhead && err == nil && first < len(sums); first++ {
		if err = sumBlock(first); err == nil {
			isAhead, err = p.awaitCore()
		}
	}
	if err == nil {
		err = spawn.Each(ctx, "host store", workers, len(sums)-first, func(i int) error { return sumBlock(first + i) })
	}
	all := sha256.New()
	for i := range sums {
		_, _ = all.Write(sums[i])
	}
	return hex.EncodeToString(all.Sum(nil)), err
}

// checkContents returns an error unless the sealed bytes of fd have the name of the request, and are a valid file with
// the right checksums. It decodes nothing, so its cost depends only on the size.
func checkContents(ctx context.Context, fd int, q *request) error {
	src, err := file.FromFD(fd, "entry "+q.Name[:12])
	if err != nil {
		return err
	}
	defer src.Close()
	ix, err := format.Open(ctx, []source.Source{src}, format.Options{Known: codec.Known, Parts: true})
	if err != nil {
		return err
	}
	isContainer := ix.Sources[0].Overwire()
	switch {
	case !isContainer && (ix.Sources[0].Format != tensor.FormatSafetensors || q.Identity == ""):
		return errs.New(errs.ErrArgument, "the file's format does not match the request: a plain file "+
			"needs an identity")
	case q.Identity != "":
		err = compareName(ctx, src, label{q.Name, q.Identity})
	default:
		var now string
		if now, err = contentName(ctx, src); err == nil && now != q.Name {
			err = errs.New(errs.ErrCorrupt, "the bytes do not match the name of the entry")
		}
	}
	if err != nil {
		return err
	}
	if isContainer {
		return compareChunks(ctx, src, ix, runtime.GOMAXPROCS(0))
	}
	sum, err := sumBlocks(ctx, src, nil, quickSum, func([]byte, int64) error { return nil })
	if err == nil && sum != q.Sum {
		err = errs.New(errs.ErrCorrupt, "the copied bytes differ from those that the client read")
	}
	return err
}

// compareName returns an error unless the header of src, and for a container also the index, match l.
func compareName(ctx context.Context, src source.Source, l label) error {
	now, _, err := labelAs(ctx, src, l.identity)
	if err == nil && now != l {
		err = errs.New(errs.ErrCorrupt, "the header does not match the name of the entry")
	}
	return err
}

// compareChunks verifies the checksums of all chunks of a container.
func compareChunks(ctx context.Context, src source.Source, ix *tensor.Index, workers int) error {
	return spawn.Each(ctx, "host store", workers, len(ix.Tensors), func(i int) error {
		t := &ix.Tensors[i]
		var b []byte
		for k, c := range ix.Chunks[t.First : t.First+t.Count] {
			b = slices.Grow(b[:0], int(c.Stored))[:c.Stored]
			if err := src.ReadAt(ctx, b, c.Off); err != nil {
				return err
			}
			if sum := crc32c.Sum(b); sum != c.Sum {
				return &errs.At{Verb: "check", Source: src.URI(), Tensor: t.Name, Chunk: int64(k), Offset: c.Off,
					Err: errs.NewMismatch(c.Sum, sum)}
			}
		}
		return nil
	})
}

const hugePage = 2 << 20

// useHugePages moves the bytes of a sealed entry to huge pages, and returns the number of bytes that it has moved. That
// takes about 1 s per GB. Processes may read the bytes meanwhile. It stops early if the kernel cannot do it, if memory
// is short, or if the entry is dropped. A load to an H200 reads a memfd of 4 KiB pages at about half of the link's
// speed, and one of huge pages at nine tenths of it (bench/gpu/device_host_ways.py). Most systems give a memfd no huge
// pages by default, but Linux 6.1 and later does so on request.
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
