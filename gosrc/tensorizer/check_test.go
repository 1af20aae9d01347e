package tensorizer

import (
	"errors"
	"hash/crc32"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/source"
)

// Whole tensors are checked regardless of the pieces they are read in, their order, the number of readers, and
// repeated reads. A flipped bit fails the read that completes the tensor; the error names it.
func TestChecked(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	data := make([]byte, 300_000)
	for i := range data {
		data[i] = byte(r.Uint32())
	}
	f := &File{URI: "x", Size: int64(len(data))}
	for _, cut := range [][2]int64{{100, 5}, {300, 99_700}, {100_500, 199_500}} {
		e := Entry{Name: strings.Repeat("n", int(cut[0]/100)), Data: cut[0], Bytes: cut[1]}
		sum := crc32.Update(crc32.ChecksumIEEE([]byte("prefix")), crc32.IEEETable, data[cut[0]:cut[0]+cut[1]])
		f.Entries = append(f.Entries, e)
		f.Records = append(f.Records, Record{Prefix: []byte("prefix"), CRC32: le.AppendUint32(nil, sum)})
	}
	read := func(s source.Source) error {
		type piece struct{ lo, hi int }
		var pieces []piece
		for at := 0; at < len(data); {
			n := min(len(data)-at, 1+r.IntN(70_000))
			pieces = append(pieces, piece{at, at + n})
			at += n
		}
		r.Shuffle(len(pieces), func(i, j int) { pieces[i], pieces[j] = pieces[j], pieces[i] })
		var wg sync.WaitGroup
		failures := make([]error, len(pieces))
		for i, p := range pieces {
			wg.Add(1)
			go func() {
				defer wg.Done()
				failures[i] = s.ReadAt(t.Context(), make([]byte, p.hi-p.lo), int64(p.lo))
			}()
		}
		wg.Wait()
		return errors.Join(failures...)
	}
	for _, flip := range []int{-1, 102, 300, 100_499 - 500, 299_999} {
		held := append([]byte(nil), data...)
		if flip >= 0 {
			held[flip] ^= 1 << (flip % 8)
		}
		s, err := checkSource(f, bytesSource(held))
		if err != nil {
			t.Fatal(err)
		}
		for range 4 {
			err := read(s)
			if (flip < 0) != (err == nil) || err != nil &&
				(!errors.Is(err, errs.ErrCorrupt) || !strings.Contains(err.Error(), "CRC32")) {
				t.Errorf("bit of byte %d: %v", flip, err)
			}
		}
	}
	f.Records[1].CRC32 = nil
	if _, err := checkSource(f, bytesSource(data)); !errors.Is(err, errs.ErrNotSupported) {
		t.Error(err)
	}
}

// Adjacent pieces are joined, in whatever order they are read. Reading a piece again restarts the tensor.
func TestPiecesAreJoined(t *testing.T) {
	data := make([]byte, 997)
	_, _ = rand.NewChaCha8([32]byte{5}).Read(data)
	sum := crc32.ChecksumIEEE(data)
	rng := rand.New(rand.NewPCG(3, 4))
	for round := range 60 {
		p := &partial{end: int64(len(data)), want: sum, left: int64(len(data))}
		var cuts []int
		for at := 0; at < len(data); at += 1 + rng.IntN(9) {
			cuts = append(cuts, at)
		}
		order := rng.Perm(len(cuts))
		if round == 0 {
			slices.Sort(order)
		}
		for n, i := range order {
			end := len(data)
			if i+1 < len(cuts) {
				end = cuts[i+1]
			}
			if err := p.passPiece(data[cuts[i]:end], int64(cuts[i])); err != nil {
				t.Fatal(err)
			}
			if round == 0 && len(p.pieces) > 1 {
				t.Fatalf("got %d pieces, want at most 1", len(p.pieces))
			}
			if n == len(order)/2 && round%2 == 1 { // read again
				_ = p.passPiece(data[cuts[i]:end], int64(cuts[i]))
				if len(p.pieces) != 1 {
					t.Fatalf("got %d pieces, want 1", len(p.pieces))
				}
				for _, k := range order {
					if k != i {
						stop := len(data)
						if k+1 < len(cuts) {
							stop = cuts[k+1]
						}
						if err := p.passPiece(data[cuts[k]:stop], int64(cuts[k])); err != nil {
							t.Fatal(err)
						}
					}
				}
				break
			}
		}
		if p.pieces != nil || p.left != int64(len(data)) {
			t.Fatal("the tensor is not complete:", p.left, p.pieces)
		}
	}
	p := &partial{end: 997, want: sum + 1, left: 997}
	if err := p.passPiece(data, 0); !errors.Is(err, errs.ErrCorrupt) {
		t.Error(err)
	}
}
