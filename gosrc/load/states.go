package load

// This file computes digests of the layout of a model's files, of samples, and of tensors on a GPU. Ranks that open a
// model's files at different times compare them to detect changes.

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"hash"
	"runtime"

	"github.com/overwire/overwire/gosrc/codec/digest"
	"github.com/overwire/overwire/gosrc/device/cpu"
	"github.com/overwire/overwire/gosrc/device/cuda"
	"github.com/overwire/overwire/gosrc/device/cuda/stream"
	"github.com/overwire/overwire/gosrc/internal/spawn"
	"github.com/overwire/overwire/gosrc/source"
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
	// Network means that the file is on a network file system. Hosts may see different inode numbers there.
	Network bool `json:"network"`
	// Layout is a digest of the offsets and checksums of all tensors and chunks in the file.
	Layout string `json:"layout"`
	// Sealed means that Layout covers checksums of all tensor bytes in the file.
	Sealed bool `json:"sealed"`
	// Sample is a digest of Changed and of samples of every tensor, if they were requested and neither Sealed nor Pin
	// is set. Programs cannot set the time Changed, so it shows writes, except those through memory that maps the
	// file and was not stored yet. Samples also show most differences between files with equal times, as images may
	// have.
	Sample string `json:"sample"`
}

// layoutDigests returns State.Layout for each source.
func layoutDigests(ix *tensor.Index) []string {
	sums := make([]hash.Hash, len(ix.Sources))
	b := []byte{}
	put := func(v ...int64) {
		for _, n := range v {
			b = binary.LittleEndian.AppendUint64(b, uint64(n))
		}
	}
	for i := range sums {
		s := &ix.Sources[i]
		sums[i], b = sha256.New(), b[:0]
		put(s.Size, s.Data)
		sums[i].Write(append(b, s.Format...))
	}
	for i := range ix.Tensors {
		t := &ix.Tensors[i]
		b = b[:0]
		put(int64(len(t.Name)), t.Off, t.Bytes, int64(t.Alias), int64(t.DType), int64(t.Parts), int64(t.ChunkBytes),
			int64(len(t.Shape)))
		put(t.Shape...)
		b = append(append(b, t.Hash[:]...), t.Name...)
		if t.Alias >= 0 {
			t = &tensor.Tensor{Source: t.Source}
		}
		for k := range t.Count {
			c := &ix.Chunks[t.First+k]
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

// Samples are read from a plain file in these sizes: one for each tensor, and one more for each sampleGap of its bytes.
const (
	sampleBytes = 4 << 10
	sampleGap   = 16 << 20
)

// sampleDigest returns State.Sample of a file.
func sampleDigest(ctx context.Context, ix *tensor.Index, file int, src source.Source, state *State) (string, error) {
	type sample struct{ off, end int64 }
	var samples []sample
	for i := range ix.Tensors {
		t := &ix.Tensors[i]
		if int(t.Source) != file || t.Alias >= 0 || t.Stored == 0 {
			continue
		}
		n := 1 + t.Stored/sampleGap
		for k := range n { // in the middle of each of n equal parts
			lo, hi := t.Off+t.Stored/n*k, t.Off+t.Stored/n*(k+1)
			lo = max(lo, lo+(hi-lo-sampleBytes)/2)
			samples = append(samples, sample{lo, min(lo+sampleBytes, hi, state.Size)})
		}
	}
	sum, workers := sha256.New(), min(8, runtime.GOMAXPROCS(0))
	fmt.Fprintf(sum, "%d\n", state.Changed)
	if state.Network {
		workers = 32 // each read may wait for a server
	}
	const batch = 16
	sums := make([][sha256.Size]byte, (len(samples)+batch-1)/batch)
	err := spawn.Each(ctx, "samples", workers, len(sums), func(i int) error {
		h, b := sha256.New(), make([]byte, sampleBytes)
		for _, s := range samples[i*batch : min((i+1)*batch, len(samples))] {
			part := b[:max(0, s.end-s.off)]
			if err := src.ReadAt(ctx, part, s.off); err != nil {
				return err
			}
			h.Write(part)
		}
		h.Sum(sums[i][:0])
		return nil
	})
	for i := range sums {
		sum.Write(sums[i][:])
	}
	return hex.EncodeToString(sum.Sum(nil)), err
}

// digestBytes limits how much of a model Digests loads onto the GPU at a time. A larger tensor is still loaded whole.
const digestBytes = 256 << 20

// Digests loads tensors onto a GPU in batches and computes their digests there. It frees the memory after each
// batch. It reads a tensor only once even if it has aliases. done gets each tensor's number and digest. The error is
// errs.ErrMemory if the GPU has no space for the next batch.
func Digests(ctx context.Context, m *Model, gpu int, tensors []int, done func(i int, sum digest.Sum)) error {
	d, err := cuda.Open(gpu)
	if err != nil {
		return err
	}
	names := map[int][]int{} // keyed by the tensor that holds the bytes
	var holders []int
	for _, i := range tensors {
		holder := i
		if a := m.ix.Tensors[i].Alias; a >= 0 {
			holder = int(a)
		}
		if names[holder] == nil {
			holders = append(holders, holder)
		}
		names[holder] = append(names[holder], i)
	}
	for len(holders) > 0 {
		n, size := 0, int64(0)
		for n < len(holders) && (n == 0 || size+m.ix.Tensors[holders[n]].Bytes <= digestBytes) {
			size += m.ix.Tensors[holders[n]].Bytes
			n++
		}
		sums, err := digestBatch(ctx, d, m, gpu, holders[:n])
		if err != nil {
			return err
		}
		for k, sum := range sums {
			for _, i := range names[holders[k]] {
				done(i, sum)
			}
		}
		holders = holders[n:]
	}
	return nil
}

func digestBatch(ctx context.Context, d *cuda.Device, m *Model, gpu int, tensors []int) ([]digest.Sum, error) {
	mem, err := m.LoadWhole(ctx, tensors, Options{Device: fmt.Sprintf("cuda:%d", gpu)})
	if err != nil {
		return nil, err
	}
	defer cpu.Release(mem)
	views := make([]digest.View, len(tensors))
	for k, i := range tensors {
		views[k] = digest.Contiguous(uint64(uintptr(mem[k].Ptr)), m.ix.Tensors[i].Bytes)
	}
	return d.Digest(stream.Order{}, views, nil)
}
