package cascaded

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/overwire/overwire/gosrc/errs"
)

// contents returns several kinds of content: n bytes of elements of the given size.
func contents(n, size int) map[string][]byte {
	r := rand.New(rand.NewPCG(uint64(n), uint64(size)))
	made := map[string]func(i int) uint64{
		"zeros":  func(int) uint64 { return 0 },
		"same":   func(int) uint64 { return 0xF1F2F3F4F5F6F7F8 },
		"ramp":   func(i int) uint64 { return uint64(3 * i) },
		"down":   func(i int) uint64 { return uint64(-i) },
		"runs":   func(i int) uint64 { return uint64(i / 37 * 5 % 11) },
		"signs":  func(i int) uint64 { return uint64(i%3 - 1) },
		"noise":  func(int) uint64 { return r.Uint64() },
		"few":    func(int) uint64 { return r.Uint64() >> 61 },
		"spikes": func(i int) uint64 { return uint64(i%100/99) * r.Uint64() },
	}
	out := map[string][]byte{}
	for name, f := range made {
		b := make([]byte, n)
		for i := range n / size {
			storeElements(b[i*size:], size, f(i))
		}
		out[name] = b
	}
	return out
}

// For every type and number of layers, packed or not, the content round-trips, the stream does not exceed the bound,
// and Size is correct.
func TestRoundTrip(t *testing.T) {
	for typ := Char; typ <= ULongLong; typ++ {
		for _, n := range []int{0, 8, 64, 4096, 4104, 9000} {
			for name, src := range contents(n, typ.Size()) {
				for rles := range 4 {
					for deltas := range 4 {
						for _, pack := range []bool{false, true} {
							o := Options{typ, rles, deltas, pack}
							made, err := Encode([]byte("front"), src, o)
							if err != nil {
								t.Fatal(err)
							}
							made = made[5:]
							size, err := Size(made)
							if err != nil || size != int64(n) || len(made) > Bound(n) || len(made)%4 != 0 {
								t.Fatalf("%+v %s of %d: size %d in %d bytes, %v", o, name, n, size, len(made), err)
							}
							got := make([]byte, n)
							if err := Decode(got, made); err != nil || !bytes.Equal(got, src) {
								t.Fatalf("%+v %s of %d: %v", o, name, n, err)
							}
						}
					}
				}
			}
		}
	}
}

// The layout matches its description. The expected bytes were written by hand.
func TestLayout(t *testing.T) {
	for _, c := range []struct {
		o    Options
		src  []uint32
		want string
	}{
		// Runs 4x7, 4x8, 4x9; differences 1, 1; a run of 2x1.
		{Default(Int), []uint32{7, 7, 7, 7, 8, 8, 8, 8, 9, 9, 9, 9},
			"02010104 30000000" +
				"2c000000 08000000 08000000 08000000 07000000" + // 44 bytes; three arrays; the first value
				"0400 0000 0300 0000" + // run lengths: 4, three times
				"0200 0000 0100 0000" + // run lengths: 2, once
				"01000000 0100 0000"}, // values: 1, once
		// Only packed bits: 2 bits each, relative to -1, in one word.
		{Options{UInt, 0, 0, true}, []uint32{0xFFFFFFFF, 0, 1, 2, 1, 0, 0xFFFFFFFF, 0xFFFFFFFF},
			"00000105 20000000" + "14000000 0c000000" + "ffffffff 0800 0200 e4060000"},
		// Not compressible: stored as plain elements.
		{Options{Int, 1, 0, false}, []uint32{1, 2, 3}, "00000004 0c000000 01000000 02000000 03000000"},
	} {
		src := make([]byte, 4*len(c.src))
		for i, v := range c.src {
			binary.LittleEndian.PutUint32(src[4*i:], v)
		}
		want, err := hex.DecodeString(strings.ReplaceAll(c.want, " ", ""))
		if err != nil {
			t.Fatal(err)
		}
		if made, err := Encode(nil, src, c.o); err != nil || !bytes.Equal(made, want) {
			t.Errorf("%+v: %x, want %x (%v)", c.o, made, want, err)
		}
		got := make([]byte, len(src))
		if err := Decode(got, want); err != nil || !bytes.Equal(got, src) {
			t.Errorf("%+v: decodes to %x, %v", c.o, got, err)
		}
	}
}

// A type that nvCOMP 2.2 does not have is refused, with and without layers.
func TestUnknownTypes(t *testing.T) {
	for _, typ := range []byte{8, 0x80, 0x84, 0x85, 0xFF} {
		for _, layers := range []string{"\x00\x00\x00", "\x01\x00\x00", "\x02\x01\x01"} {
			src := append([]byte(layers), typ, 4, 0, 0, 0, 1, 2, 3, 4)
			if n, err := Size(src); !errors.Is(err, errs.ErrCorrupt) {
				t.Errorf("type %#x after %x: %d bytes, %v", typ, layers, n, err)
			}
			if err := Decode(make([]byte, 4), src); !errors.Is(err, errs.ErrCorrupt) {
				t.Errorf("type %#x after %x: %v", typ, layers, err)
			}
		}
	}
}

// Options out of range, and contents that end inside an element, are argument errors.
func TestArguments(t *testing.T) {
	for _, o := range []Options{{Type: 8}, {RLEs: 8}, {RLEs: -1}, {Deltas: 8}, {Deltas: -1}} {
		if _, err := Encode(nil, nil, o); !errors.Is(err, errs.ErrArgument) {
			t.Errorf("%+v: %v", o, err)
		}
	}
	if _, err := Encode(nil, make([]byte, 7), Default(Int)); !errors.Is(err, errs.ErrArgument) {
		t.Errorf("7 bytes of int: %v", err)
	}
}

// Truncated blocks are refused. A flipped bit gives an error or different bytes, and never a write past the end.
func TestDamage(t *testing.T) {
	for _, o := range []Options{Default(UChar), Default(LongLong), {Short, 1, 2, false}, {UInt, 0, 0, true}} {
		for name, src := range contents(4400, o.Type.Size()) {
			if name != "runs" && name != "ramp" {
				continue
			}
			made, err := Encode(nil, src, o)
			if err != nil {
				t.Fatal(err)
			}
			got := make([]byte, len(src)+8)
			for n := range made {
				if err := Decode(got[:len(src)], made[:n]); !errors.Is(err, errs.ErrCorrupt) {
					t.Fatalf("%+v cut at %d of %d: %v", o, n, len(made), err)
				}
			}
			for bit := range 8 * min(len(made), 400) {
				made[bit/8] ^= 1 << (bit % 8)
				if err := Decode(got[:len(src):len(src)], made); err != nil && !errors.Is(err, errs.ErrCorrupt) {
					t.Fatalf("%+v bit %d: %v", o, bit, err)
				}
				made[bit/8] ^= 1 << (bit % 8)
			}
			if !bytes.Equal(got[len(src):], make([]byte, 8)) {
				t.Fatal("written past the end")
			}
		}
	}
}

// FuzzDecode decodes arbitrary bytes, and encodes and decodes them as content.
func FuzzDecode(f *testing.F) {
	for typ := Char; typ <= ULongLong; typ++ {
		for _, src := range contents(200, typ.Size()) {
			made, _ := Encode(nil, src, Default(typ))
			f.Add(made)
		}
	}
	f.Fuzz(func(t *testing.T, src []byte) {
		n, err := Size(src)
		if err != nil && !errors.Is(err, errs.ErrCorrupt) {
			t.Fatal(err)
		}
		if err == nil && n < 1<<22 {
			if err := Decode(make([]byte, n), src); err != nil && !errors.Is(err, errs.ErrCorrupt) {
				t.Fatal(err)
			}
		}
		if len(src) < 4 {
			return
		}
		o := Options{Type(src[0] % 8), int(src[1] % 4), int(src[2] % 4), src[3]%2 > 0}
		src = src[:len(src)&^7]
		made, err := Encode(nil, src, o)
		if err != nil {
			t.Fatal(err)
		}
		got := make([]byte, len(src))
		if err := Decode(got, made); err != nil || !bytes.Equal(got, src) {
			t.Fatalf("%+v: round trip: %v", o, err)
		}
	})
}
