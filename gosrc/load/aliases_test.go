package load

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"
	"unsafe"

	"github.com/overwire/overwire/gosrc/codec"
	"github.com/overwire/overwire/gosrc/codec/x16"
	"github.com/overwire/overwire/gosrc/device/cpu"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/format/overwire"
	"github.com/overwire/overwire/gosrc/internal/crc32c"
	"github.com/overwire/overwire/gosrc/internal/spawn/spawntest"
	"github.com/overwire/overwire/gosrc/plan"
	"github.com/overwire/overwire/gosrc/tensor"
)

// otherShape returns a random shape with n elements.
func otherShape(r *rand.Rand, n int64) []int64 {
	shape := []int64{n}
	for range r.IntN(4) {
		at := r.IntN(len(shape))
		for _, p := range []int64{2, 2, 3, 4, 8} {
			if shape[at]%p == 0 && r.IntN(2) == 0 {
				shape[at] /= p
				shape = slices.Insert(shape, at, p)
			}
		}
	}
	return shape
}

// aliased writes a container with tensors in various numbers of column parts. Their aliases have different shapes,
// which only old writers stored. It returns the path, and each tensor's bytes by name.
func aliased(t *testing.T, r *rand.Rand) (string, map[string][]byte) {
	t.Helper()
	var items []overwire.Item
	bytesOf := map[string][]byte{}
	for k := range 12 {
		d := []tensor.DType{tensor.BF16, tensor.U8, tensor.F32, tensor.F4}[r.IntN(4)]
		n := int64(1+r.IntN(6)) << (8 + r.IntN(8))
		size := n * int64(d.Bits()) / 8
		data := make([]byte, size)
		for i := range data {
			data[i] = byte(8 * r.NormFloat64())
		}
		holder := len(items)
		for at := range 1 + r.IntN(4) {
			it := overwire.Item{Name: fmt.Sprintf("%02d.%d", k, at), DType: d, Shape: otherShape(r, n),
				ChunkBytes: 4096 << r.IntN(4)}
			if at > 0 {
				it.Alias = holder + 1
			} else {
				as := tensor.Tensor{DType: d, Shape: it.Shape, Bytes: size}
				for it.Parts = 8; !as.Splits(it.Parts); it.Parts /= 2 {
				}
				if r.IntN(4) == 0 {
					it.Parts = 1
				}
			}
			items, bytesOf[it.Name] = append(items, it), data
		}
	}
	l, err := overwire.NewLayout(nil, items, nil, false)
	if err != nil {
		t.Fatal(err)
	}
	file := make([]byte, l.Start())
	var e codec.Encoder
	for i := range l.Tensors {
		x := &l.Tensors[i]
		g := x.Grid()
		for k := range int64(x.Count) {
			c := int(x.First) + int(k)
			part, lo, hi := g.Chunk(k)
			data := bytesOf[x.Name]
			if g.Parts > 1 {
				var columns []byte
				for at := part * g.PartRow; at < x.Bytes; at += g.Parts * g.PartRow {
					columns = append(columns, data[at:at+g.PartRow]...)
				}
				data = columns
			}
			var ways codec.Ways
			if all := x16.TransformsFor(x.DType); len(all) > 0 {
				ways.X16 = all[0]
			}
			stored := bytes.Clone(e.Encode(nil, data[lo:hi], ways, &l.Chunks[c]))
			l.Chunks[c].Sum = crc32c.Sum(stored)
			off, err := l.Place(c, uint32(len(stored)))
			if err != nil {
				t.Fatal(err)
			}
			file = append(append(file, make([]byte, off-int64(len(file)))...), stored...)
		}
	}
	front, size, err := l.Seal(codec.Known)
	if err != nil {
		t.Fatal(err)
	}
	file = append(file, make([]byte, size-int64(len(file)))...)
	copy(file, front)
	path := filepath.Join(t.TempDir(), "aliased.safetensors")
	if err := os.WriteFile(path, file, 0o600); err != nil {
		t.Fatal(err)
	}
	return path, bytesOf
}

// blockOf returns the bytes of a tensor that a request selects. ok is false if they do not begin and end on byte
// boundaries.
func blockOf(x *tensor.Tensor, data []byte, q Request) (out []byte, ok bool) {
	rows, columns, cell := int64(1), int64(1), int64(x.DType.Bits())
	for i, n := range x.Shape {
		switch i {
		case 0:
			rows = n
		case 1:
			columns = n
		default:
			cell *= n
		}
	}
	if q.Hi0 == plan.Whole {
		q.Lo0, q.Hi0 = 0, rows
	}
	if q.Hi1 == plan.Whole {
		q.Lo1, q.Hi1 = 0, columns
	}
	if whole := q.Lo1 == 0 && q.Hi1 == columns; columns*cell%8 != 0 || q.Lo1*cell%8 != 0 || q.Hi1*cell%8 != 0 {
		lo, hi := q.Lo0*columns*cell, q.Hi0*columns*cell
		if ok = whole && lo%8 == 0 && hi%8 == 0; ok {
			out = data[lo/8 : hi/8]
		}
		return out, ok
	}
	for row := q.Lo0; row < q.Hi0; row++ {
		at := row * columns * cell / 8
		out = append(out, data[at+q.Lo1*cell/8:at+q.Hi1*cell/8]...)
	}
	return out, true
}

// requestsOf returns requests for every tensor of a model, whole and as random rows, columns and blocks. want holds
// their bytes.
func requestsOf(r *rand.Rand, ix *tensor.Index, bytesOf map[string][]byte) (reqs []Request, want [][]byte) {
	for i := range ix.Tensors {
		x := &ix.Tensors[i]
		for k := range 7 {
			q := Request{Tensor: int64(i), Hi0: plan.Whole, Hi1: plan.Whole}
			if k&1 != 0 {
				q.Lo0 = r.Int64N(x.Shape[0])
				q.Hi0 = q.Lo0 + r.Int64N(x.Shape[0]-q.Lo0+1)
			}
			if k > 1 && len(x.Shape) > 1 {
				q.Lo1 = r.Int64N(x.Shape[1])
				q.Hi1 = q.Lo1 + r.Int64N(x.Shape[1]-q.Lo1+1)
			}
			if b, ok := blockOf(x, bytesOf[x.Name], q); ok {
				reqs, want = append(reqs, q), append(want, b)
			}
		}
	}
	return reqs, want
}

// loadsBlocks loads random blocks of a model, to memory of the engine and of the caller.
func loadsBlocks(t *testing.T, r *rand.Rand, m *Model, opt Options, bytesOf map[string][]byte) {
	t.Helper()
	reqs, want := requestsOf(r, m.Index(), bytesOf)
	to := make([][]byte, len(reqs))
	for i := range reqs {
		if opt.Device == "" && len(want[i]) > 0 && r.IntN(2) == 0 {
			to[i] = bytes.Repeat([]byte{0xd7}, len(want[i]))
			reqs[i].Dest = uintptr(unsafe.Pointer(&to[i][0]))
		}
	}
	l, err := m.Start(reqs, opt)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if _, err := l.Job().Wait(-1); err != nil {
		t.Fatal(err)
	}
	for i := range reqs {
		got := to[i]
		if got == nil {
			mem, _, _, ok := l.Take(i)
			if !ok {
				t.Fatalf("%+v has not landed", reqs[i])
			}
			if got = []byte{}; mem.Bytes > 0 {
				got = bytes.Clone(unsafe.Slice((*byte)(mem.Ptr), mem.Bytes))
			}
			mem.Release()
		}
		if x := &m.Index().Tensors[reqs[i].Tensor]; !bytes.Equal(got, want[i]) {
			t.Errorf("%s %v %v: %+v has wrong bytes", x.Name, x.DType, x.Shape, reqs[i])
		}
	}
}

// An alias of any shape loads correctly whole and in blocks, for any number of column parts: from its file, as part of
// a combined model, and from pinned memory.
func TestAliasesOfParts(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 3))
	for range 4 {
		path, bytesOf := aliased(t, r)
		m := opened(t, Spec{URIs: []string{path}})
		loadsBlocks(t, r, m, Options{}, bytesOf)
		both, err := Several([]*Model{m, m})
		if err != nil {
			t.Fatal(err)
		}
		loadsBlocks(t, r, both, Options{}, bytesOf)
		both.Close()
		j, err := m.Pin(Options{})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := j.Wait(-1); err != nil {
			t.Fatal(err)
		}
		loadsBlocks(t, r, m, Options{}, bytesOf)
	}
	if left := spawntest.Left(); len(left) != 0 {
		t.Errorf("still running: %v", left)
	}
}

// If no task reads the bytes of a request, the load fails with an engine error that names the tensor. The same holds
// for an alias that is planned with the column parts of a tensor with a different row length.
func TestUnplanned(t *testing.T) {
	path, _ := write(t, "a", []int64{40, 4})
	off := false
	m := opened(t, Spec{URIs: []string{path}, Map: &off})
	reqs := []Request{{Tensor: 0, Hi0: plan.Whole, Hi1: plan.Whole}}
	wants, err := plan.Check(m.ix, reqs)
	if err != nil {
		t.Fatal(err)
	}
	l := newLoading(m, Target{}, wants)
	if l.out.mem, err = cpu.Alloc([]int64{160}); err != nil {
		t.Fatal(err)
	}
	defer cpu.Release(l.out.mem)
	s := newExecution(l, reqs, Options{})
	s.plan.Left[0] = 0
	var at *errs.At
	if err := s.landMapped(l.job); !errors.Is(err, errs.ErrEngine) || !errors.As(err, &at) || at.Tensor != "a.t0" ||
		l.job.Tensors.Load() != 0 {
		t.Errorf("%v, %d landed", err, l.job.Tensors.Load())
	}
	ix := &tensor.Index{Sources: []tensor.Source{{URI: "f"}}, Tensors: []tensor.Tensor{
		{Name: "in parts", DType: tensor.U8, Shape: []int64{64, 128}, Bytes: 8192, Alias: -1, Parts: 2,
			ChunkBytes: 4096, Count: 2},
		{Name: "flat", DType: tensor.U8, Shape: []int64{8192}, Bytes: 8192, Alias: 0}}}
	if _, err := plan.Check(ix, []Request{{Tensor: 1, Hi0: plan.Whole,
		Hi1: plan.Whole}}); !errors.Is(err, errs.ErrEngine) || !errors.As(err, &at) || at.Tensor != "flat" {
		t.Errorf("%v", err)
	}
}

// When an alias with a different row length is loaded, a checksum detects a changed byte in the column parts. The error
// names the tensor, the chunk and the offset.
func TestAliasesOfPartsDamage(t *testing.T) {
	b, err := os.ReadFile("../../tests/goldens/save/other-rows-1.0/parts.safetensors")
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "x.safetensors")
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
	m := opened(t, Spec{URIs: []string{path}})
	find := m.Index().Finder()
	c := m.Index().Chunks[m.Index().Tensors[find(0, "a")].First+5]
	b[c.Off+int64(c.Stored)/2] ^= 4
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
	l, err := m.Start([]Request{{Tensor: int64(find(0, "a_flat")), Hi0: plan.Whole, Hi1: plan.Whole}}, Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	var at *errs.At
	if _, err := l.Job().Wait(-1); !errors.Is(err, errs.ErrCorrupt) || !errors.As(err, &at) || at.Tensor != "a" ||
		at.Chunk != 5 || at.Offset != c.Off {
		t.Errorf("%v", err)
	}
}
