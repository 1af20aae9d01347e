package safetensors

import (
	"context"
	"encoding/binary"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/source"
)

// memory is a source in memory that counts its reads.
type memory struct {
	b     []byte
	size  int64 // reported size; -1 means len(b)
	reads int
	bytes int64
}

func inMemory(b []byte) *memory { return &memory{b: b, size: -1} }

func (m *memory) URI() string  { return "model.safetensors" }
func (m *memory) Close() error { return nil }

func (m *memory) Facts() source.Facts { return source.Facts{} }

func (m *memory) Size() int64 {
	if m.size >= 0 {
		return m.size
	}
	return int64(len(m.b))
}

func (m *memory) ReadAt(ctx context.Context, p []byte, off int64) error {
	m.reads++
	m.bytes += int64(len(p))
	if err := ctx.Err(); err != nil {
		return errs.New(errs.ErrCancelled, "%v", err)
	}
	if off < 0 || off+int64(len(p)) > int64(len(m.b)) {
		return errs.New(errs.ErrCorrupt, "truncated")
	}
	copy(p, m.b[off:])
	return nil
}

// file returns a file with the given header and data.
func file(header, data string) []byte {
	b := binary.LittleEndian.AppendUint64(nil, uint64(len(header)))
	return append(append(b, header...), data...)
}
