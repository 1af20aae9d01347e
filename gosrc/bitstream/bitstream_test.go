package bitstream

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/overwire/overwire/gosrc/fault"
	"github.com/overwire/overwire/gosrc/internal/spawn"
)

var kinds = []Kind{Native, Raw, WithSize}

// text is n bytes that compress a little, the same for a seed.
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

// one runs one buffer and returns a copy of what came out.
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

// Every algorithm gives back every content in every kind, the size that it
// finds is the content's, and no stream is longer than its bound.
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
					s := Spec{Op: OpEncode, Algorithm: name, Kind: kind, Level: 1, Sums: sums, Version: 5 + n%2}
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
						t.Fatalf("%s kind %d %d bytes: %d back, %v", name, kind, n, len(got), err)
					}
					d.Op, s.Op = OpSize, OpBound
					size, err := Run(context.Background(), d, []Buffer{{Src: made}})
					if err != nil || size[0].Err != nil || size[0].Bytes != int64(n) {
						t.Errorf("%s kind %d: size %d, want %d (%v, %v)", name, kind, size[0].Bytes, n, err, size[0].Err)
					}
					s.Sizes = []int64{int64(len(src))}
					most, _ := Run(context.Background(), s, nil)
					if int64(len(made)) > most[0].Bytes {
						t.Errorf("%s kind %d: %d bytes, the bound is %d", name, kind, len(made), most[0].Bytes)
					}
				}
			}
		}
	}
}

// Incompressible bytes stay under the bound, at every level.
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
					t.Errorf("%s kind %d level %d: %d over the bound %d", name, kind, level, len(made), most[0].Bytes)
				}
			}
		}
	}
}

// Streams that nvCOMP's CPU library wrote decode here, and a stream of ours has
// the header that it writes, field for field.
func TestStreamsOfNvcomp(t *testing.T) {
	want := make([]byte, 70000)
	for i := range want {
		want[i] = byte(i / 7 % 251)
	}
	for version, name := range map[int]string{5: "5.3", 6: "6.0"} {
		theirs, err := os.ReadFile("testdata/nvcomp-" + name + "-lz4.bin")
		if err != nil {
			t.Fatal(err)
		}
		got, err := one(t, Spec{Op: OpDecode, Verify: VerifyIfPresent}, theirs)
		if err != nil || !bytes.Equal(got, want) {
			t.Fatalf("%s: %d bytes, %v", name, len(got), err)
		}
		mine, err := one(t, Spec{Op: OpEncode, Algorithm: "lz4", Version: version}, want)
		if err != nil {
			t.Fatal(err)
		}
		// All but the size of the payload and the second chunk's place is the same.
		a, b := bytes.Clone(theirs[:80]), bytes.Clone(mine[:80])
		clear(a[8:16])
		clear(b[8:16])
		if !bytes.Equal(a, b) {
			t.Errorf("headers of %s differ:\n%x\n%x", name, a, b)
		}
	}
}

// Streams as nvCOMP 2.2, the last one that was open, lays them out: chunks in
// any order and without gaps, room for checksums that are flagged and private.
func TestStreamsOfTheOpenRelease(t *testing.T) {
	le := binary.LittleEndian
	src := text(150_000, 8)
	for name, own := range map[string]int{"GDeflate": 4, "LZ4": 4, "Snappy": 1, "Cascaded": 24} {
		var chunks [][]byte
		for at := 0; at < len(src); at += 65536 {
			made, err := one(t, Spec{Op: OpEncode, Algorithm: name, Kind: Raw, Level: 1}, src[at:min(at+65536, len(src))])
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
		a, err := byName(name)
		if err != nil {
			t.Fatal(err)
		}
		head[4], head[5], head[6] = 2, 2, byte(a.id)
		le.PutUint64(head[8:], uint64(len(payload)))
		le.PutUint64(head[16:], uint64(len(src)))
		le.PutUint64(head[24:], uint64(n))
		head[32], head[44], head[45] = 1, 1, 1
		le.PutUint64(head[48:], 65536)
		le.PutUint32(head[56:], uint32(len(head)))
		made := append(head, payload...)
		if got, err := one(t, Spec{Op: OpDecode}, made); err != nil || !bytes.Equal(got, src) {
			t.Errorf("%s: %d bytes, %v", name, len(got), err)
		}
		if _, err := one(t, Spec{Op: OpDecode, Verify: VerifyIfPresent}, made); !errors.Is(err, fault.ErrNotSupported) {
			t.Errorf("%s: private checksums: %v", name, err)
		}
		le.PutUint32(made[56:], uint32(first+8*n))
		if _, err := one(t, Spec{Op: OpDecode}, made); !errors.Is(err, fault.ErrCorrupt) {
			t.Errorf("%s without room for its tables: %v", name, err)
		}
		made[4] = 0
		if _, err := one(t, Spec{Op: OpDecode}, made); !errors.Is(err, fault.ErrFormat) {
			t.Errorf("%s of no version: %v", name, err)
		}
	}
}

// Tables lie where nvCOMP's public headers put them: behind 64 or 56 bytes and
// the algorithm's own header.
func TestWhereTablesLie(t *testing.T) {
	want := map[string][2]int{
		"LZ4": {72, 72}, "Snappy": {72, 64}, "Zstd": {72, 64}, "Deflate": {72, 64}, "Gzip": {72, 64}, "GDeflate": {72, 64},
		"Cascaded": {88, 96}, "X16": {72, 72},
	}
	for _, name := range Names() {
		for version := 5; version <= 6; version++ {
			made, err := one(t, Spec{Op: OpEncode, Algorithm: name, Version: version, Level: 2, DType: "I32", Chunk: 4096}, make([]byte, 8192))
			if err != nil {
				t.Fatal(err)
			}
			h, err := parseHeader(made)
			if err != nil || h.chunks != 2 {
				t.Fatalf("%s: %+v, %v", name, h, err)
			}
			if at := int(h.offset) - 32; at&^8 != want[name][version-5]&^8 || at != want[name][version-5] && name != "X16" {
				t.Errorf("%s of version %d: tables at %d, want %d", name, version, at, want[name][version-5])
			}
			own := made[64:]
			if version == 6 {
				own = made[56:]
			}
			switch name {
			case "Deflate", "GDeflate", "Gzip":
				if own[0] != 2 {
					t.Errorf("%s of version %d: its level is %d", name, version, own[0])
				}
			case "Cascaded":
				if typ := own[8*(6-version)]; typ != 4 {
					t.Errorf("%s of version %d: its type is %d", name, version, typ)
				}
			}
		}
	}
}

// Streams whose header says that their bits are shuffled are refused, instead
// of decoded to other bytes.
func TestShuffledStreams(t *testing.T) {
	for _, c := range []struct {
		name    string
		version int
		at      int
	}{{"LZ4", 5, 65}, {"LZ4", 6, 60}, {"Cascaded", 5, 85}} {
		made, err := one(t, Spec{Op: OpEncode, Algorithm: c.name, Version: c.version}, text(1000, 1))
		if err != nil {
			t.Fatal(err)
		}
		made[c.at] = 1
		if _, err := one(t, Spec{Op: OpDecode}, made); !errors.Is(err, fault.ErrNotSupported) {
			t.Errorf("%s of version %d: %v", c.name, c.version, err)
		}
	}
}

// Buffers with memory of their own land there, one that is too small is an
// error of its own, and the rest of the batch is done.
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
	if out[0].Err != nil || !bytes.Equal(big[:len(src)], src) || out[0].Mem.Block != nil || !bytes.Equal(big[len(src):], make([]byte, 9)) {
		t.Errorf("own memory: %+v", out[0])
	}
	if !errors.Is(out[1].Err, fault.ErrArgument) || !errors.Is(out[2].Err, fault.ErrFormat) {
		t.Errorf("errors: %v, %v", out[1].Err, out[2].Err)
	}
	if out[3].Err != nil || !bytes.Equal(out[3].Mem.Slice(), src) {
		t.Errorf("the last: %v", out[3].Err)
	}
}

// A stream with checksums is refused when any byte of a chunk, or a sum, has
// changed; the content's length stays, so that it can be looked at.
func TestChecksums(t *testing.T) {
	src := text(150_000, 5)
	made, err := one(t, Spec{Op: OpEncode, Algorithm: "Snappy", Sums: true}, src)
	if err != nil {
		t.Fatal(err)
	}
	// 56 of header, 4 of Snappy's own, 4 of padding, three chunks of 16, 24 of sums.
	for _, at := range []int{5, 48, 112, 135, 160, 60_000, len(made) - 12} {
		bad := bytes.Clone(made)
		bad[at] ^= 4
		out, err := Run(context.Background(), Spec{Op: OpDecode, Verify: VerifyAlways}, []Buffer{{Src: bad}})
		if err != nil {
			t.Fatal(err)
		}
		if !errors.Is(out[0].Err, fault.ErrCorrupt) || !out[0].Summed || out[0].Bytes != int64(len(src)) {
			t.Errorf("a flip at %d: %+v", at, out[0])
		}
		Release(out)
	}
	plain, _ := one(t, Spec{Op: OpEncode, Algorithm: "Snappy"}, src)
	if _, err := one(t, Spec{Op: OpDecode, Verify: VerifyAlways}, plain); !errors.Is(err, fault.ErrArgument) {
		t.Errorf("a stream without checksums: %v", err)
	}
	if got, err := one(t, Spec{Op: OpDecode, Verify: VerifyAlways}, made); err != nil || !bytes.Equal(got, src) {
		t.Errorf("as it was made: %v", err)
	}
	elsewhere := bytes.Clone(made) // what lay 8 bytes behind a multiple of 32
	le := binary.LittleEndian
	for i := range 3 {
		le.PutUint32(elsewhere[124+4*i:], laneSum(src[i<<16:min(len(src), (i+1)<<16)], 8))
	}
	le.PutUint32(elsewhere[headSumAt:], headSum(elsewhere[:le.Uint32(elsewhere[40:])]))
	if bytes.Equal(elsewhere, made) {
		t.Error("a place makes no difference")
	}
	if got, err := one(t, Spec{Op: OpDecode, Verify: VerifyAlways}, elsewhere); err != nil || !bytes.Equal(got, src) {
		t.Errorf("the sums of another place: %v", err)
	}
	foreign, err := one(t, Spec{Op: OpEncode, Algorithm: "Snappy", Sums: true, Version: 5}, src)
	if err != nil || foreign[7] != 'w' {
		t.Fatalf("version 5: %v", err)
	}
	if got, err := one(t, Spec{Op: OpDecode, Verify: VerifyAlways}, foreign); err != nil || !bytes.Equal(got, src) {
		t.Errorf("version 5: %v", err)
	}
	foreign[7] = 0
	if _, err := one(t, Spec{Op: OpDecode, Verify: VerifyIfPresent}, foreign); !errors.Is(err, fault.ErrNotSupported) {
		t.Errorf("checksums of another kind: %v", err)
	}
	if got, err := one(t, Spec{Op: OpDecode}, foreign); err != nil || !bytes.Equal(got, src) {
		t.Errorf("checksums of another kind, not looked at: %v", err)
	}
}

// typed holds an error to the classes that bytes may cause.
func typed(t testing.TB, what string, err error) {
	t.Helper()
	if err != nil && !errors.Is(err, fault.ErrCorrupt) && !errors.Is(err, fault.ErrFormat) &&
		!errors.Is(err, fault.ErrNotSupported) && !errors.Is(err, fault.ErrArgument) {
		t.Fatalf("%s: %v", what, err)
	}
}

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
		if _, err := one(t, Spec{Op: OpDecode, Algorithm: name, Kind: WithSize}, made); !errors.Is(err, fault.ErrCorrupt) {
			t.Errorf("%s: %v", name, err)
		}
		made, _ = one(t, Spec{Op: OpEncode, Algorithm: name, Level: 1}, src)
		for _, huge := range []uint64{1 << 40, 1 << 63, 1<<64 - 1} {
			le.PutUint64(made[16:], huge)
			le.PutUint64(made[32:], huge)
			if _, err := one(t, Spec{Op: OpDecode}, made); !errors.Is(err, fault.ErrCorrupt) {
				t.Errorf("%s native of %d: %v", name, huge, err)
			}
		}
	}
	// Chunks that all point to the same bytes.
	made, _ := one(t, Spec{Op: OpEncode, Algorithm: "LZ4", Chunk: 4096}, make([]byte, 40_960))
	off, sizes := made[72:152], made[152:232]
	for i := range 10 {
		le.PutUint64(off[8*i:], 0)
		le.PutUint64(sizes[8*i:], le.Uint64(sizes)+8)
	}
	if _, err := one(t, Spec{Op: OpDecode}, made); !errors.Is(err, fault.ErrCorrupt) {
		t.Errorf("overlapping chunks: %v", err)
	}
}

// What is done at once is little, also where hostile bytes promise or hold much.
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
		{"what may be a bomb of GDeflate", Spec{Op: OpSize, Algorithm: "GDeflate", Kind: Raw}, src, false},
		{"what may be a bomb of Zstd", Spec{Op: OpDecode, Algorithm: "Zstd", Kind: Raw}, src, false},
		{"what says how little it is", Spec{Op: OpDecode, Algorithm: "Zstd", Kind: WithSize}, []byte{9, 0, 0, 0, 0, 0, 0, 0, 1}, true},
		{"no stream at all", Spec{Op: OpDecode}, src, true},
		{"no algorithm", Spec{Op: OpDecode, Kind: Raw}, src, true},
	} {
		if got := Quick(&c.s, []Buffer{{Src: c.src}}); got != c.want {
			t.Errorf("%s: %v", c.what, got)
		}
	}
	made, err := one(t, Spec{Op: OpEncode, Algorithm: "GDeflate", Level: 1}, make([]byte, 40<<20))
	if err != nil || len(made) > alone {
		t.Fatalf("%d bytes, %v", len(made), err)
	}
	if Quick(&Spec{Op: OpDecode}, []Buffer{{Src: made}}) {
		t.Error("40 MB of zeros are decoded at once")
	}
}

// Specs that make no sense are the caller's mistake, and names that only
// nvCOMP decodes are not supported.
func TestSpecs(t *testing.T) {
	for _, c := range []struct {
		s    Spec
		want error
	}{
		{Spec{Op: "x", Algorithm: "LZ4"}, fault.ErrArgument},
		{Spec{Op: OpEncode}, fault.ErrArgument},
		{Spec{Op: OpEncode, Algorithm: "nope"}, fault.ErrArgument},
		{Spec{Op: OpEncode, Algorithm: "ANS"}, fault.ErrNotSupported},
		{Spec{Op: OpDecode, Algorithm: "bitcomp"}, fault.ErrNotSupported},
		{Spec{Op: OpEncode, Algorithm: "lz4", Chunk: -1}, fault.ErrArgument},
		{Spec{Op: OpEncode, Algorithm: "lz4", Chunk: 1 << 30}, fault.ErrArgument},
		{Spec{Op: OpEncode, Algorithm: "lz4", Kind: Raw, Sums: true}, fault.ErrArgument},
		{Spec{Op: OpEncode, Algorithm: "lz4", Kind: 3}, fault.ErrArgument},
		{Spec{Op: OpEncode, Algorithm: "lz4", Version: 4}, fault.ErrArgument},
		{Spec{Op: OpEncode, Algorithm: "GZIP", Level: 6}, fault.ErrArgument},
		{Spec{Op: OpEncode, Algorithm: "X16", DType: "F17"}, fault.ErrArgument},
	} {
		if out, err := Run(context.Background(), c.s, []Buffer{{Src: []byte("abc")}}); !errors.Is(err, c.want) {
			t.Errorf("%+v: %v, %v", c.s, out, err)
		}
	}
	if _, err := one(t, Spec{Op: OpDecode, Kind: Raw}, []byte("abc")); !errors.Is(err, fault.ErrArgument) {
		t.Errorf("raw without an algorithm: %v", err)
	}
	if out, err := Run(context.Background(), Spec{Op: OpDecode}, nil); err != nil || len(out) != 0 {
		t.Errorf("no buffers: %v, %v", out, err)
	}
}

// A cancelled run ends with the context's error, and no worker is left.
func TestCancel(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	src := text(4<<20, 4)
	if out, err := Run(ctx, Spec{Op: OpEncode, Algorithm: "Zstd"}, []Buffer{{Src: src}}); !errors.Is(err, context.Canceled) {
		t.Errorf("%v, %v", out, err)
	}
	for i := 0; spawn.Running() != 0; i++ {
		if i > 1000 {
			t.Fatalf("left: %v", spawn.Names())
		}
		time.Sleep(time.Millisecond)
	}
}

// FuzzDecode gives every open format bytes of a stranger: a typed error or a
// content, never a panic, and never memory that the bytes cannot fill.
func FuzzDecode(f *testing.F) {
	src := text(600, 11)
	for i, name := range Names() {
		for k, kind := range kinds {
			made, err := one(f, Spec{Op: OpEncode, Algorithm: name, Kind: kind, Chunk: 256, Sums: kind == Native, Level: 1}, src)
			if err != nil {
				f.Fatal(err)
			}
			f.Add(uint8(i), uint8(k), made)
		}
	}
	for _, w := range ofSix(f) {
		if i := slices.Index(Names(), w.Algorithm); len(w.Stream) < 500 {
			f.Add(uint8(i), uint8(w.Kind), w.Stream)
		}
	}
	f.Fuzz(func(t *testing.T, algo, kind uint8, src []byte) {
		names := Names()
		s := Spec{Op: OpDecode, Kind: kinds[int(kind)%len(kinds)], Verify: []string{VerifyNever, VerifyIfPresent, VerifyAlways}[kind/8%3]}
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
			t.Fatalf("%d bytes, %d were declared", out[0].Bytes, size[0].Bytes)
		}
	})
}
