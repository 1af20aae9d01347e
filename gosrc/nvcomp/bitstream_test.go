package nvcomp

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/spawn/spawntest"
)

var kinds = []Kind{Native, Raw, WithSize}

// text returns n bytes that compress a little. They only depend on the seed.
func text(n int, seed uint64) []byte {
	r := rand.New(rand.NewPCG(seed, 1))
	out := make([]byte, 0, n+64)
	for len(out) < n {
		if len(out) > 100 && r.IntN(3) > 0 {
			at := r.IntN(len(out) - 40)
			out = append(out, out[at:at+4+r.IntN(30)]...)
		} else {
			for range 1 + r.IntN(20) {
				out = append(out, byte(r.IntN(64)))
			}
		}
	}
	return out[:n:n]
}

// one processes one buffer and returns a copy of the result.
func one(t testing.TB, s Spec, src []byte) ([]byte, error) {
	t.Helper()
	out, err := Run(context.Background(), s, []Buffer{{Src: src}})
	if err != nil {
		return nil, err
	}
	defer Release(out)
	if out[0].Err != nil {
		return nil, out[0].Err
	}
	if out[0].Bytes == 0 {
		return nil, nil
	}
	return bytes.Clone(out[0].Mem.Slice()), nil
}

// Every algorithm round-trips every content in every kind of stream. OpSize returns the size of the content, and no
// stream exceeds its bound.
func TestRoundTrip(t *testing.T) {
	long := 2<<20 + 5
	if testing.Short() {
		long = 300_000
	}
	whole := text(long, 7)
	for _, name := range Names() {
		for _, kind := range kinds {
			for _, n := range []int{0, 1, 7, 1000, 65535, 65536, 65537, long} {
				for _, sums := range []bool{false, true} {
					if sums && kind != Native || n == long && !sums {
						continue
					}
					src := whole[:n:n]
					s := Spec{Op: OpEncode, Algorithm: name, Kind: kind, Level: 1, Sums: sums}
					made, err := one(t, s, src)
					if err != nil {
						t.Fatalf("%s kind %d %d bytes: %v", name, kind, n, err)
					}
					d := Spec{Op: OpDecode, Algorithm: name, Kind: kind}
					if sums {
						d.Verify = VerifyAlways
					}
					if kind == Native {
						d.Algorithm = ""
					}
					got, err := one(t, d, made)
					if err != nil || !bytes.Equal(got, src) {
						t.Fatalf("%s kind %d %d bytes: got %d bytes back, %v", name, kind, n, len(got), err)
					}
					d.Op, s.Op = OpSize, OpBound
					size, err := Run(context.Background(), d, []Buffer{{Src: made}})
					if err != nil || size[0].Err != nil || size[0].Bytes != int64(n) {
						t.Errorf("%s kind %d: size %d, want %d (%v, %v)", name, kind, size[0].Bytes, n, err, size[0].Err)
					}
					s.Sizes = []int64{int64(len(src))}
					most, _ := Run(context.Background(), s, nil)
					if int64(len(made)) > most[0].Bytes {
						t.Errorf("%s kind %d: %d bytes exceed the bound %d", name, kind, len(made), most[0].Bytes)
					}
				}
			}
		}
	}
}

// Streams of incompressible bytes do not exceed the bound at any level.
func TestBoundOfNoise(t *testing.T) {
	noise := make([]byte, 200_001)
	r := rand.New(rand.NewPCG(3, 3))
	for i := range noise {
		noise[i] = byte(r.Uint32())
	}
	for _, name := range Names() {
		for _, kind := range kinds {
			for level := range 6 {
				s := Spec{Op: OpEncode, Algorithm: name, Kind: kind, Level: level}
				made, err := one(t, s, noise)
				if err != nil {
					t.Fatal(err)
				}
				s.Op = OpBound
				s.Sizes = []int64{int64(len(noise))}
				most, _ := Run(context.Background(), s, nil)
				if int64(len(made)) > most[0].Bytes {
					t.Errorf("%s kind %d level %d: %d bytes exceed the bound %d",
						name, kind, level, len(made), most[0].Bytes)
				}
			}
		}
	}
}

// A WithSize stream is the length of the content, in 4 bytes for LZ4 and 8 for other algorithms, and the raw block.
func TestSized(t *testing.T) {
	for _, name := range Names() {
		for _, src := range [][]byte{nil, {0}, make([]byte, 16), make([]byte, 70_000), text(40, 1), text(70_000, 2)} {
			made, err := one(t, Spec{Op: OpEncode, Algorithm: name, Kind: WithSize}, src)
			if err != nil {
				t.Fatal(err)
			}
			want := binary.LittleEndian.AppendUint64(nil, uint64(len(src)))
			if name == "LZ4" {
				want = want[:4]
			}
			raw, _ := one(t, Spec{Op: OpEncode, Algorithm: name, Kind: Raw}, src)
			if !bytes.Equal(made, append(want, raw...)) {
				t.Errorf("%s of %d bytes: % x", name, len(src), made[:min(len(made), 20)])
			}
		}
	}
}

// The last sequence of an LZ4 block has no match. The match length in its token is ignored, because other writers
// leave bits there.
func TestLastTokenOfLZ4(t *testing.T) {
	for _, c := range []struct {
		before, last, want string
	}{
		{"", "\x10z", "z"},
		{"", "\x70bcdefgh", "bcdefgh"},
		{"\x18a\x01\x00", "\xC0bcdefghijklm", "aaaaaaaaaaaaabcdefghijklm"}, // a, and 12 copies of it
	} {
		for bits := range 16 {
			src := []byte(c.before + c.last)
			src[len(c.before)] |= byte(bits)
			got, err := one(t, Spec{Op: OpDecode, Algorithm: "LZ4", Kind: Raw}, src)
			if err != nil || string(got) != c.want {
				t.Errorf("%x: decoded to %q, %v", src, got, err)
			}
		}
	}
}

// ownOpen maps the algorithms of nvCOMP's open release to the sizes of their own headers in bytes.
var ownOpen = map[string]int{"GDeflate": 4, "LZ4": 4, "Snappy": 1, "Cascaded": 24}

// openStream returns a stream in the layout of nvCOMP 2.2: chunks in any order without gaps, and space for private
// checksums, with their flags set.
func openStream(t testing.TB, a *algorithm, own int, src []byte, step int) []byte {
	le := binary.LittleEndian
	var chunks [][]byte
	for at := 0; at < len(src); at += step {
		made, err := one(t, Spec{Op: OpEncode, Algorithm: a.name, Kind: Raw, Level: 1}, src[at:min(at+step, len(src))])
		if err != nil {
			t.Fatal(err)
		}
		chunks = append(chunks, made)
	}
	n, first := len(chunks), (64+own+7)&^7
	head := make([]byte, first+24*n)
	var payload []byte
	for i := n - 1; i >= 0; i-- {
		le.PutUint64(head[first+8*i:], uint64(len(payload)))
		le.PutUint64(head[first+8*(n+i):], uint64(len(chunks[i])))
		payload = append(payload, chunks[i]...)
	}
	head[4], head[5], head[6] = 2, 2, byte(a.id)
	le.PutUint64(head[8:], uint64(len(payload)))
	le.PutUint64(head[16:], uint64(len(src)))
	le.PutUint64(head[24:], uint64(n))
	head[32], head[44], head[45] = 1, 1, 1
	le.PutUint64(head[48:], uint64(step))
	le.PutUint32(head[56:], uint32(len(head)))
	return append(head, payload...)
}

// Streams of nvCOMP 2.2, the last open release, can be decoded. If verifying their private checksums is requested,
// the error says that this is not supported.
func TestStreamsOfTheOpenRelease(t *testing.T) {
	le := binary.LittleEndian
	src := text(150_000, 8)
	for name, own := range ownOpen {
		a, err := byName(name)
		if err != nil {
			t.Fatal(err)
		}
		made := openStream(t, a, own, src, 65536)
		if got, err := one(t, Spec{Op: OpDecode}, made); err != nil || !bytes.Equal(got, src) {
			t.Errorf("%s: %d bytes, %v", name, len(got), err)
		}
		if _, err := one(t, Spec{Op: OpDecode, Verify: VerifyIfPresent}, made); !errors.Is(err, errs.ErrNotSupported) {
			t.Errorf("%s: private checksums: %v", name, err)
		}
		le.PutUint32(made[56:], uint32((64+own+7)&^7+8*3))
		if _, err := one(t, Spec{Op: OpDecode}, made); !errors.Is(err, errs.ErrCorrupt) {
			t.Errorf("%s without space for its tables: %v", name, err)
		}
		made[4] = 0
		if _, err := one(t, Spec{Op: OpDecode}, made); !errors.Is(err, errs.ErrFormat) {
			t.Errorf("%s without a version: %v", name, err)
		}
	}
}

// A stream of an unknown writer is refused; the error names a tool that can read it.
func TestStreamsOfOthers(t *testing.T) {
	made, err := one(t, Spec{Op: OpEncode, Algorithm: "LZ4", Sums: true}, text(1000, 1))
	if err != nil {
		t.Fatal(err)
	}
	for what, change := range map[string]func(p []byte){
		"another magic":        func(p []byte) { copy(p, "\x12\x34\x56\x78\x06") },
		"zeros":                func(p []byte) { clear(p[:8]) },
		"2.2's of version 5":   func(p []byte) { copy(p, "\x00\x00\x00\x00\x05") },
		"a changed first byte": func(p []byte) { p[0] ^= 1 },
	} {
		theirs := bytes.Clone(made)
		change(theirs)
		for _, op := range []string{OpDecode, OpSize} {
			_, err := one(t, Spec{Op: op}, theirs)
			if !errors.Is(err, errs.ErrFormat) || !strings.Contains(err.Error(), "nvidia-nvcomp-cu13") {
				t.Errorf("%s, %s: %v", what, op, err)
			}
		}
	}
	made[4] = 2
	if _, err := one(t, Spec{Op: OpDecode}, made); !errors.Is(err, errs.ErrFormat) ||
		!strings.Contains(err.Error(), "upgrade overwire") {
		t.Errorf("a newer layout: %v", err)
	}
}

// Every field of the header and the tables has the documented value.
func TestNativeLayout(t *testing.T) {
	le := binary.LittleEndian
	src := text(10_000, 1)
	for _, name := range Names() {
		for _, sums := range []bool{false, true} {
			made, err := one(t, Spec{Op: OpEncode, Algorithm: name, Chunk: 4096, Sums: sums}, src)
			if err != nil {
				t.Fatal(err)
			}
			a, _ := byName(name)
			offset, flag := 64+3*16, byte(0)
			if sums {
				offset, flag = 64+3*24, 1
			}
			if name == "X16" && offset%16 == 0 {
				offset += 8
			}
			if string(made[:8]) != "OWBS\x01\x00"+string(rune(a.id))+"\x00" || made[32] != 1 || made[44] != flag || made[45] != flag {
				t.Errorf("%s: begins with % x", name, made[:48])
			}
			u64 := func(at int) uint64 { return le.Uint64(made[at:]) }
			got := []uint64{u64(8), u64(16), u64(24), u64(48), uint64(le.Uint32(made[56:]))}
			if want := []uint64{uint64(len(made) - offset), 10_000, 3, 4096, uint64(offset)}; !slices.Equal(got, want) {
				t.Errorf("%s: %d, want %d", name, got, want)
			}
			for i := range 3 {
				off, size := le.Uint64(made[64+8*i:]), le.Uint64(made[88+8*i:])
				content := src[4096*i : min(4096*(i+1), len(src))]
				block := made[uint64(offset)+off:][:size]
				if got, err := one(t, Spec{Op: OpDecode, Algorithm: name, Kind: Raw}, block); err != nil ||
					!bytes.Equal(got, content) {
					t.Errorf("%s: chunk %d: %v", name, i, err)
				}
				if sums && (le.Uint32(made[112+4*i:]) != crc32.ChecksumIEEE(block) ||
					le.Uint32(made[124+4*i:]) != crc32.ChecksumIEEE(content)) {
					t.Errorf("%s: chunk %d does not have CRC-32 checksums", name, i)
				}
			}
		}
	}
}

// Results are written to the caller's memory if it provides some. A buffer that is too small has its own error and
// does not affect the other buffers.
func TestOwnMemory(t *testing.T) {
	src := text(100_000, 1)
	made, err := one(t, Spec{Op: OpEncode, Algorithm: "Zstd"}, src)
	if err != nil {
		t.Fatal(err)
	}
	big, small := make([]byte, len(src)+9), make([]byte, len(src)-1)
	out, err := Run(context.Background(), Spec{Op: OpDecode}, []Buffer{
		{Src: made, Dst: big, Own: true}, {Src: made, Dst: small, Own: true}, {Src: []byte("no stream")}, {Src: made},
	})
	if err != nil {
		t.Fatal(err)
	}
	defer Release(out)
	if out[0].Err != nil || !bytes.Equal(big[:len(src)], src) || out[0].Mem.Block != nil ||
		!bytes.Equal(big[len(src):], make([]byte, 9)) {
		t.Errorf("decoded into the given memory: %+v", out[0])
	}
	if !errors.Is(out[1].Err, errs.ErrArgument) || !errors.Is(out[2].Err, errs.ErrFormat) {
		t.Errorf("wrong errors: %v, %v", out[1].Err, out[2].Err)
	}
	if out[3].Err != nil || !bytes.Equal(out[3].Mem.Slice(), src) {
		t.Errorf("the last buffer: %v", out[3].Err)
	}
}

// A stream with checksums is refused if any byte of a chunk or a checksum has changed. The length of the content is
// still returned.
func TestChecksums(t *testing.T) {
	src := text(150_000, 5)
	made, err := one(t, Spec{Op: OpEncode, Algorithm: "Snappy", Sums: true}, src)
	if err != nil {
		t.Fatal(err)
	}
	for at := range made {
		if at > 300 && at%97 != 0 {
			continue
		}
		bad := bytes.Clone(made)
		bad[at] ^= 4
		out, err := Run(context.Background(), Spec{Op: OpDecode, Verify: VerifyAlways}, []Buffer{{Src: bad}})
		if err != nil {
			t.Fatal(err)
		}
		if out[0].Err == nil && at < len(made)-8 { // the last bytes may be padding
			t.Errorf("a flip at %d was not detected", at)
		}
		if at >= 64+3*16 && at < len(made)-8 && (!errors.Is(out[0].Err, errs.ErrCorrupt) || !out[0].Summed ||
			out[0].Bytes != int64(len(src))) {
			t.Errorf("a flip at %d: %+v", at, out[0])
		}
		Release(out)
	}
	plain, _ := one(t, Spec{Op: OpEncode, Algorithm: "Snappy"}, src)
	if _, err := one(t, Spec{Op: OpDecode, Verify: VerifyAlways}, plain); !errors.Is(err, errs.ErrArgument) {
		t.Errorf("a stream without checksums: %v", err)
	}
	if got, err := one(t, Spec{Op: OpDecode, Verify: VerifyAlways}, made); err != nil || !bytes.Equal(got, src) {
		t.Errorf("the unchanged stream: %v", err)
	}
}

// typed checks that an error has one of the classes for invalid bytes.
func typed(t testing.TB, what string, err error) {
	t.Helper()
	if err != nil && !errors.Is(err, errs.ErrCorrupt) && !errors.Is(err, errs.ErrFormat) &&
		!errors.Is(err, errs.ErrNotSupported) && !errors.Is(err, errs.ErrArgument) {
		t.Fatalf("%s: %v", what, err)
	}
}

// Any value of any integer in a stream's header, tables or block causes at most a typed error.
func TestIntegers(t *testing.T) {
	src := text(1_000, 3)
	for _, name := range Names() {
		for _, kind := range kinds {
			made, err := one(t, Spec{Op: OpEncode, Algorithm: name, Kind: kind, Chunk: 512, Level: 1}, src)
			if err != nil {
				t.Fatal(err)
			}
			for at := range min(len(made), 140) {
				for _, width := range []int{2, 4, 8} {
					for _, v := range []uint64{0, 1, 1 << 31, 1 << 32, 1<<63 - 64, 1 << 63, 1<<64 - 1} {
						bad := bytes.Clone(made)
						for k := range min(width, len(bad)-at) {
							bad[at+k] = byte(v >> (8 * k))
						}
						_, err := one(t, Spec{Op: OpDecode, Algorithm: name, Kind: kind}, bad)
						typed(t, fmt.Sprintf("%s kind %d: %d bytes at %d = %d", name, kind, width, at, v), err)
					}
				}
			}
		}
	}
}

// Quick only accepts small work, even if hostile bytes declare or contain much more.
func TestQuick(t *testing.T) {
	src := text(100_000, 3)
	for _, c := range []struct {
		what string
		s    Spec
		src  []byte
		want bool
	}{
		{"a small encode", Spec{Op: OpEncode, Algorithm: "Zstd"}, src, true},
		{"a large encode", Spec{Op: OpEncode, Algorithm: "LZ4"}, make([]byte, alone+1), false},
		{"a size", Spec{Op: OpSize, Algorithm: "LZ4", Kind: Raw}, src, true},
		{"a possible GDeflate bomb", Spec{Op: OpSize, Algorithm: "GDeflate", Kind: Raw}, src, false},
		{"a possible Zstd bomb", Spec{Op: OpDecode, Algorithm: "Zstd", Kind: Raw}, src, false},
		{"a stream that states a small size", Spec{Op: OpDecode, Algorithm: "Zstd", Kind: WithSize},
			[]byte{9, 0, 0, 0, 0, 0, 0, 0, 1}, true},
		{"not a stream", Spec{Op: OpDecode}, src, true},
		{"no algorithm", Spec{Op: OpDecode, Kind: Raw}, src, true},
	} {
		if got := Quick(&c.s, []Buffer{{Src: c.src}}); got != c.want {
			t.Errorf("%s: %v", c.what, got)
		}
	}
	made, err := one(t, Spec{Op: OpEncode, Algorithm: "GDeflate", Level: 1}, make([]byte, 40<<20))
	if err != nil || len(made) > alone {
		t.Fatalf("encoded into %d bytes, %v", len(made), err)
	}
	if Quick(&Spec{Op: OpDecode}, []Buffer{{Src: made}}) {
		t.Error("Quick accepts a stream of 40 MB of zeros")
	}
}

// Invalid specs are argument errors. Algorithms that only nvCOMP has are reported as not supported.
func TestSpecs(t *testing.T) {
	for _, c := range []struct {
		s    Spec
		want error
	}{
		{Spec{Op: "x", Algorithm: "LZ4"}, errs.ErrArgument},
		{Spec{Op: OpEncode}, errs.ErrArgument},
		{Spec{Op: OpEncode, Algorithm: "nope"}, errs.ErrArgument},
		{Spec{Op: OpEncode, Algorithm: "ANS"}, errs.ErrNotSupported},
		{Spec{Op: OpDecode, Algorithm: "bitcomp"}, errs.ErrNotSupported},
		{Spec{Op: OpEncode, Algorithm: "lz4", Chunk: -1}, errs.ErrArgument},
		{Spec{Op: OpEncode, Algorithm: "lz4", Chunk: 1 << 30}, errs.ErrArgument},
		{Spec{Op: OpEncode, Algorithm: "lz4", Kind: Raw, Sums: true}, errs.ErrArgument},
		{Spec{Op: OpEncode, Algorithm: "lz4", Kind: 3}, errs.ErrArgument},
		{Spec{Op: OpEncode, Algorithm: "GZIP", Level: 6}, errs.ErrArgument},
		{Spec{Op: OpEncode, Algorithm: "X16", DType: "F17"}, errs.ErrArgument},
	} {
		if out, err := Run(context.Background(), c.s, []Buffer{{Src: []byte("abc")}}); !errors.Is(err, c.want) {
			t.Errorf("%+v: %v, %v", c.s, out, err)
		}
	}
	if _, err := one(t, Spec{Op: OpDecode, Kind: Raw}, []byte("abc")); !errors.Is(err, errs.ErrArgument) {
		t.Errorf("raw without an algorithm: %v", err)
	}
	if out, err := Run(context.Background(), Spec{Op: OpDecode}, nil); err != nil || len(out) != 0 {
		t.Errorf("Run without buffers: %v, %v", out, err)
	}
}

// A cancelled Run returns the context's error, and no worker is left running.
func TestCancel(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	src := text(4<<20, 4)
	if out, err := Run(ctx, Spec{Op: OpEncode, Algorithm: "Zstd"},
		[]Buffer{{Src: src}}); !errors.Is(err, context.Canceled) {
		t.Errorf("Run with a cancelled context: %v, %v", out, err)
	}
	if n := spawntest.Left(); len(n) != 0 {
		t.Fatalf("workers are left running: %v", n)
	}
}

// FuzzDecode decodes arbitrary bytes in every open format. The result is a typed error or a content, never a panic,
// and never more memory than the bytes can fill.
func FuzzDecode(f *testing.F) {
	src := text(600, 11)
	for i, name := range Names() {
		for k, kind := range kinds {
			made, err := one(f, Spec{Op: OpEncode, Algorithm: name, Kind: kind, Chunk: 256, Sums: kind == Native,
				Level: 1}, src)
			if err != nil {
				f.Fatal(err)
			}
			f.Add(uint8(i), uint8(k), made)
		}
	}
	for name, own := range ownOpen {
		a, _ := byName(name)
		f.Add(uint8(slices.Index(Names(), name)), uint8(0), openStream(f, a, own, src, 256))
	}
	f.Fuzz(func(t *testing.T, algo, kind uint8, src []byte) {
		names := Names()
		s := Spec{Op: OpDecode, Kind: kinds[int(kind)%len(kinds)],
			Verify: []string{VerifyNever, VerifyIfPresent, VerifyAlways}[kind/8%3]}
		if s.Kind != Native || kind&64 != 0 {
			s.Algorithm = names[int(algo)%len(names)]
		}
		s.Op = OpSize
		size, err := Run(context.Background(), s, []Buffer{{Src: src}})
		if err != nil {
			t.Fatal(err)
		}
		typed(t, "size", size[0].Err)
		if size[0].Err != nil || size[0].Bytes > 4<<20 {
			return
		}
		s.Op = OpDecode
		out, err := Run(context.Background(), s, []Buffer{{Src: src}})
		if err != nil {
			t.Fatal(err)
		}
		defer Release(out)
		typed(t, "decode", out[0].Err)
		if out[0].Bytes != size[0].Bytes {
			t.Fatalf("got %d bytes, but OpSize returned %d", out[0].Bytes, size[0].Bytes)
		}
	})
}
