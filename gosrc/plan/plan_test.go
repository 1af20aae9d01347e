package plan

import (
	"math/rand/v2"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/overwire/overwire/gosrc/tensor"
)

// With Align, every staged piece begins at a block and ends at a block or the end of its file, and fits in its slot.
// Every task is inside its piece. From a tensor's second piece on, direct reads begin at a block.
func TestAlign(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	const block, piece = 4096, 1 << 20
	// These addresses, which are outside Go's heap, are never read or written.
	place, err := unix.Mmap(-1, 0, 8<<20, unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Munmap(place) }()
	for range 300 {
		ix := &tensor.Index{}
		var reqs []Request
		for s := range int32(1 + r.IntN(3)) {
			off := int64(8 + r.IntN(20_000))
			for range 1 + r.IntN(40) {
				n := []int64{r.Int64N(100), r.Int64N(50_000), r.Int64N(300_000), r.Int64N(4 << 20), piece,
					inPlaceMin}[r.IntN(6)]
				reqs = append(reqs, Request{Tensor: int64(len(ix.Tensors)), Hi0: Whole, Hi1: Whole})
				ix.Tensors = append(ix.Tensors, tensor.Tensor{Name: "t", Source: s, Alias: -1, DType: tensor.U8,
					Shape: []int64{n}, Bytes: n, Off: off})
				off += n
			}
			ix.Sources = append(ix.Sources, tensor.Source{URI: "file", Size: off})
		}
		wants, err := Check(ix, reqs)
		if err != nil {
			t.Fatal(err)
		}
		dest := make([]unsafe.Pointer, len(wants))
		for i := range dest {
			dest[i] = unsafe.Pointer(&place[0])
		}
		lim := Limits{Piece: piece, Gap: 64 << 10, Align: block, InPlace: r.IntN(2) == 0}
		p := Make(ix, wants, dest, lim)
		var read int64
		landed := make([]int64, len(wants))
		for _, c := range p.Pieces {
			read += c.Len
			size := ix.Sources[c.Source].Size
			if c.Off < 0 || c.Len <= 0 || c.Off+c.Len > size || c.Len > piece {
				t.Fatalf("piece %+v of a file of %d", c, size)
			}
			if c.InPlace != nil {
				task := p.Tasks[c.First]
				landed[p.Refs[c.First].Want] += c.Len
				if first := task.Dst == dest[0]; c.Count != 1 || c.Off%block != 0 && !first {
					t.Fatalf("misaligned direct read: %+v", c)
				}
				continue
			}
			if end := c.Off + c.Len; c.Off%block != 0 || end%block != 0 && end != size {
				t.Fatalf("staged piece %+v of a file of %d", c, size)
			}
			for i := c.First; i < c.First+c.Count; i++ {
				j := &p.Tasks[i]
				if c.Off+int64(j.Src) != j.Chunk.Off || int64(j.Src)+int64(j.Chunk.Stored) > c.Len {
					t.Fatalf("task %+v is outside piece %+v", j, c)
				}
				landed[p.Refs[i].Want] += int64(j.Chunk.Logical)
			}
		}
		for i := range wants {
			if landed[i] != wants[i].Bytes {
				t.Fatalf("want %d: %d of %d bytes", i, landed[i], wants[i].Bytes)
			}
		}
		if p.Slot > piece || read != p.Read {
			t.Fatalf("slot %d, read %d of %d", p.Slot, p.Read, read)
		}
	}
}
