package load

// This file computes file identities. Ranks that open a model's files at different times compare them to detect
// changes.

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"hash"

	"github.com/overwire/overwire/gosrc/tensor"
)

// A State identifies a file of a model. For a local file, the first five fields are the results of fstat when the file
// was opened. Pin is set for remote objects. Fields with unknown values are zero.
type State struct {
	Device   uint64 `json:"device"`
	Inode    uint64 `json:"inode"`
	Size     int64  `json:"size"`
	Modified int64  `json:"modified"`
	Changed  int64  `json:"changed"`
	Pin      string `json:"pin"`
	// Network says that the file is on a network file system. Hosts may see different inode numbers there.
	Network bool `json:"network"`
	// Layout is a digest of the offsets and checksums of all tensors and chunks in the file.
	Layout string `json:"layout"`
	// Sealed says that Layout covers checksums of all tensor bytes in the file.
	Sealed bool `json:"sealed"`
}

// FileStates returns a State for each file of the model. It reads nothing.
func (m *Model) FileStates() []State {
	layouts := m.layoutDigests()
	states := make([]State, len(m.srcs))
	for i, s := range m.srcs {
		f := s.Facts()
		id := f.Identity
		states[i] = State{
			Device: id.Device, Inode: id.Inode, Size: m.held.Sources[i].Size, Modified: id.Modified,
			Changed: id.Changed, Pin: id.Pin, Network: f.Remote && f.File != nil, Layout: layouts[i],
			Sealed: m.held.Sources[i].Overwire(),
		}
	}
	return states
}

// layoutDigests returns State.Layout for each source.
func (m *Model) layoutDigests() []string {
	sums := make([]hash.Hash, len(m.held.Sources))
	b := []byte{}
	put := func(v ...int64) {
		for _, n := range v {
			b = binary.LittleEndian.AppendUint64(b, uint64(n))
		}
	}
	for i := range sums {
		s := &m.held.Sources[i]
		sums[i], b = sha256.New(), b[:0]
		put(s.Size, s.Data)
		sums[i].Write(append(b, s.Format...))
	}
	for i := range m.held.Tensors {
		t := &m.held.Tensors[i]
		b = b[:0]
		put(int64(len(t.Name)), t.Off, t.Bytes, int64(t.Alias), int64(t.DType), int64(t.Parts), int64(t.ChunkBytes),
			int64(len(t.Shape)))
		put(t.Shape...)
		b = append(append(b, t.Hash[:]...), t.Name...)
		if t.Alias >= 0 {
			t = &tensor.Tensor{Source: t.Source}
		}
		for k := range t.Count {
			c := &m.held.Chunks[t.First+k]
			put(c.Off, int64(c.Stored), int64(c.Logical), int64(c.Sum), int64(c.Codec), int64(c.Transform),
				int64(c.SegTiles))
		}
		sums[t.Source].Write(b)
	}
	out := make([]string, len(sums))
	for i, s := range sums {
		out[i] = hex.EncodeToString(s.Sum(nil))
	}
	return out
}
