package plan

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"
	"unsafe"

	"github.com/overwire/overwire/gosrc/tensor"
)

// Shares cover each piece once and in order, and contain each of its tasks once. They do not cut bytes with a checksum
// or a block that fits in a piece. Pieces and shares of a tensor with cuts end at a cut if one fits in a piece.
func TestParts(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	memory := make([]byte, 4096) // never written
	for range 300 {
		ix := &tensor.Index{Sources: []tensor.Source{{URI: "a"}}}
		at := int64(0)
		for range 1 + r.IntN(8) {
			x := tensor.Tensor{DType: tensor.U8, Alias: -1, Off: at}
			if r.IntN(2) == 0 { // plain
				x.Bytes, x.Block = r.Int64N(3000), r.Int64N(2)*r.Int64N(500)
				if x.Block == 0 && r.IntN(2) == 0 {
					for cut := r.Int64N(300); cut < x.Bytes; cut += 1 + r.Int64N(300) {
						x.Cuts = append(x.Cuts, cut)
					}
					x.Cuts = append(x.Cuts, x.Bytes)
				}
			} else {
				x.First, x.Count, x.ChunkBytes, x.Parts = int32(len(ix.Chunks)), int32(1+r.IntN(5)), 256, 1
				x.Bytes = int64(x.Count) * 256
				for range x.Count {
					n := uint32(1 + r.IntN(256))
					ix.Chunks = append(ix.Chunks, tensor.Chunk{Off: at, Stored: n, Logical: 256,
						Codec: tensor.CodecX16})
					at += int64(n)
				}
			}
			at += x.Bytes + r.Int64N(3)*50
			x.Shape = []int64{x.Bytes}
			ix.Tensors = append(ix.Tensors, x)
		}
		var reqs []Request
		for i := range ix.Tensors {
			for range 1 + r.IntN(2) { // the second request reads the same bytes
				reqs = append(reqs, Request{Tensor: int64(i), Hi0: Whole, Hi1: Whole})
			}
		}
		wants, err := Check(ix, reqs)
		if err != nil {
			t.Fatal(err)
		}
		dest := make([]unsafe.Pointer, len(wants))
		for i := range dest {
			dest[i] = unsafe.Pointer(&memory[0])
		}
		lim := Limits{Piece: 1 + r.Int64N(2000), Gap: r.Int64N(100), Share: r.Int64N(2) * r.Int64N(600)}
		p := Make(ix, wants, dest, lim)
		k := 0
		for i := range p.Tasks {
			x, at := &ix.Tensors[wants[p.Refs[i].Want].Data], p.Tasks[i].Chunk.Off
			_, isCut := slices.BinarySearch(x.Cuts, at-x.Off)
			if lim.Piece >= 300 && x.Cuts != nil && at > x.Off && !isCut {
				t.Fatalf("a piece begins %d bytes into %+v", at-x.Off, x)
			}
		}
		for i, piece := range p.Pieces {
			at, task := int64(0), piece.First
			for ; k < len(p.Shares) && p.Shares[k].Piece == int32(i); k++ {
				share := p.Shares[k]
				if share.From != at || share.To < at || share.First != task || share.Count < 0 {
					t.Fatalf("%+v of %+v after %d, task %d", share, piece, at, task)
				}
				at, task = share.To, task+share.Count
				if j := task - 1; j >= piece.First && share.To < piece.Len { // the last task before the cut
					x := &ix.Tensors[wants[p.Refs[j].Want].Data]
					in := piece.Off + share.To - x.Off
					if x.Block > 0 && x.Block <= lim.Piece && in < x.Bytes && in%x.Block != 0 {
						t.Fatalf("%+v of %+v ends %d bytes into %+v", share, piece, in, x)
					}
					_, isCut := slices.BinarySearch(x.Cuts, in)
					if lim.Piece >= 300 && x.Cuts != nil && in < x.Bytes && !isCut {
						t.Fatalf("%+v of %+v ends %d bytes into %+v", share, piece, in, x)
					}
				}
				for j := share.First; j < task; j++ {
					lo, hi := int64(p.Tasks[j].Src), int64(p.Tasks[j].Src)+int64(p.Tasks[j].Chunk.Stored)
					if p.Refs[j].N >= 0 && (lo < share.From || hi > share.To) {
						t.Fatalf("task [%d, %d) in %+v", lo, hi, share)
					}
				}
			}
			if at != piece.Len || task != piece.First+piece.Count {
				t.Fatalf("shares of %+v end at %d, task %d", piece, at, task)
			}
		}
		if k != len(p.Shares) {
			t.Fatalf("%d shares, but pieces have %d", len(p.Shares), k)
		}
	}
}
