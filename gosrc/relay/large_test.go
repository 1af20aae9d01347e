package relay

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/load"
	"github.com/overwire/overwire/gosrc/plan"
)

// sparse opens a plain model of n tensors of one chunk each. The tensors from `at` on contain the bytes that sparse
// returns, and the others zeros.
func sparse(t *testing.T, n, at int64) (*load.Model, []byte) {
	t.Helper()
	const each = plainChunkBytes
	var h strings.Builder
	for i := range n {
		fmt.Fprintf(&h, `,"t%05d":{"dtype":"U8","shape":[%d],"data_offsets":[%d,%d]}`, i, each, i*each, (i+1)*each)
	}
	text := "{" + h.String()[1:] + "}"
	head := append(binary.LittleEndian.AppendUint64(nil, uint64(len(text))), text...)
	f, err := os.Create(filepath.Join(t.TempDir(), "sparse.safetensors"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	want := bytes.Repeat([]byte{0xab}, each)
	_, first := f.Write(head)
	_, second := f.WriteAt(bytes.Repeat(want, int(n-at)), int64(len(head))+at*each)
	if err := errors.Join(first, second); err != nil {
		t.Fatal(err)
	}
	m, err := load.Open(t.Context(), load.Spec{URIs: []string{f.Name()}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(m.Close)
	return m, want
}

// A group of a thousand ranks on several hosts loads through the largest possible buffers. Larger buffers, and buffers
// without space for each rank's share, are refused before anything is read.
func TestManyRanks(t *testing.T) {
	const ranks, rank, n = 1000, 997, 2800
	m, want := sparse(t, n, n-12)
	size := int64(maxSize) / shareAlign / ranks * shareAlign * ranks
	ring, err := unix.MmapPtr(-1, 0, nil, uintptr(size), unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_PRIVATE|unix.MAP_ANON|unix.MAP_NORESERVE)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.MunmapPtr(ring, uintptr(size)) }()
	spec := Spec{Ring: []uint64{uint64(uintptr(ring))}, Size: size, Ranks: ranks, Here: 8, Rank: rank}
	for i := range int64(n) {
		spec.Tensors = append(spec.Tensors, i)
	}
	for _, wrong := range []func(s *Spec){
		func(s *Spec) { s.Size = math.MaxUint32 + 1 }, func(s *Spec) { s.Size = 8 << 30 },
		func(s *Spec) { s.Size = ranks*shareAlign - 1 },
		func(s *Spec) { s.Ring, s.Mapped, s.Buffers = nil, true, 1 },
	} {
		s := spec
		wrong(&s)
		if _, err := startLaidOut(m, &s); !errors.Is(err, errs.ErrArgument) {
			t.Errorf("%d ranks, %d bytes: %v", s.Ranks, s.Size, err)
		}
	}
	r, err := startLaidOut(m, &spec)
	if err != nil {
		t.Fatal(err)
	}
	got := make([]byte, len(want))
	if err := r.Aim([]plan.Request{{Tensor: int64(r.lay.reads[0].Data), Dest: uintptr(unsafe.Pointer(&got[0])),
		Hi0: plan.Whole, Hi1: plan.Whole}}); err != nil {
		t.Fatal(err)
	}
	for k := range r.lay.pieces {
		for ok := false; !ok; {
			if ok, err = r.AwaitOwnShare(k, time.Minute); err != nil {
				t.Fatal(err)
			}
		}
		if err := r.DecodePiece(k, 0); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := r.Job().Wait(-1); err != nil || !bytes.Equal(got, want) {
		t.Errorf("wrong bytes, %v", err)
	}
	if j := r.dec.tasks[0]; int64(j.Src) < 1<<31 {
		t.Errorf("the chunk is at offset %d, want at least 2 GiB", j.Src)
	}
}
