package plan

import (
	"math/rand/v2"
	"testing"
	"unsafe"

	"github.com/overwire/overwire/gosrc/tensor"
)

// With Cut, every stored byte reaches its destination once, no piece is larger than requested, and the pieces of a run
// without gaps are full for any chunk sizes. Checksums of parts are not compared.
func TestPiecesThatCutChunks(t *testing.T) {
	seed := rand.Uint64()
	r := rand.New(rand.NewPCG(seed, 1))
	for range 300 {
		lim := Limits{Piece: 8192 * (1 + r.Int64N(8)), Gap: r.Int64N(200), Cut: true}
		if r.IntN(2) == 0 {
			lim.Align = 4096
		}
		ix := &tensor.Index{Sources: []tensor.Source{{Size: 1 << 30}}, Tensors: make([]tensor.Tensor, 1)}
		var reads []ChunkRead
		memory := make([]byte, 4<<20)
		at, to, dense := r.Int64N(5000), int64(0), true
		for n := range 1 + r.IntN(40) {
			stored := 1 + r.Int64N(60_000)
			ix.Chunks = append(ix.Chunks, tensor.Chunk{Off: at, Stored: uint32(stored), Codec: tensor.CodecX16})
			reads = append(reads, ChunkRead{N: int32(n), Group: int32(n / 15), Bare: r.IntN(3) == 0,
				Dst: unsafe.Pointer(&memory[to])})
			at, to = at+stored, to+stored
			if r.IntN(10) == 0 {
				at, dense = at+r.Int64N(400), false
			}
		}
		p, wants := PlanStored(ix, reads, lim)
		came, left := make([]int, to), make([]int32, len(wants))
		last := map[int32]int{} // the last piece by group
		for i := range p.Pieces {
			last[reads[p.Refs[p.Pieces[i].First].Want].Group] = i
		}
		for i, piece := range p.Pieces {
			group := reads[p.Refs[piece.First].Want].Group
			if piece.Len > lim.Piece || dense && i < last[group] && piece.Len < lim.Piece-2*pageBytes {
				t.Fatalf("seed %d: piece %d of %+v has %d bytes", seed, i, lim, piece.Len)
			}
			for k := piece.First; k < piece.First+piece.Count; k++ {
				task, want := &p.Tasks[k], p.Refs[k].Want
				s, c := &reads[want], &ix.Chunks[reads[want].N]
				in := int64(uintptr(task.Dst) - uintptr(s.Dst)) // offset in the chunk
				switch {
				case task.Summed, task.Chunk.Logical != task.Chunk.Stored, (p.Refs[k].N < 0) != s.Bare,
					s.Group != group, piece.Off+int64(task.Src) != c.Off+in, task.Chunk.Off != c.Off+in,
					int64(task.Src)+int64(task.Chunk.Stored) > piece.Len:
					t.Fatalf("seed %d: task %+v of piece %+v, of chunk %+v", seed, task, piece, c)
				}
				left[want]++
				base := int64(uintptr(task.Dst) - uintptr(unsafe.Pointer(&memory[0])))
				for b := range int64(task.Chunk.Stored) {
					came[base+b]++
				}
			}
		}
		for b, n := range came {
			if n != 1 {
				t.Fatalf("seed %d: byte %d was read %d times", seed, b, n)
			}
		}
		for i := range left {
			if left[i] != p.Left[i] {
				t.Fatalf("seed %d: want %d has %d tasks, but Left is %d", seed, i, left[i], p.Left[i])
			}
		}
	}
}
