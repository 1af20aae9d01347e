package nvcomp

// This file tests streams that are damaged, or claim what they cannot have.

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/overwire/overwire/gosrc/errs"
)

// No truncation of a stream decodes, and no flip of a bit does worse than a
// typed error or other bytes of the same length, in memory of that length.
func TestDamage(t *testing.T) {
	src := text(700, 9)
	for _, name := range Names() {
		for _, kind := range kinds {
			made, err := one(t, Spec{Op: OpEncode, Algorithm: name, Kind: kind, Chunk: 256, Level: 2}, src)
			if err != nil {
				t.Fatal(err)
			}
			d := Spec{Op: OpDecode, Algorithm: name, Kind: kind}
			for n := range made {
				if kind == Native && n >= len(made)-8 { // may be padding
					break
				}
				got, err := one(t, d, made[:n])
				typed(t, "truncated", err)
				// A raw block of LZ4, cut between two sequences, is one still.
				if err == nil && !(name == "LZ4" && kind == Raw && len(got) < len(src)) {
					t.Fatalf("%s kind %d cut at %d of %d decodes to %d", name, kind, n, len(made), len(got))
				}
			}
			bad := bytes.Clone(made)
			step := 1
			if testing.Short() { // under the race detector
				step = 41
			}
			for bit := 0; bit < 8*len(made); bit += step {
				bad[bit/8] ^= 1 << (bit % 8)
				_, err := one(t, d, bad)
				typed(t, fmt.Sprintf("%s kind %d bit %d", name, kind, bit), err)
				bad[bit/8] ^= 1 << (bit % 8)
			}
		}
	}
}

// A block is accepted behind its length exactly if it is accepted alone, whatever damage it has, and both give the same
// bytes: no decoder takes what the walk over a raw block refuses, as the extensions of S2 in Snappy.
func TestSizedBlocksAreRawBlocks(t *testing.T) {
	src := append(text(700, 5), bytes.Repeat([]byte("abcdefgh"), 20)...)
	for _, name := range Names() {
		raw, sized := Spec{Op: OpEncode, Algorithm: name, Kind: Raw, Level: 2}, Spec{Op: OpDecode, Algorithm: name,
			Kind: WithSize}
		block, err := one(t, raw, src)
		if err != nil {
			t.Fatal(err)
		}
		raw.Op = OpDecode
		prefix := binary.LittleEndian.AppendUint64(nil, uint64(len(src)))
		if name == "LZ4" {
			prefix = prefix[:4]
		}
		bad, step := bytes.Clone(block), 1
		if testing.Short() { // under the race detector
			step = 41
		}
		for bit := 0; bit < 8*len(block); bit += step {
			bad[bit/8] ^= 1 << (bit % 8)
			alone, refused := one(t, raw, bad)
			got, err := one(t, sized, append(slices.Clone(prefix), bad...))
			isSame := refused == nil && len(alone) == len(src)
			if (err == nil) != isSame || err == nil && !bytes.Equal(got, alone) {
				t.Fatalf("%s, bit %d: alone %d bytes, %v; behind its length %v", name, bit, len(alone), refused, err)
			}
			bad[bit/8] ^= 1 << (bit % 8)
		}
	}
	repeat := []byte{16, 0x1C, 'a', 'b', 'c', 'd', 'e', 'f', 'g', 'h', 1, 8, 1, 0} // the last copy is as far back as before
	if _, err := one(t, Spec{Op: OpDecode, Algorithm: "Snappy", Kind: WithSize},
		append([]byte{16, 0, 0, 0, 0, 0, 0, 0}, repeat...)); !errors.Is(err, errs.ErrCorrupt) {
		t.Errorf("a block of S2: %v", err)
	}
}

// Lengths that the stored bytes cannot have are refused before any memory is
// taken for them.
func TestBombs(t *testing.T) {
	le := binary.LittleEndian
	src := text(10_000, 2)
	for _, name := range Names() {
		made, err := one(t, Spec{Op: OpEncode, Algorithm: name, Kind: WithSize, Level: 1}, src)
		if err != nil {
			t.Fatal(err)
		}
		if name == "LZ4" {
			le.PutUint32(made, 1<<31)
		} else {
			le.PutUint64(made, 1<<45)
		}
		if _, err := one(t, Spec{Op: OpDecode, Algorithm: name, Kind: WithSize},
			made); !errors.Is(err, errs.ErrCorrupt) {
			t.Errorf("%s: %v", name, err)
		}
		made, _ = one(t, Spec{Op: OpEncode, Algorithm: name, Level: 1}, src)
		for _, huge := range []uint64{1 << 40, 1 << 63, 1<<64 - 1} {
			le.PutUint64(made[16:], huge)
			le.PutUint64(made[48:], huge)
			if _, err := one(t, Spec{Op: OpDecode}, made); !errors.Is(err, errs.ErrCorrupt) {
				t.Errorf("%s native of %d: %v", name, huge, err)
			}
		}
	}
	// Blocks of one byte, repeated more often than a block may be.
	frame := []byte{0x28, 0xB5, 0x2F, 0xFD, 0xA0, 0, 0, 0, 1} // of 16 MiB
	for i := range 9 {
		last := byte(0)
		if i == 8 {
			last = 1
		}
		frame = append(frame, last|2, 0, 0x80|0x7F, 'x')
	}
	for _, op := range []string{OpSize, OpDecode} { // before memory is taken
		if out, err := one(t, Spec{Op: op, Algorithm: "Zstd", Kind: Raw}, frame); !errors.Is(err, errs.ErrCorrupt) ||
			!strings.Contains(err.Error(), "Zstandard block at") {
			t.Errorf("%s: %d bytes, %v", op, len(out), err)
		}
	}
	// Chunks that all point to the same bytes.
	made, _ := one(t, Spec{Op: OpEncode, Algorithm: "LZ4", Chunk: 4096}, make([]byte, 40_960))
	off, sizes := made[64:144], made[144:224]
	for i := range 10 {
		le.PutUint64(off[8*i:], 0)
		le.PutUint64(sizes[8*i:], le.Uint64(sizes)+8)
	}
	if _, err := one(t, Spec{Op: OpDecode}, made); !errors.Is(err, errs.ErrCorrupt) {
		t.Errorf("overlapping chunks: %v", err)
	}
}
