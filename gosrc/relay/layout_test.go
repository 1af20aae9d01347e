package relay

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"testing"
	"unsafe"

	"github.com/overwire/overwire/gosrc/device/cpu"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/spawn/spawntest"
	"github.com/overwire/overwire/gosrc/job"
	"github.com/overwire/overwire/gosrc/load"
	"github.com/overwire/overwire/gosrc/peers"
	"github.com/overwire/overwire/gosrc/plan"
	"github.com/overwire/overwire/gosrc/save"
	"github.com/overwire/overwire/gosrc/tensor"
)

// plain opens a model of plain U8 tensors with these shapes, in this order.
func plain(t *testing.T, shapes ...[]int64) *load.Model {
	t.Helper()
	path := t.TempDir() + "/m.safetensors"
	var in []save.Input
	for i, shape := range shapes {
		n := int64(1)
		for _, d := range shape {
			n *= d
		}
		in = append(in, save.Input{Name: fmt.Sprint("t", i), DType: tensor.U8, Shape: shape, Data: make([]byte, n)})
	}
	if _, err := save.Write(t.Context(), job.New("save"), save.Spec{Path: path}, in); err != nil {
		t.Fatal(err)
	}
	m, err := load.Open(t.Context(), load.Spec{URIs: []string{path}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(m.Close)
	return m
}

// needsOf returns the ranks' needs for tensors that are cut along these dimensions. -1 means that each rank needs all
// of a tensor.
func needsOf(m *load.Model, ranks int64, dims ...int64) (needs []plan.Request) {
	for at, dim := range dims {
		for rank := range ranks {
			q := plan.Request{Tensor: int64(at), Dest: uintptr(rank), Hi0: plan.Whole, Hi1: plan.Whole}
			if dim >= 0 {
				size := m.Index().Tensors[at].Shape[dim]
				block := (size + ranks - 1) / ranks
				lo, hi := min(rank*block, size), min((rank+1)*block, size)
				if dim == 0 {
					q.Lo0, q.Hi0 = lo, hi
				} else {
					q.Lo1, q.Hi1 = lo, hi
				}
			}
			needs = append(needs, q)
		}
	}
	return needs
}

// startLaidOut calls Start and waits for the layout.
func startLaidOut(m *load.Model, spec *Spec) (*Relay, error) {
	r, err := Start(m, spec)
	if err == nil {
		err = r.awaitLayout()
	}
	if err != nil && r != nil {
		_, _ = r.Job().Wait(-1)
	}
	return r, err
}

// Bytes that only one rank needs are read by that rank and not sent. Bytes that several ranks need are read by one of
// them and sent. Nothing is read twice, and all ranks read about the same amount.
func TestCuts(t *testing.T) {
	m := plain(t, []int64{4096, 1024}, []int64{2048, 2048}, []int64{1000, 999}, []int64{7}, []int64{3 << 20})
	const ranks = 3
	spec := Spec{Tensors: []int64{0, 1, 2, 3, 4}, Needs: needsOf(m, ranks, 0, 1, -1, 0, 0),
		Size: ranks * (1<<20 + 4096), Ranks: ranks, Mapped: true, Buffers: 2}
	readers, all := map[plan.ChunkOf]int{}, 0
	var read [ranks]int64
	var pieces []loadPiece
	for rank := range ranks {
		s := spec
		s.Rank = rank
		r, err := startLaidOut(m, &s)
		if err != nil {
			t.Fatal(err)
		}
		for _, one := range r.lay.reads {
			c := plan.ChunkOf{Data: one.Data, N: one.N}
			if by, twice := readers[c]; twice {
				t.Errorf("chunk %v is read by ranks %d and %d", c, by, rank)
			}
			readers[c] = rank
			read[rank] += int64(r.lay.chunkAt(c).Stored)
			at := r.lay.offsetInPart(c)
			travels := at.off < r.lay.parts[at.part].used
			if first := c.Data == 1 || c.Data == 2; first && !travels {
				t.Errorf("rank %d does not send chunk %v, which all ranks need", rank, c)
			}
			// Each rank needs a third of tensor 0's rows. Only chunks with rows of two ranks are sent.
			third := 1366 * m.Index().Tensors[0].Bytes / 4096
			if c.Data == 0 && travels && int64(c.N) != third/plainChunkBytes && int64(c.N) != 2*third/plainChunkBytes {
				t.Errorf("chunk %v is sent", c)
			}
		}
		if all, pieces = len(r.lay.ix.Chunks), r.lay.pieces; len(pieces) < 3 {
			t.Errorf("%d pieces", len(pieces))
		}
		r.Job().Cancel()
		if _, err := r.Job().Wait(-1); !errors.Is(err, errs.ErrCancelled) {
			t.Error(err)
		}
	}
	if len(readers) != all {
		t.Errorf("%d of %d chunks are read", len(readers), all)
	}
	for rank, n := range read {
		if even := (read[0] + read[1] + read[2]) / ranks; n < even*8/10 || n > even*12/10 {
			t.Errorf("rank %d reads %d bytes of %v", rank, n, read)
		}
	}
	for _, wrong := range []func(s *Spec){
		func(s *Spec) { s.Size = 3 * 4096 }, func(s *Spec) { s.Buffers = 0 }, func(s *Spec) { s.Mapped = false },
		func(s *Spec) { s.Needs[0].Dest = ranks }, func(s *Spec) { s.Needs[0].Dest = ^uintptr(0) },
		func(s *Spec) { s.Needs[0].Tensor = 9 },
		func(s *Spec) { s.Needs[0].Hi0 = 5000 }, func(s *Spec) { s.Needs[3].Hi1 = 2049 },
	} {
		s := spec
		s.Needs = slices.Clone(spec.Needs)
		wrong(&s)
		if _, err := startLaidOut(m, &s); !errors.Is(err, errs.ErrArgument) {
			t.Errorf("%+v: %v", s, err)
		}
	}
	if left := spawntest.Left(); len(left) != 0 {
		t.Errorf("still running: %v", left)
	}
}

// Aliases with a different row size are sent with the column parts of their tensor, whole or cut along either
// dimension. A request for a name that the spec does not share is refused, even if its bytes are sent.
func TestAliasesAreSent(t *testing.T) {
	const golden = "../../tests/goldens/save/other-rows-1.0/parts.safetensors"
	m, err := load.Open(t.Context(), load.Spec{URIs: []string{golden}})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	find := m.Index().Finder()
	at := func(name string) int64 { return int64(find(0, name)) }
	whole := func(name string) plan.Request {
		return plan.Request{Tensor: at(name), Hi0: plan.Whole, Hi1: plan.Whole}
	}
	reqs := []plan.Request{whole("a"), whole("a_flat"), whole("a_tall"), whole("a_wide"), whole("n"), whole("n_flat"),
		{Tensor: at("a_flat"), Lo0: 1001, Hi0: 9999, Hi1: plan.Whole}, {Tensor: at("a_tall"), Lo0: 3, Hi0: 1001, Lo1: 5, Hi1: 16},
		{Tensor: at("a_wide"), Lo0: 5, Hi0: 16, Lo1: 1, Hi1: 3}, {Tensor: at("a"), Hi0: plan.Whole, Lo1: 128, Hi1: 192},
		{Tensor: at("p_same"), Hi0: plan.Whole, Lo1: 1, Hi1: 2}}
	l, err := m.Start(reqs, load.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if _, err := l.Job().Wait(-1); err != nil {
		t.Fatal(err)
	}
	spec := &Spec{Size: 1<<21 + 8192, Ranks: 1, Mapped: true, Buffers: 2}
	for i := range reqs {
		if n := reqs[i].Tensor; !slices.Contains(spec.Tensors, n) {
			spec.Tensors = append(spec.Tensors, n)
		}
		spec.Needs = append(spec.Needs, reqs[i])
	}
	r, err := Start(m, spec)
	if err != nil {
		t.Fatal(err)
	}
	want, got := make([][]byte, len(reqs)), make([][]byte, len(reqs))
	for i := range reqs {
		mem, _, _, _ := l.Take(i)
		want[i], got[i] = slices.Clone(mem.Slice()), make([]byte, mem.Bytes)
		mem.Release()
		reqs[i].Dest = uintptr(unsafe.Pointer(&got[i][0]))
	}
	unshared := whole("a_same")
	unshared.Dest = reqs[0].Dest
	if err := r.Aim([]plan.Request{unshared}); !errors.Is(err, errs.ErrArgument) {
		t.Errorf("a name that is not shared: %v", err)
	}
	if err := r.Aim(reqs); err != nil {
		t.Fatal(err)
	}
	offer, err := r.Offer()
	if err == nil {
		err = r.Join([]peers.Offer{offer})
	}
	if err != nil {
		t.Fatal(err)
	}
	if _, err := r.Job().Wait(-1); err != nil {
		t.Fatal(err)
	}
	for i := range reqs {
		if !bytes.Equal(got[i], want[i]) {
			t.Errorf("%+v has wrong bytes", reqs[i])
		}
	}
}

// Aim refuses requests for tensors that are not sent. A valid request still works afterwards.
func TestAimRefuses(t *testing.T) {
	m := plain(t, []int64{4096, 16}, []int64{4096, 16}, []int64{0, 16})
	r, err := Start(m, &Spec{Tensors: []int64{1, 2}, Size: 1<<21 + 8192, Ranks: 1, Mapped: true, Buffers: 2})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		r.Job().Cancel()
		_, _ = r.Job().Wait(-1)
	}()
	to, err := cpu.Alloc([]int64{4096 * 16})
	if err != nil {
		t.Fatal(err)
	}
	defer cpu.Release(to)
	whole := func(tensor int64) plan.Request {
		return plan.Request{Tensor: tensor, Dest: uintptr(to[0].Ptr), Hi0: plan.Whole, Hi1: plan.Whole}
	}
	for _, wrong := range []int64{0, 3, -1} {
		if err := r.Aim([]plan.Request{whole(1), whole(wrong)}); !errors.Is(err, errs.ErrArgument) {
			t.Errorf("tensor %d: %v", wrong, err)
		}
	}
	if err := r.Aim([]plan.Request{whole(1), whole(2)}); err != nil {
		t.Error(err)
	}
}
