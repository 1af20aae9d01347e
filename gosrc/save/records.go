package save

import (
	"context"

	"golang.org/x/sys/unix"

	"github.com/overwire/overwire/gosrc/format/tensors"
	"github.com/overwire/overwire/gosrc/internal/atomicfile"
	"github.com/overwire/overwire/gosrc/job"
)

// Records writes the records of a .tensors file and their data, one behind the
// other from an offset of an open file, and sets the Record of every item; head
// and index are the caller's. data has the bytes of each item, which stay as they
// are; key, if not nil, is what items that are Sealed are encrypted by. threads is
// as in Spec. It returns where the last one ends. A file that takes bytes only at
// its end (O_APPEND) must not be given.
func Records(ctx context.Context, fd int, path string, at int64, items []tensors.Item, data [][]byte, key *tensors.Key, threadsAsked int) (int64, error) {
	w := &writer{job: job.New("save"), threads: threads(threadsAsked)}
	bodies := make([]*item, len(items))
	for i := range items {
		it := &items[i]
		if it.Sealed && it.Bytes > 0 {
			it.Crypt = tensors.NewCrypt(it.Bytes, key.Derive)
		}
		it.Record = at
		at = it.Data() + it.Bytes
		bodies[i] = &item{name: it.Name, bytes: it.Bytes, body: memory(data[i])}
	}
	return at, w.flow(ctx, descriptor{fd, path}, path, bodies, items, key)
}

// descriptor is an output that is somebody else's open file.
type descriptor struct {
	fd   int
	path string
}

func (descriptor) scattered() {}

// Skip has nothing to do: what is not written of a file is zero.
func (descriptor) Skip(_, _ int64) error { return nil }

func (d descriptor) Write(p []byte, off int64) error {
	for len(p) > 0 {
		n, err := unix.Pwrite(d.fd, p, off)
		if err == unix.EINTR {
			continue
		}
		if err == nil && n == 0 {
			err = unix.EIO
		}
		if err != nil {
			return atomicfile.Failed(d.path, off, err)
		}
		p, off = p[n:], off+int64(n)
	}
	return nil
}
