package x16

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"flag"
	"fmt"
	"hash/crc32"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/overwire/overwire/gosrc/errs"
)

var update = flag.Bool("update", false, "write the golden chunks again")

const goldens = "../../../tests/goldens/x16"

// goldenSegTiles divides the small goldens into several segments.
const goldenSegTiles = 6

// A golden is a chunk that an earlier version wrote, and the hash of its contents.
type golden struct {
	name      string
	transform uint8
	segTiles  uint16
	logical   int
	sum       string // SHA-256 of the logical bytes
	chunk     []byte
}

func readGoldens(t *testing.T) (out []golden) {
	t.Helper()
	index, err := os.ReadFile(filepath.Join(goldens, "index.txt"))
	if err != nil {
		t.Fatal(err)
	}
	for _, line := range strings.Split(string(index), "\n") {
		if line == "" || line[0] == '#' {
			continue
		}
		var g golden
		if _, err := fmt.Sscan(line, &g.name, &g.transform, &g.segTiles, &g.logical, &g.sum); err != nil {
			t.Fatalf("%q: %v", line, err)
		}
		if g.chunk, err = os.ReadFile(filepath.Join(goldens, g.name+".chunk")); err != nil {
			t.Fatal(err)
		}
		out = append(out, g)
	}
	return out
}

// TestUpdateGoldens writes a golden of every kind of chunk if -update is set. Once the format is frozen, existing
// files must not change; new files may be added.
func TestUpdateGoldens(t *testing.T) {
	if !*update {
		t.Skip("needs -update")
	}
	if err := os.MkdirAll(goldens, 0o755); err != nil {
		t.Fatal(err)
	}
	index := "# overwire format 1.0: name, transform, tiles per segment, logical bytes, SHA-256 of them\n"
	e := Encoder{segTiles: goldenSegTiles}
	for _, s := range samples(rand.New(rand.NewPCG(2025, 0)), 5300) {
		if strings.Contains(s.name, "uniform") || strings.Contains(s.name, "read as") {
			continue
		}
		data := s.data[:len(s.data)-1] // a tail that ends inside an element
		chunk, st, ok := e.Encode(nil, data, s.transform)
		if !ok {
			continue
		}
		name := strings.NewReplacer(" ", "-").Replace(strings.ToLower(s.name))
		index += fmt.Sprintf("%s %d %d %d %x\n", name, s.transform, st, len(data), sha256.Sum256(data))
		if err := os.WriteFile(filepath.Join(goldens, name+".chunk"), chunk, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(goldens, "index.txt"), []byte(index), 0o644); err != nil {
		t.Fatal(err)
	}
}

// The decoder of every level decodes the chunks of older writers. The encoder still writes the same bytes. If its
// choices change, this test fails, and the goldens must be updated deliberately.
func TestGoldens(t *testing.T) {
	for _, g := range readGoldens(t) {
		dst := make([]byte, g.logical)
		for _, l := range Levels() {
			clear(dst)
			if err := DecodeAt(l, dst, g.chunk, g.transform, g.segTiles); err != nil {
				t.Errorf("%s by %v: %v", g.name, l, err)
			} else if s := sha256.Sum256(dst); hex.EncodeToString(s[:]) != g.sum {
				t.Errorf("%s by %v: wrong bytes", g.name, l)
			}
		}
		for _, l := range Levels() {
			e := Encoder{level: l, forced: true, segTiles: goldenSegTiles}
			again, st, ok := e.Encode(nil, dst, g.transform)
			if !ok || st != g.segTiles || !bytes.Equal(again, g.chunk) {
				t.Errorf("%s: the %v encoder writes a different chunk", g.name, l)
			}
		}
	}
}

// Decode refuses every truncation of a golden. The checksum detects every flipped bit. Decode also detects flipped
// bits, except in raw bits and values, where the result must differ.
func TestGoldensExhaustive(t *testing.T) {
	table := crc32.MakeTable(crc32.Castagnoli)
	for _, g := range readGoldens(t) {
		if len(g.chunk) > 4<<10 && testing.Short() {
			continue
		}
		dst, want := make([]byte, g.logical), make([]byte, g.logical)
		if err := Decode(want, g.chunk, g.transform, g.segTiles); err != nil {
			t.Fatal(err)
		}
		sum := crc32.Checksum(g.chunk, table)
		flips, refused := 0, 0
		for i := range g.chunk {
			if len(g.chunk) > 6<<10 && i > 1024 && i < len(g.chunk)-1024 && i%16 != 0 {
				continue // the middle of large chunks is uniform
			}
			for b := range 8 {
				g.chunk[i] ^= 1 << b
				if crc32.Checksum(g.chunk, table) == sum {
					t.Fatalf("%s: the checksum does not detect byte %d bit %d", g.name, i, b)
				}
				err := Decode(dst, g.chunk, g.transform, g.segTiles)
				if err != nil {
					if !errors.Is(err, errs.ErrCorrupt) {
						t.Fatalf("%s: byte %d bit %d: %v", g.name, i, b, err)
					}
					refused++
				} else if bytes.Equal(dst, want) {
					t.Errorf("%s: byte %d bit %d changes nothing", g.name, i, b)
				}
				flips++
				g.chunk[i] ^= 1 << b
			}
		}
		for n := range len(g.chunk) {
			if err := Decode(dst, g.chunk[:n], g.transform, g.segTiles); !errors.Is(err, errs.ErrCorrupt) {
				t.Errorf("%s cut to %d: %v", g.name, n, err)
			}
		}
		t.Logf("%-32s %6d bytes: %6d flips, %5.1f %% refused without the checksum", g.name, len(g.chunk), flips, 100*float64(refused)/float64(flips))
	}
}
