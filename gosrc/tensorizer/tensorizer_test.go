package tensorizer

import (
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/hostmem"
	"github.com/overwire/overwire/gosrc/internal/spawn"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/tensor"
)

// bytesSource is a source in memory.
type bytesSource []byte

func (bytesSource) URI() string           { return "x.tensors" }
func (b bytesSource) Facts() source.Facts { return source.Facts{} }

func (b bytesSource) Size() int64 { return int64(len(b)) }
func (bytesSource) Close() error  { return nil }

func (b bytesSource) ReadAt(_ context.Context, p []byte, off int64) error {
	if off < 0 || int64(len(p)) > int64(len(b))-off {
		return errs.New(errs.ErrCorrupt, "truncated")
	}
	copy(p, b[off:])
	return nil
}

func a(plus float32) []byte {
	var b []byte
	for i := range 6 {
		b = le.AppendUint32(b, math.Float32bits(float32(i)+plus))
	}
	return b
}

// file returns a whole file. data[i] is the data of items[i].
func file(t testing.TB, items []Item, data [][]byte, length, align int64) []byte {
	t.Helper()
	at := Start(length)
	for i := range items {
		items[i].Record = at
		if align > 0 {
			items[i].PadTo(align)
		}
		at = items[i].Data() + items[i].Bytes
	}
	b, err := Front(items, 1, length)
	if err != nil {
		t.Fatal(err)
	}
	for i := range items {
		s := items[i].Summer()
		s.Write(data[i])
		b = append(b, items[i].Finish(s)...)
		if c := items[i].Crypt; c != nil {
			sealed := make([]byte, len(data[i]))
			copy(sealed, data[i])
			data[i] = sealed
		}
		b = append(b, data[i]...)
	}
	return append(b, make([]byte, Tail)...)
}

// Files of the reference library are reproduced byte by byte (2.11 and 2.12 write the same bytes), in every version
// except the encrypted one, which has random nonces.
func TestReferenceBytes(t *testing.T) {
	const f4 = "<f4"
	one := Item{Name: "x.a", Type: Parameter, Text: f4, Dims: []int64{2, 3}, Bytes: 24}
	var words []byte
	for i := range 6 {
		words = le.AppendUint16(words, uint16(i))
	}
	state := func(name string) Item {
		return Item{Name: name, Type: StateDict, Text: f4, Dims: []int64{2, 3}, Bytes: 24}
	}
	for _, c := range []struct {
		name  string
		items []Item
		data  [][]byte
		want  string
	}{
		{"version 1", []Item{one}, [][]byte{a(0)}, "8c76b6d749fee7004d8ec9060600c4de73a96755af8aba8d9b22eef204ca85ee"},
		{"version 2", []Item{one, {Module: 1, Name: "x.b", Type: Buffer, Text: "<V2\x00torch.bfloat16",
			Dims: []int64{2, 3}, Bytes: 12}},
			[][]byte{a(0), words}, "2ff3185847ce6cab5133c41ece9a8a5fa72d4aea3e8273eecd770f1f2c008bc8"},
		{"version 4", []Item{one, {Name: "x.m", Type: Parameter, Text: f4, Dims: []int64{4, 5}}},
			[][]byte{a(0), nil}, "9296a9f205a42da72e953afef440d7843d054ee2cc191b3d8ef11e495b20dd50"},
		{"version 5", []Item{one, {Name: "x.l", Type: Parameter, Text: "|i1", Dims: []int64{1<<32 + 5}}},
			[][]byte{a(0), nil}, "f327d8a4b6c77e550ea9525b29e7de68cf6db69836331f026573c19b19108864"},
		{"paths", []Item{state("\x1e[\"m\",0]"), state("\x1e[\"m\",1,\"w\"]"), state("h")},
			[][]byte{a(0), a(1), a(0)}, "7b66fa793b4dbf2a4b5aaf86dcd84e5d460a2e630b28c5d5acec0c231d1a7734"},
	} {
		b := file(t, c.items, c.data, 262144, 0)
		if sum := sha256.Sum256(b); hex.EncodeToString(sum[:]) != c.want {
			t.Errorf("%s: %x", c.name, sum)
		}
	}
}

func golden(t testing.TB, name string) bytesSource {
	t.Helper()
	f, err := os.Open(filepath.Join("../../tests/goldens/tensorizer/2.12.1", name+".tensors.gz"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	b, err := io.ReadAll(z)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func read(t testing.TB, src source.Source) *File {
	t.Helper()
	head := make([]byte, min(src.Size(), 4096))
	if err := src.ReadAt(t.Context(), head, 0); err != nil {
		t.Fatal(err)
	}
	f, err := Read(t.Context(), src, head)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// Files that tensorizer 2.12.1 and libsodium encrypted are decrypted with the key or the password. The sums match the
// plain bytes.
func TestGoldenEncrypted(t *testing.T) {
	key := make([]byte, 32)
	for i := range key {
		key[i] = byte(i)
	}
	for name, opt := range map[string]map[string]string{
		"key":      {OptionKey: hex.EncodeToString(key)},
		"password": {OptionPassword: hex.EncodeToString([]byte("test"))},
	} {
		src := golden(t, name)
		f := read(t, src)
		plain, err := SourceOf(t.Context(), f, src, opt)
		if err != nil {
			t.Fatal(err)
		}
		ix, err := IndexOf(f, nil)
		if err != nil {
			t.Fatal(err)
		}
		if err := ix.Validate(nil); err != nil {
			t.Fatal(err)
		}
		if len(ix.Tensors) != 3 || f.Version != 4 || !f.Encrypted || f.Records[1].Module != 8 {
			t.Fatalf("%s: %+v", name, f)
		}
		for i := range f.Entries {
			r, tt := f.Records[i], ix.Tensors[i]
			b := make([]byte, tt.Bytes)
			if err := plain.ReadAt(t.Context(), b, tt.Off); err != nil {
				t.Fatal(err)
			}
			s := NewSummer(r.Prefix)
			s.Write(b[:f.Entries[i].Bytes])
			crc, sha := s.Sums()
			if !bytes.Equal(sha, r.SHA256) || r.CRC32 != nil && !bytes.Equal(crc, r.CRC32) {
				t.Errorf("%s: tensor %d: sums differ", name, i)
			}
			if i == 0 && !bytes.Equal(b, a(0)) || i == 2 && len(bytes.Trim(b, "\x00")) != 0 {
				t.Errorf("%s: tensor %d: %x", name, i, b)
			}
		}
		for what, bad := range map[string]map[string]string{
			"another key":      {OptionKey: hex.EncodeToString(make([]byte, 32))},
			"another password": {OptionPassword: "00"},
			"none":             nil,
		} {
			plain, err := SourceOf(t.Context(), f, src, bad)
			if err == nil {
				err = plain.ReadAt(t.Context(), make([]byte, 4), ix.Tensors[0].Off)
			}
			if !errors.Is(err, errs.ErrCrypto) {
				t.Errorf("%s, %s: %v", name, what, err)
			}
		}
	}
}

// Keys derived from passwords equal libsodium's.
func TestDerivation(t *testing.T) {
	for _, c := range []struct {
		d    Derivation
		want string
	}{
		{Derivation{1, 8 << 10, make([]byte, 16)}, "185d9543e6945bb30c6ecb2d1ac58a388ddfe954c34cf395a4fa12f986897662"},
		{Derivation{2, 64 << 20, make([]byte, 16)}, "8d1ba1796cb05f8149872aa298cc5e3f587ffebe339deb7b2fc1c0f25da23514"},
	} {
		got, err := c.d.Key(t.Context(), []byte("test"))
		if err != nil || hex.EncodeToString(got) != c.want {
			t.Errorf("%+v: %x %v", c.d, got, err)
		}
	}
	for _, d := range []Derivation{{0, 8192, make([]byte, 16)}, {1, 8191, make([]byte, 16)}, {1, 8192, nil},
		{1, 1 << 60, make([]byte, 16)}, {1 << 40, 8192, make([]byte, 16)}} {
		if _, err := d.Key(t.Context(), []byte("x")); err == nil {
			t.Errorf("%+v was accepted", d)
		}
	}
}

// A key derivation that needs more than the available memory is refused.
func TestDerivationWithoutMemory(t *testing.T) {
	defer func() { available = hostmem.Available }()
	available = func() int64 { return 1 << 20 }
	_, err := Derivation{1, 2 << 20, make([]byte, 16)}.Key(t.Context(), []byte("x"))
	if !errors.Is(err, errs.ErrMemory) || !strings.Contains(err.Error(), "2097152 bytes") {
		t.Error(err)
	}
}

// sealAll encrypts data into dst.
func sealAll(dst, data []byte, key *[32]byte) *Crypt {
	c := NewCrypt(int64(len(data)), nil)
	copy(dst, data)
	for i := range c.MACs {
		c.Seal(dst[i*ChunkBytes:min((i+1)*ChunkBytes, len(data))], int64(i), key)
	}
	return c
}

// sealedFile returns a file with three encrypted tensors, one of them with several boxes, and a tensor without data.
func sealedFile(t testing.TB, r *rand.Rand, key *[32]byte) (b []byte, data [][]byte) {
	var items []Item
	var stored [][]byte
	for i, n := range []int{10, 2*ChunkBytes + 77, ChunkBytes, 0} {
		plain := make([]byte, n)
		for i := range plain {
			plain[i] = byte(r.Uint32())
		}
		it := Item{Name: string(rune('a' + i)), Type: StateDict, Text: "|u1", Dims: []int64{int64(n)}, Bytes: int64(n),
			Sealed: true}
		if n > 0 {
			out := make([]byte, n)
			it.Crypt = sealAll(out, plain, key)
			stored = append(stored, out)
		} else {
			it.Dims = []int64{123}
			plain = make([]byte, 123)
			stored = append(stored, nil)
		}
		items, data = append(items, it), append(data, plain)
	}
	return file(t, items, stored, IndexBytes(items), 64), data
}

// Any ranges, read by several readers concurrently, are the plain bytes of the file.
func TestSealed(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	var key [32]byte
	key[3] = 7
	b, data := sealedFile(t, r, &key)
	src := bytesSource(b)
	f := read(t, src)
	ix, err := IndexOf(f, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := ix.Validate(nil); err != nil {
		t.Fatal(err)
	}
	plain, err := SourceOf(t.Context(), f, src, map[string]string{OptionKey: hex.EncodeToString(key[:])})
	if err != nil {
		t.Fatal(err)
	}
	want := append(append([]byte{}, b...), make([]byte, 123)...)
	for i := range ix.Tensors {
		copy(want[ix.Tensors[i].Off:], data[i])
	}
	if plain.Size() != int64(len(want)) {
		t.Fatalf("got %d bytes, want %d", plain.Size(), len(want))
	}
	var wg sync.WaitGroup
	for w := range 4 {
		r := rand.New(rand.NewPCG(seed, uint64(w)))
		wg.Go(func() {
			for range 40 {
				off := r.Int64N(int64(len(want)))
				n := r.Int64N(int64(len(want)) - off + 1)
				if r.IntN(2) == 0 {
					n = min(n, 5000)
				}
				got := make([]byte, n)
				if err := plain.ReadAt(t.Context(), got, off); err != nil || !bytes.Equal(got, want[off:off+n]) {
					t.Errorf("%d bytes from offset %d: %v", n, off, err)
				}
			}
		})
	}
	wg.Wait()
	if err := plain.ReadAt(t.Context(), make([]byte, 2), int64(len(want))-1); !errors.Is(err, errs.ErrCorrupt) {
		t.Errorf("past the end: %v", err)
	}
	for i := range ix.Tensors[:3] { // flip a random bit of the encrypted bytes
		at := ix.Tensors[i].Off + r.Int64N(ix.Tensors[i].Bytes)
		bad := append(bytesSource{}, b...)
		bad[at] ^= 1 << r.IntN(8)
		plain, err := SourceOf(t.Context(), f, bad, map[string]string{OptionKey: hex.EncodeToString(key[:])})
		if err != nil {
			t.Fatal(err)
		}
		if err := plain.ReadAt(t.Context(), make([]byte, ix.Tensors[i].Bytes), ix.Tensors[i].Off); !errors.Is(err,
			errs.ErrCrypto) {
			t.Errorf("a flipped bit at %d: %v", at, err)
		}
	}
}

// Unknown features give errs.ErrNotSupported. Damage gives errs.ErrFormat or errs.ErrCorrupt.
func TestRefused(t *testing.T) {
	whole := file(t, []Item{
		{Name: "x.a", Type: Parameter, Text: "<f4", Dims: []int64{2, 3}, Bytes: 24},
		{Name: "x.m", Type: Parameter, Text: "<f4", Dims: []int64{4}},
	}, [][]byte{a(0), nil}, 300, 0)
	entry := headSize + 2 + 3 + 1 + 1 + 3 + 1 + 8 // position of the first entry's offsets
	for _, c := range []struct {
		name string
		edit func(b []byte) []byte
		want error
	}{
		{"version 6", func(b []byte) []byte { b[5] = 6; return b }, errs.ErrNotSupported},
		{"version 0", func(b []byte) []byte { b[5] = 0; return b }, errs.ErrNotSupported},
		{"3.0-dev", func(b []byte) []byte { b[5] = 5; return b }, errs.ErrNotSupported},
		{"flag 1 in version 4", func(b []byte) []byte { b[9] = 2; return b }, errs.ErrFormat},
		{"flag 2", func(b []byte) []byte { b[9] = 4; return b }, errs.ErrNotSupported},
		{"flag 255", func(b []byte) []byte { b[40] = 128; return b }, errs.ErrNotSupported},
		{"plain data in an encrypted file", func(b []byte) []byte { b[9] = 1; return b }, errs.ErrFormat},
		{"big-endian", func(b []byte) []byte { b[headSize+7] = '>'; return b }, errs.ErrNotSupported},
		{"type 3", func(b []byte) []byte { b[headSize+5] = 3; return b }, errs.ErrNotSupported},
		// the third entry consists of zeros, which have an unsupported dtype
		{"more tensors than entries", func(b []byte) []byte { b[57] = 3; return b }, errs.ErrNotSupported},
		{"a huge count", func(b []byte) []byte { b[64] = 0xff; return b }, errs.ErrFormat},
		{"a huge index", func(b []byte) []byte { b[72] = 0x7f; return b }, errs.ErrFormat},
		{"data before the records", func(b []byte) []byte { b[entry], b[entry+1] = 0, 0; return b }, errs.ErrFormat},
		{"data outside the file", func(b []byte) []byte { b[entry+15] = 0x7f; return b }, errs.ErrCorrupt},
		{"negative bytes", func(b []byte) []byte { b[entry+23] = 0xff; return b }, errs.ErrFormat},
		{"no index", func(b []byte) []byte { return b[:headSize] }, errs.ErrCorrupt},
		{"no head", func(b []byte) []byte { return b[:30] }, errs.ErrCorrupt},
		{"cut data", func(b []byte) []byte { return b[:len(b)-100] }, errs.ErrCorrupt},
	} {
		b := c.edit(append([]byte{}, whole...))
		_, err := Read(t.Context(), bytesSource(b), b)
		var at *errs.At
		if !errors.Is(err, c.want) || !errors.As(err, &at) {
			t.Errorf("%s: %v", c.name, err)
		}
	}
}

// A hole is a sparse file: its size is larger than its contents.
type hole struct {
	bytesSource
	size int64
}

func (h hole) Size() int64 { return h.size }

func (h hole) ReadAt(_ context.Context, p []byte, off int64) error {
	clear(p)
	if off < int64(len(h.bytesSource)) {
		copy(p, h.bytesSource[off:])
	}
	return nil
}

// In a sparse file, records that take more space than an index may have are refused before any of them is read.
func TestLargeRecords(t *testing.T) {
	var items []Item
	at := Start(2000)
	for i := range 20 {
		items = append(items, Item{Name: fmt.Sprint(i), Text: "<f4", Dims: []int64{1}, Bytes: 4, Record: at, Pad: 95e6})
		at = items[i].Data() + 4
	}
	b, err := Front(items, 1, 2000)
	if err != nil {
		t.Fatal(err)
	}
	src := hole{b, at + Tail}
	f := read(t, src)
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	err = f.ReadRecords(t.Context(), src)
	runtime.ReadMemStats(&after)
	if !errors.Is(err, errs.ErrFormat) || after.TotalAlloc-before.TotalAlloc > 1<<20 {
		t.Error(err, after.TotalAlloc-before.TotalAlloc)
	}
}

// A file with a separate key for each tensor, each derived with the maximum work for one key, is refused before any
// key is derived.
func TestManyKeys(t *testing.T) {
	f := &File{URI: "x", Encrypted: true, Entries: make([]Entry, 3)}
	for i := range f.Entries {
		f.Records = append(f.Records, Record{Crypt: &Crypt{Derive: &Derivation{maxKeyPasses, maxKeyWork / maxKeyPasses,
			bytes.Repeat([]byte{byte(i)}, saltBytes)}}})
	}
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	_, err := SourceOf(ctx, f, bytesSource(nil), map[string]string{OptionPassword: "00"})
	if !errors.Is(err, errs.ErrNotSupported) {
		t.Error(err)
	}
}

// For any flipped bit and any truncation, the reader returns an error or a valid index. It never panics.
func TestFlips(t *testing.T) {
	whole := file(t, []Item{
		{Name: "x.a", Type: Parameter, Text: "<f4", Dims: []int64{2, 3}, Bytes: 24},
		{Name: "\x1e[\"a\",0]", Type: StateDict, Text: "<V2\x00torch.bfloat16", Dims: []int64{3}, Bytes: 6},
	}, [][]byte{a(0), make([]byte, 6)}, 200, 0)
	try := func(b []byte) { sound(t, b) }
	for i := range whole {
		try(whole[:i])
		for bit := range 8 {
			b := append([]byte{}, whole...)
			b[i] ^= 1 << bit
			try(b)
		}
	}
}

// sound reads a file and checks that the result is a valid index or a classed error.
func sound(t *testing.T, b []byte) {
	src := bytesSource(b)
	if !Is(b) {
		return
	}
	f, err := Read(t.Context(), src, b)
	if err == nil {
		ix, err := IndexOf(f, map[string]string{OptionBytes: ""})
		if err != nil {
			t.Fatal(err)
		}
		if ix.Validate(nil) == nil { // it may be invalid, for example with duplicate names
			for i := range ix.Tensors {
				if tt := &ix.Tensors[i]; tt.Off+tt.Bytes > ix.Sources[0].Size {
					t.Fatalf("tensor %d outside the file", i)
				}
			}
		}
		if err := f.ReadRecords(t.Context(), src); err != nil && !errs.Classed(err) {
			t.Fatalf("an error without a class: %v", err)
		}
	}
	var at *errs.At
	if err != nil && (!errs.Classed(err) || !errors.As(err, &at) && !errors.Is(err, errs.ErrCorrupt)) {
		t.Fatalf("an error without a class or location: %v", err)
	}
}

func FuzzRead(f *testing.F) {
	var key [32]byte
	items := []Item{{Name: "x.a", Type: Parameter, Text: "<f4", Dims: []int64{2, 3}, Bytes: 24},
		{Name: "m", Type: StateDict, Text: "|i1", Dims: []int64{1 << 33}}}
	f.Add(file(f, items, [][]byte{a(0), nil}, 200, 0))
	out := make([]byte, 24)
	it := Item{Name: "x", Type: Parameter, Text: "<f4", Dims: []int64{2, 3}, Bytes: 24, Sealed: true,
		Crypt: sealAll(out, a(0), &key)}
	it.Crypt.Derive = &Derivation{1, 8192, make([]byte, 16)}
	f.Add(file(f, []Item{it}, [][]byte{out}, 100, 32))
	f.Fuzz(sound)
}

// Every dtype that both formats have round-trips.
func TestDTypes(t *testing.T) {
	for d := tensor.DType(1); d.Valid(); d++ {
		text, dims, err := dtypeText(d, []int64{3, 4})
		if d == tensor.F6E2M3 || d == tensor.F6E3M2 {
			if !errors.Is(err, errs.ErrNotSupported) {
				t.Errorf("%v: %v", d, err)
			}
			continue
		}
		back, shape, err2 := dtypeOf(text, dims)
		if err != nil || err2 != nil || back != d || len(shape) != 2 || shape[1] != 4 {
			t.Errorf("%v: written as %q, read back as %v: %v, %v", d, text, back, err, err2)
		}
	}
}

// A dimension of 2^32 or more, written by tensorizer 2.12.1, is read.
func TestGoldenWide(t *testing.T) {
	f := read(t, golden(t, "v5"))
	if len(f.Entries) != 2 || f.Entries[1].Dims[0] != 1<<32+5 || f.Entries[0].Name != "x.a" {
		t.Fatalf("wrong entries: %+v", f)
	}
	if ix, err := IndexOf(f, nil); err != nil || ix.Validate(nil) != nil {
		t.Fatalf("%+v %v", ix, err)
	}
}

// A dtype that safetensors does not have is refused, or read as bytes on request.
func TestOtherDTypes(t *testing.T) {
	items := []Item{{Name: "z", Type: StateDict, Text: "<c16", Dims: []int64{2}, Bytes: 32},
		{Name: "h", Type: StateDict, Text: "<V4\x00torch.complex32", Dims: []int64{3}, Bytes: 12}}
	f := read(t, bytesSource(file(t, items, [][]byte{make([]byte, 32), make([]byte, 12)}, 200, 0)))
	if _, err := IndexOf(f, nil); !errors.Is(err, errs.ErrNotSupported) {
		t.Errorf("complex numbers without the option: %v", err)
	}
	ix, err := IndexOf(f, map[string]string{OptionBytes: "true"})
	if err != nil || ix.Validate(nil) != nil || ix.Tensors[0].DType != tensor.U8 || ix.Tensors[0].Shape[1] != 16 ||
		ix.Tensors[1].Shape[1] != 4 {
		t.Errorf("%+v %v", ix, err)
	}
}

// If its context ends, Key stops waiting, while the derivation continues. The next caller waits for that derivation,
// but also returns if its own context ends.
func TestAbandonedDerivation(t *testing.T) {
	long := Derivation{3, 128 << 20, make([]byte, 16)}
	ctx := t.Context()
	for left := false; !left; long.Passes *= 2 { // on a slow host, the derivation may end first
		if long.Passes > 500 {
			t.Fatal("Key only returns after the derivation has ended")
		}
		c, cancel := context.WithCancel(t.Context())
		ctx = c
		spawn.Go("test", func() {
			for len(deriving) == 0 && c.Err() == nil {
				time.Sleep(time.Millisecond)
			}
			cancel()
		})
		if k, err := long.Key(ctx, []byte("x")); err != nil && !errors.Is(err, context.Canceled) {
			t.Fatalf("%x %v", k, err)
		} else if err == nil {
			cancel()
			continue
		}
		left = len(deriving) > 0
	}
	for range 2 { // the derivation is still running, and the context has ended
		if k, err := long.Key(ctx, []byte("x")); !errors.Is(err, context.Canceled) {
			t.Fatalf("%x %v", k, err)
		}
	}
	deriving <- struct{}{} // wait until the derivation ends
	<-deriving
}
