// Package memory provides a source for a file that was read into memory as a whole. Facts.View returns its
// bytes without a copy.
package memory

import (
	"context"
	"sync"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/source"
)

// A Memory is a file in memory. It implements source.Source.
type Memory struct {
	uri   string
	bytes []byte
	close sync.Once
	free  func()

	// Compare makes every load verify the checksums of its bytes. It is set before the source is used.
	Compare bool

	mu   sync.RWMutex // held for reading by every copy
	shut bool
}

// New returns a source for bytes that stay valid until free is called. Close calls free once. uri names the
// source in errors.
func New(uri string, bytes []byte, free func()) *Memory {
	return &Memory{uri: uri, bytes: bytes, free: free}
}

// URI returns the name of the file.
func (m *Memory) URI() string { return m.uri }

// Size returns the number of bytes.
func (m *Memory) Size() int64 { return int64(len(m.bytes)) }

// ReadAt copies bytes; see source.Source.
func (m *Memory) ReadAt(ctx context.Context, p []byte, off int64) error {
	m.mu.RLock()
	defer m.mu.RUnlock()
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	b, err := m.sliceBytes(off, int64(len(p)))
	if err == nil {
		copy(p, b)
	}
	return err
}

// Facts implements source.Source: the bytes can be viewed.
func (m *Memory) Facts() source.Facts { return source.Facts{View: m.viewBytes, Compare: m.Compare} }

func (m *Memory) viewBytes(off, n int64) ([]byte, error) {
	m.mu.RLock()
	defer m.mu.RUnlock()
	return m.sliceBytes(off, n)
}

// sliceBytes returns a range of the bytes. The caller holds m.mu.
func (m *Memory) sliceBytes(off, n int64) ([]byte, error) {
	if m.shut {
		return nil, m.placeError(off, errs.New(errs.ErrArgument, "the source is closed"))
	}
	if off < 0 || n < 0 || off > m.Size() || n > m.Size()-off {
		return nil, m.placeError(off, errs.New(errs.ErrCorrupt,
			"truncated: expected %d bytes from this offset, but the file has %d", n, m.Size()))
	}
	return m.bytes[off : off+n : off+n], nil
}

// Close waits for copies in flight and frees the bytes. Views become invalid.
func (m *Memory) Close() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.shut = true
	m.close.Do(m.free)
	return nil
}

func (m *Memory) placeError(off int64, err error) error {
	return errs.Place("read", m.uri, "", off, err)
}
