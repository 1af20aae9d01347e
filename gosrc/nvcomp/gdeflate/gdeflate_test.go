package gdeflate

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/overwire/overwire/gosrc/errs"
)

// contents returns several kinds of content of n bytes.
func contents(n int) map[string][]byte {
	r := rand.New(rand.NewPCG(1, uint64(n)))
	noise, text, skewed, ramp := make([]byte, n), make([]byte, 0, n+64), make([]byte, n), make([]byte, n)
	for i := range noise {
		noise[i] = byte(r.Uint32())
		skewed[i] = byte(min(255, int(r.ExpFloat64()*9)))
		ramp[i] = byte(i / 7 % 251)
	}
	for len(text) < n {
		if len(text) > 100 && r.IntN(3) > 0 {
			at := r.IntN(len(text) - 40)
			text = append(text, text[at:at+3+r.IntN(37)]...)
		} else {
			for range 1 + r.IntN(20) {
				text = append(text, byte(r.IntN(64)))
			}
		}
	}
	return map[string][]byte{
		"zeros": make([]byte, n), "noise": noise, "text": text[:n:n], "skewed": skewed, "ramp": ramp,
		"mixed": append(append(make([]byte, 0, n), noise[:n/2]...), text[:n-n/2]...),
	}
}

// Every content round-trips at every level. No stream exceeds its bound or MaxRatio.
func TestRoundTrip(t *testing.T) {
	for _, n := range []int{0, 1, 2, 3, 7, 31, 32, 33, 1000, 65535, 65537, 140_000} {
		for name, src := range contents(n) {
			for level := range efforts {
				if level == 3 || n > 100_000 && level != 1 {
					continue // level 3 equals level 2
				}
				made, err := Encode([]byte("front"), src, level)
				if err != nil {
					t.Fatal(err)
				}
				made = made[5:]
				if len(made) > Bound(n) || int64(n) > int64(len(made))*MaxRatio {
					t.Errorf("%s of %d, level %d: %d bytes", name, n, level, len(made))
				}
				if size, err := Size(made); err != nil || size != int64(n) {
					t.Fatalf("%s of %d, level %d: size %d, %v", name, n, level, size, err)
				}
				got := make([]byte, n)
				if err := Decode(got, made); err != nil || !bytes.Equal(got, src) {
					t.Fatalf("%s of %d, level %d: %v", name, n, level, err)
				}
				if err := Decode(make([]byte, n+1), made); !errors.Is(err, errs.ErrCorrupt) {
					t.Errorf("%s of %d into a longer destination: %v", name, n, err)
				}
				if n > 0 {
					if err := Decode(make([]byte, n-1), made); !errors.Is(err, errs.ErrCorrupt) {
						t.Errorf("%s of %d into a shorter destination: %v", name, n, err)
					}
				}
			}
		}
	}
	if _, err := Encode(nil, nil, 6); !errors.Is(err, errs.ErrArgument) {
		t.Errorf("level 6: %v", err)
	}
}

// golden returns the content of a stream in testdata.
func golden(kind string, n int) []byte {
	out := make([]byte, 0, n+32)
	for x := uint32(12345); len(out) < n; {
		switch kind {
		case "ramp":
			out = append(out, byte(len(out)/7%251))
		case "zeros":
			out = append(out, 0)
		default:
			x = (x*1103515245 + 12345) & 0x7FFFFFFF
			if k := int(x >> 8); len(out) > 100 && k%3 > 0 {
				at := (k >> 4) % (len(out) - 40)
				out = append(out, out[at:at+3+(k>>20)%30]...)
			} else {
				out = append(out, byte((k>>3)%64))
			}
		}
	}
	return out[:n]
}

// Streams written by NVIDIA's libdeflate (branch gdeflate, MIT, in the crate gdeflate-sys 0.4.1) can be decoded. Each
// is one page of stored, fixed or dynamic blocks. File names contain the kind of content, its size and the level.
func TestStreamsOfLibdeflate(t *testing.T) {
	files, err := filepath.Glob("testdata/*.bin")
	if err != nil || len(files) != 6 {
		t.Fatalf("%d golden streams, %v", len(files), err)
	}
	for _, file := range files {
		var n, level int
		kind, rest, _ := strings.Cut(filepath.Base(file), "-")
		if _, err := fmt.Sscanf(rest, "%d-%d.bin", &n, &level); err != nil {
			t.Fatal(err)
		}
		src, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		got := make([]byte, n)
		if err := Decode(got, src); err != nil || !bytes.Equal(got, golden(kind, n)) {
			t.Errorf("%s: %v", file, err)
		}
		if size, err := Size(src); err != nil || size != int64(n) {
			t.Errorf("%s: size %d, %v", file, size, err)
		}
	}
}

// If the content has matches, each higher level gives a shorter stream.
func TestLevels(t *testing.T) {
	src := contents(65536)["text"]
	last := len(src)
	for _, level := range []int{0, 1, 2, 4, 5} {
		made, _ := Encode(nil, src, level)
		if len(made) >= last {
			t.Errorf("level %d: %d bytes, but the level before had %d", level, len(made), last)
		}
		last = len(made)
	}
}

// Codes obey the length limit for any frequencies and can be decoded.
func TestLongCodes(t *testing.T) {
	freq := make([]uint32, 40)
	a, b := uint32(1), uint32(1)
	for i := range freq {
		freq[i] = a
		a, b = b, a+b
	}
	for _, limit := range []int{7, maxBits} {
		c := codeFor(freq, limit)
		var d table
		if err := d.buildFrom(c.length); err != nil {
			t.Fatal(err)
		}
		for s, n := range c.length {
			if n == 0 || int(n) > limit {
				t.Fatalf("symbol %d has %d bits", s, n)
			}
			if got, bits := d.decodeSymbol(uint64(c.bits[s]) | 0xABCD<<n); got != s || bits != int(n) {
				t.Fatalf("symbol %d of %d bits decodes to %d of %d", s, n, got, bits)
			}
		}
	}
}

// Truncated streams are refused. A flipped bit never causes a write past the end.
func TestDamage(t *testing.T) {
	src := contents(900)["text"]
	for level := range 2 {
		made, _ := Encode(nil, src, level)
		got := make([]byte, len(src)+8)
		for n := range made {
			if err := Decode(got[:len(src)], made[:n]); !errors.Is(err, errs.ErrCorrupt) {
				t.Fatalf("cut at %d of %d: %v", n, len(made), err)
			}
		}
		for bit := range 8 * len(made) {
			made[bit/8] ^= 1 << (bit % 8)
			if err := Decode(got[:len(src):len(src)], made); err != nil && !errors.Is(err, errs.ErrCorrupt) {
				t.Fatalf("bit %d: %v", bit, err)
			}
			made[bit/8] ^= 1 << (bit % 8)
		}
		if !bytes.Equal(got[len(src):], make([]byte, 8)) {
			t.Fatal("written past the end")
		}
	}
}

// FuzzDecode decodes arbitrary bytes, and encodes and decodes them as content.
func FuzzDecode(f *testing.F) {
	for _, src := range contents(500) {
		for level := range 3 {
			made, _ := Encode(nil, src, level)
			f.Add(made)
		}
	}
	f.Fuzz(func(t *testing.T, src []byte) {
		n, err := Size(src)
		if err != nil && !errors.Is(err, errs.ErrCorrupt) {
			t.Fatal(err)
		}
		if err == nil && n < 1<<22 {
			if err := Decode(make([]byte, n), src); err != nil {
				t.Fatalf("Size returns %d, but Decode fails: %v", n, err)
			}
		}
		made, err := Encode(nil, src, len(src)%6)
		if err != nil {
			t.Fatal(err)
		}
		got := make([]byte, len(src))
		if err := Decode(got, made); err != nil || !bytes.Equal(got, src) {
			t.Fatalf("round trip: %v", err)
		}
	})
}
