package plan

import (
	"errors"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/tensor"
)

// For any needs of the ranks, each needed chunk is read once. If only one rank needs it, that rank reads it. No share
// exceeds its limit. A rank reads no more than the others, except for one chunk per piece and the chunks that only that
// rank needs. Pieces keep the order of the files.
func TestDivide(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	for range 300 {
		ranks, n := 1+r.IntN(9), r.IntN(400)
		chunks, who, takes := make([]ChunkOf, n), make([]int32, n), make([]int64, n)
		owned := r.IntN(2) == 0
		for i := range chunks {
			chunks[i], takes[i], who[i] = ChunkOf{0, int32(i)}, 1+r.Int64N(1000), Several
			if owned {
				who[i] = int32(r.IntN(ranks+2)) - 2
			}
		}
		full := int64(1000 + r.IntN(20000))
		pieces, err := Divide(chunks, ranks, full, func(c ChunkOf) int32 { return who[c.N] },
			func(c ChunkOf) int64 { return takes[c.N] })
		if err != nil {
			t.Fatal(err)
		}
		reader, read := map[ChunkOf]int{}, make([]int64, ranks)
		for k, shares := range pieces {
			if len(shares) != ranks {
				t.Fatalf("%d shares for %d ranks", len(shares), ranks)
			}
			for rank, s := range shares {
				sum := int64(0)
				for i, c := range s.Chunks {
					if _, twice := reader[c]; twice {
						t.Fatalf("chunk %d is read twice", c.N)
					}
					reader[c], sum = rank, sum+takes[c.N]
					if common := i < s.Common; common != (who[c.N] == Several) || !common && who[c.N] != int32(rank) {
						t.Fatalf("piece %d: rank %d reads chunk %d, which %d needs", k, rank, c.N, who[c.N])
					}
					if i > 0 && i != s.Common && s.Chunks[i-1].N > c.N {
						t.Fatalf("piece %d: chunk %d comes before %d", k, s.Chunks[i-1].N, c.N)
					}
				}
				if read[rank] += sum; sum != s.Bytes || sum > full {
					t.Fatalf("the chunks have %d bytes, but Bytes is %d, of at most %d", sum, s.Bytes, full)
				}
			}
		}
		for i := range chunks {
			if _, is := reader[chunks[i]]; is != (who[i] != NoRank) {
				t.Fatalf("chunk %d, needed by %d: read %v", i, who[i], is)
			}
		}
		for rank := range read {
			if most := read[0] + int64(len(pieces))*2000; !owned && read[rank] > most {
				t.Fatalf("%d ranks, %d pieces: %v", ranks, len(pieces), read)
			}
		}
	}
	room := func(ChunkOf) int64 { return 101 }
	if _, err := Divide([]ChunkOf{{0, 0}}, 2, 100, func(ChunkOf) int32 {
		return Several
	}, room); !errors.Is(err, errs.ErrArgument) {
		t.Errorf("a chunk that is larger than a share: %v", err)
	}
}

// NeededBy returns the only rank that needs a chunk, Several for a chunk that two ranks need, and NoRank for a chunk
// that none needs. It refuses needs of a rank that does not exist.
func TestNeededBy(t *testing.T) {
	ix := &tensor.Index{Sources: []tensor.Source{{URI: "a"}},
		Tensors: []tensor.Tensor{{DType: tensor.U8, Alias: -1, Shape: []int64{40}, Bytes: 40, Parts: 1, ChunkBytes: 10,
			Count: 4}}}
	for at := int64(0); at < 40; at += 10 {
		ix.Chunks = append(ix.Chunks, tensor.Chunk{Off: at, Stored: 10, Logical: 10})
	}
	needs := []Request{{0, 0, 0, 15, 0, Whole}, {0, 1, 12, 30, 0, Whole}}
	by, err := NeededBy(ix, 2, needs)
	if want := []int32{0, Several, 1, NoRank}; err != nil || !slices.Equal(by, want) {
		t.Errorf("%v, want %v: %v", by, want, err)
	}
	if _, err := NeededBy(ix, 1, needs); !errors.Is(err, errs.ErrArgument) {
		t.Errorf("a rank that does not exist: %v", err)
	}
}
