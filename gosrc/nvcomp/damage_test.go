package nvcomp

// The tests in this file check streams that are damaged or state impossible values.

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/klauspost/compress/zstd"

	"github.com/overwire/overwire/gosrc/errs"
)

// No truncated stream can be decoded. A flipped bit gives a typed error or different bytes of the same length.
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
				if kind == Native && n >= len(made)-8 { // the rest may be padding
					break
				}
				got, err := one(t, d, made[:n])
				typed(t, "truncated", err)
				// A raw LZ4 block that is truncated between two sequences may be valid.
				if err == nil && !(name == "LZ4" && kind == Raw && len(got) < len(src)) {
					t.Fatalf("%s kind %d cut at %d of %d decodes to %d", name, kind, n, len(made), len(got))
				}
			}
			bad := bytes.Clone(made)
			step := 1
			if testing.Short() { // also set under the race detector
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

// A WithSize stream is accepted exactly if its raw block is accepted, for any damage, and both give the same bytes.
// Decode refuses every block that Size refuses, such as S2 extensions in Snappy.
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
		if testing.Short() { // also set under the race detector
			step = 41
		}
		for bit := 0; bit < 8*len(block); bit += step {
			bad[bit/8] ^= 1 << (bit % 8)
			alone, refused := one(t, raw, bad)
			got, err := one(t, sized, append(slices.Clone(prefix), bad...))
			isSame := refused == nil && len(alone) == len(src)
			if (err == nil) != isSame || err == nil && !bytes.Equal(got, alone) {
				t.Fatalf("%s, bit %d: as a raw block %d bytes, %v; as a WithSize stream %v",
					name, bit, len(alone), refused, err)
			}
			bad[bit/8] ^= 1 << (bit % 8)
		}
	}
	// As in S2, the last copy repeats the previous distance.
	repeat := []byte{16, 0x1C, 'a', 'b', 'c', 'd', 'e', 'f', 'g', 'h', 1, 8, 1, 0}
	if _, err := one(t, Spec{Op: OpDecode, Algorithm: "Snappy", Kind: WithSize},
		append([]byte{16, 0, 0, 0, 0, 0, 0, 0}, repeat...)); !errors.Is(err, errs.ErrCorrupt) {
		t.Errorf("an S2 block: %v", err)
	}
}

// Content lengths that the stored bytes cannot have are refused before memory is allocated.
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
	// A frame with blocks that repeat one byte more often than is allowed.
	frame := []byte{0x28, 0xB5, 0x2F, 0xFD, 0xA0, 0, 0, 0, 1} // states 16 MiB
	for i := range 9 {
		last := byte(0)
		if i == 8 {
			last = 1
		}
		frame = append(frame, last|2, 0, 0x80|0x7F, 'x')
	}
	for _, op := range []string{OpSize, OpDecode} { // both must fail before memory is allocated
		if out, err := one(t, Spec{Op: op, Algorithm: "Zstd", Kind: Raw}, frame); !errors.Is(err, errs.ErrCorrupt) ||
			!strings.Contains(err.Error(), "Zstandard block at") {
			t.Errorf("%s: %d bytes, %v", op, len(out), err)
		}
	}
	// Chunks that all refer to the same bytes.
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

// Zstandard frames without a content length do not cause allocations for large windows that they declare.
func TestFramesThatNameLargeWindows(t *testing.T) {
	frame := []byte{0x28, 0xB5, 0x2F, 0xFD, 0, 0x88, 1<<3 | 1, 0, 0, 'x'} // a window of 128 MiB for one byte
	src := bytes.Repeat(frame, 100)
	size := func(src []byte) (Result, uint64) {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		out, err := Run(t.Context(), Spec{Op: OpSize, Algorithm: "Zstd", Kind: Raw}, []Buffer{{Src: src}})
		if err != nil {
			t.Fatal(err)
		}
		runtime.ReadMemStats(&after)
		return out[0], after.TotalAlloc - before.TotalAlloc
	}
	if r, taken := size(src); r.Err != nil || r.Bytes != 100 || taken > 64<<20 {
		t.Errorf("%d bytes, %v, with %d bytes of memory", r.Bytes, r.Err, taken)
	}
	if got, err := one(t, Spec{Op: OpDecode, Algorithm: "Zstd", Kind: Raw}, src); string(got) != strings.Repeat("x", 100) {
		t.Errorf("decoded to %q, %v", got, err)
	}
	frame[5] = 0x89 // a window over the limit
	if r, _ := size(frame); !errors.Is(r.Err, errs.ErrNotSupported) {
		t.Errorf("a window of 144 MiB: %d bytes, %v", r.Bytes, r.Err)
	}
	long := bytes.Repeat([]byte("some text that comes again and again. "), 20_000) // several blocks with matches
	var b bytes.Buffer
	w, err := zstd.NewWriter(&b, zstd.WithWindowSize(8<<20), zstd.WithEncoderConcurrency(1))
	if err != nil {
		t.Fatal(err)
	}
	for at := 0; at < len(long); at += 100_000 { // as a stream of unknown length
		if _, err := w.Write(long[at:min(at+100_000, len(long))]); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	if r, _ := size(b.Bytes()); r.Err != nil || r.Bytes != int64(len(long)) {
		t.Errorf("a stream of %d bytes: %d, %v", len(long), r.Bytes, r.Err)
	}
}
