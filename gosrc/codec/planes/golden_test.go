package planes

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/overwire/overwire/gosrc/errs"
)

var update = flag.Bool("update", false, "write the golden chunks again")

const goldens = "../../../tests/goldens/planes"

// Golden chunks decode to their original data, and the encoder still writes the same bytes. If its choices change,
// the goldens must be updated deliberately. Each flipped bit in a chunk without Zstandard frames is refused or gives
// different bytes.
func TestGoldens(t *testing.T) {
	if *update {
		writeGoldens(t)
	}
	index, err := os.ReadFile(filepath.Join(goldens, "index.txt"))
	if err != nil {
		t.Fatal(err)
	}
	var e Encoder
	for line := range strings.Lines(string(index)) {
		if line[0] == '#' {
			continue
		}
		var name, sum string
		var transform uint8
		var n int
		if _, err := fmt.Sscan(line, &name, &transform, &n, &sum); err != nil {
			t.Fatalf("%q: %v", line, err)
		}
		chunk, err := os.ReadFile(filepath.Join(goldens, name+".chunk"))
		if err != nil {
			t.Fatal(err)
		}
		dst := make([]byte, n)
		if err := Decode(dst, chunk, transform); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if s := sha256.Sum256(dst); hex.EncodeToString(s[:]) != sum {
			t.Errorf("%s: wrong bytes", name)
		}
		again, ok := e.Encode(nil, dst, transform)
		if !ok || !bytes.Equal(again, chunk) {
			t.Errorf("%s: the encoder writes a different chunk", name)
		}
		if !e.Zipped() {
			flip(t, name, chunk, dst, transform)
		}
		for k := range len(chunk) {
			if err := Decode(dst, chunk[:k], transform); !errors.Is(err, errs.ErrCorrupt) {
				t.Errorf("%s cut to %d: %v", name, k, err)
			}
		}
	}
}

// flip flips the bits of a chunk one at a time, and decodes the chunk each time.
func flip(t *testing.T, name string, chunk, want []byte, transform uint8) {
	got := make([]byte, len(want))
	for i := range chunk {
		for b := range 8 {
			chunk[i] ^= 1 << b
			if err := Decode(got, chunk, transform); err == nil && bytes.Equal(got, want) {
				t.Errorf("%s: byte %d bit %d changes nothing", name, i, b)
			}
			chunk[i] ^= 1 << b
		}
	}
}

func writeGoldens(t *testing.T) {
	if err := os.MkdirAll(goldens, 0o755); err != nil {
		t.Fatal(err)
	}
	index := "# overwire format 1.2, codec 6: name, transform, logical bytes, SHA-256 of them\n"
	var e Encoder
	for _, s := range samples(rand.New(rand.NewPCG(2026, 0)), 1600) {
		chunk, ok := e.Encode(nil, s.data, s.transform)
		if !ok {
			continue
		}
		index += fmt.Sprintf("%s %d %d %x\n", s.name, s.transform, len(s.data), sha256.Sum256(s.data))
		if err := os.WriteFile(filepath.Join(goldens, s.name+".chunk"), chunk, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(goldens, "index.txt"), []byte(index), 0o644); err != nil {
		t.Fatal(err)
	}
}
