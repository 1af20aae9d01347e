package tensorizer

import (
	"errors"
	"hash/crc32"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/source"
)

// Whole tensors are compared whatever pieces they are read in, in whatever order,
// by how many readers, and again; one flipped bit fails the read that completes
// the tensor, by its name.
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
		s, err := f.check(bytesSource(held))
		if err != nil {
			t.Fatal(err)
		}
		for range 4 {
			err := read(s)
			if (flip < 0) != (err == nil) || err != nil && (!errors.Is(err, errs.ErrCorrupt) || !strings.Contains(err.Error(), "CRC32")) {
				t.Errorf("bit of byte %d: %v", flip, err)
			}
		}
	}
	f.Records[1].CRC32 = nil
	if _, err := f.check(bytesSource(data)); !errors.Is(err, errs.ErrNotSupported) {
		t.Error(err)
	}
}
