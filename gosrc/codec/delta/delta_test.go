package delta

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"math/bits"
	"math/rand/v2"
	"testing"

	"github.com/overwire/overwire/gosrc/errs"
)

// change returns two chunks of n bytes, now and base. They differ in about the given share of the elements: by 1 up or
// down, or in any way if anyhow is true.
func change(r *rand.Rand, n, width int, share float64, anyhow bool) (now, base []byte) {
	base = make([]byte, n)
	for i := range base {
		base[i] = byte(r.Uint32())
	}
	now = bytes.Clone(base)
	lg := bits.TrailingZeros(uint(width))
	for i := range n / width {
		if r.Float64() >= share {
			continue
		}
		v := loadElement(now, i, lg)
		if anyhow {
			v = r.Uint64()
		} else {
			v += 2*r.Uint64N(2) - 1
		}
		for k := range width {
			now[i*width+k] = byte(v >> (8 * k))
		}
	}
	return now, base
}

// slow decodes a chunk bit by bit, following docs/format.md. It returns false for an invalid chunk.
func slow(dst, src []byte, width int) (ok bool) {
	defer func() {
		if recover() != nil {
			ok = false // the chunk was too short
		}
	}()
	lg, n := bits.TrailingZeros(uint(width)), len(dst)
	if src[0] == 1 {
		for i := range dst {
			dst[i] ^= src[16+i]
		}
		return len(src) == 16+(n+3)/4*4 && isZero(src[1:16]) && isZero(src[16+n:])
	}
	k, s := int(src[1]), int(src[2])
	if src[0] != 0 || k > 24 || s > 9 || src[3] != 0 || len(src)%4 != 0 {
		return false
	}
	var length [24]int
	kinds, sum := 0, 0
	for i := range length {
		length[i] = int(src[4+i/2]) >> (i % 2 * 4) & 15
		if length[i] > 8 {
			return false
		}
		if length[i] > 0 {
			kinds++
			sum += 256 >> length[i]
		}
	}
	if sum != 256 && !(kinds == 1 && sum == 128) {
		return false
	}
	elements := n / width
	run := 512 << s / width
	runs := (elements + run - 1) / run
	body := 16 + (2*runs+3)/4*4
	pos := 8 * body
	bit := func() uint64 {
		b := src[pos/8] >> (pos % 8) & 1
		pos++
		return uint64(b)
	}
	take := func(n int) (v uint64) {
		for i := range n {
			v |= bit() << i
		}
		return v
	}
	for r := range runs {
		end := pos + int(src[16+2*r]) + int(src[17+2*r])<<8
		at := r * run
		for pos < end {
			q := 0
			for bit() == 0 {
				q++
			}
			at += q<<k + int(take(k))
			// This is a canonical code: ordered by length, then by number.
			class, code, first := -1, 0, 0
			for l := 1; l <= 8 && class < 0; l++ {
				code = code<<1 | int(bit())
				first <<= 1
				for i := range length {
					if length[i] != l {
						continue
					}
					if code == first {
						class = i
					}
					first++
				}
			}
			var x uint64
			switch {
			case class < 0:
				return false
			case class < 8:
				x = 1<<(class+1) - 1
			case width <= 2:
				x = take(class-8) | 1<<(class-8)
			case width == 4:
				x = take(2 * (class - 7))
			default:
				x = take(4 * (class - 7))
			}
			if again, _ := classOf(x, lg); x == 0 || again != class || at >= min(elements, (r+1)*run) || pos > end ||
				width == 1 && x > 0xff {
				return false
			}
			for b := range width {
				dst[at*width+b] ^= byte(x >> (8 * b))
			}
			at++
		}
	}
	return pos > 8*body && (pos+31)/32*4 == len(src) && isZero(src[16+2*runs:body]) &&
		(pos%8 == 0 || src[pos/8]>>(pos%8) == 0) && isZero(src[(pos+7)/8:])
}

// TestRoundTrip checks that a delta turns base into now and now into base, that the bit-by-bit decoder agrees, and
// that encoding is deterministic.
func TestRoundTrip(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 1))
	for _, width := range []int{1, 2, 4, 8} {
		for _, n := range []int{8, 16, 504, 512, 520, 4096, 100_000, 256 << 10} {
			for _, share := range []float64{0, 0.0001, 0.01, 0.045, 0.5, 1} {
				for _, anyhow := range []bool{false, true} {
					now, base := change(r, n, width, share, anyhow)
					p, err := Encode(nil, now, base, width)
					if err != nil {
						t.Fatal(err)
					}
					if (len(p) == 0) != bytes.Equal(now, base) || len(p) > Room(n) || len(p)%4 != 0 {
						t.Fatalf("width %d, %d bytes, share %v: %d stored", width, n, share, len(p))
					}
					if len(p) == 0 {
						continue
					}
					if err := Check(p, n, width); err != nil {
						t.Fatalf("width %d, %d bytes, share %v: %v", width, n, share, err)
					}
					x, y := bytes.Clone(base), bytes.Clone(base)
					if err := Apply(x, p, width); err != nil || !bytes.Equal(x, now) {
						t.Fatalf("width %d, %d bytes, share %v: wrong bytes, %v", width, n, share, err)
					}
					if !slow(y, p, width) || !bytes.Equal(y, now) {
						t.Fatalf("width %d, %d bytes, share %v: the slow decoder differs", width, n, share)
					}
					if err := Apply(x, p, width); err != nil || !bytes.Equal(x, base) {
						t.Fatal("applying the delta twice does not restore the base")
					}
					if again, _ := Encode([]byte{7}, now, base, width); !bytes.Equal(again[1:], p) {
						t.Fatal("the second delta of the same chunks differs")
					}
				}
			}
		}
	}
}

// TestSize checks the size of deltas of bf16 values that change by one step.
func TestSize(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 1))
	for share, most := range map[float64]float64{0.001: 0.0012, 0.01: 0.008, 0.045: 0.03} {
		now, base := change(r, 256<<10, 2, share, false)
		p, err := Encode(nil, now, base, 2)
		if err != nil {
			t.Fatal(err)
		}
		got := float64(len(p)) / float64(len(now))
		t.Logf("share %v: %.5f of the bytes", share, got)
		if got > most {
			t.Errorf("share %v: %.5f of the bytes, want at most %v", share, got, most)
		}
	}
}

// TestGolden checks that the bytes of a delta do not change between versions.
func TestGolden(t *testing.T) {
	h := sha256.New()
	r := rand.New(rand.NewPCG(5, 1))
	for _, width := range []int{1, 2, 4, 8} {
		for _, share := range []float64{0.0003, 0.02, 0.7} {
			for _, anyhow := range []bool{false, true} {
				now, base := change(r, 65_536+1000, width, share, anyhow)
				p, err := Encode(nil, now, base, width)
				if err != nil {
					t.Fatal(err)
				}
				h.Write(p)
			}
		}
	}
	const want = "5c09ec2ed5a791dd499688893f99442ea886b57357926a00fa7c6e6fc89a913d"
	if got := hex.EncodeToString(h.Sum(nil)); got != want {
		t.Errorf("the deltas have the hash %s, want %s", got, want)
	}
	small, err := Encode(nil, []byte{1, 0, 2, 0, 3, 0, 4, 0x80}, []byte{1, 0, 3, 0, 3, 0, 4, 0}, 2)
	if got := hex.EncodeToString(small); err != nil || got != "010000000000000000000000000000000000010000000080" {
		t.Errorf("a small delta is %s: %v", got, err)
	}
}

// TestRefused checks that invalid widths and lengths are argument errors, and that changed headers are refused or
// decode like the slow decoder.
func TestRefused(t *testing.T) {
	if _, err := Encode(nil, make([]byte, 9), make([]byte, 9), 2); err == nil {
		t.Error("half an element was accepted")
	}
	if _, err := Encode(nil, make([]byte, 9), make([]byte, 8), 1); err == nil {
		t.Error("chunks of different lengths were accepted")
	}
	if _, err := Encode(nil, make([]byte, 9), make([]byte, 9), 3); err == nil {
		t.Error("elements of 3 bytes were accepted")
	}
	r := rand.New(rand.NewPCG(6, 1))
	now, base := change(r, 8192, 2, 0.02, false)
	p, _ := Encode(nil, now, base, 2)
	for at := range 20 {
		for bit := range 8 {
			q := bytes.Clone(p)
			q[at] ^= 1 << bit
			x, y := bytes.Clone(base), bytes.Clone(base)
			err := Check(q, len(now), 2)
			if ok := slow(y, q, 2); ok != (err == nil) {
				t.Errorf("byte %d bit %d: Check says %v, the slow decoder %v", at, bit, err, ok)
			}
			if err == nil && (Apply(x, q, 2) != nil || !bytes.Equal(x, y)) {
				t.Errorf("byte %d bit %d: Apply and the slow decoder give different bytes", at, bit)
			}
		}
	}
	for _, n := range []int{0, 3, 15, 17, len(p) - 4, len(p) - 1} {
		if Check(p[:n], len(now), 2) == nil {
			t.Errorf("%d bytes of a delta were accepted", n)
		}
	}
}

// FuzzCheck checks that Check and the slow decoder accept the same chunks, and that Apply and the slow decoder then
// give the same bytes.
func FuzzCheck(f *testing.F) {
	r := rand.New(rand.NewPCG(7, 1))
	for _, width := range []int{1, 2, 4, 8} {
		now, base := change(r, 2048, width, 0.03, width == 4)
		p, _ := Encode(nil, now, base, width)
		f.Add(p, 2048, uint8(width))
	}
	f.Fuzz(func(t *testing.T, p []byte, n int, w uint8) {
		width := 1 << (w & 3)
		if n < 0 || n > 1<<16 || n%width != 0 || len(p) == 0 || n == 0 {
			return
		}
		x, y := make([]byte, n), make([]byte, n)
		ok, err := slow(y, p, width), Check(p, n, width)
		if ok != (err == nil) {
			t.Fatalf("the slow decoder returns %v, Check %v", ok, err)
		}
		if a := Apply(x, p, width); (a == nil) != ok || ok && !bytes.Equal(x, y) {
			t.Fatalf("Apply returns %v, or different bytes", a)
		}
	})
}

// FuzzEncode checks that the delta of any two chunks round-trips.
func FuzzEncode(f *testing.F) {
	f.Add([]byte("some bytes and some more"), []byte("some bytes and some less"), uint8(1))
	f.Fuzz(func(t *testing.T, now, base []byte, w uint8) {
		width := 1 << (w & 3)
		n := min(len(now), len(base)) / width * width
		now, base = now[:n], bytes.Clone(base[:n])
		p, err := Encode(nil, now, base, width)
		if err != nil {
			t.Fatal(err)
		}
		if len(p) == 0 {
			if !bytes.Equal(now, base) {
				t.Fatal("a change was lost")
			}
			return
		}
		if err := Apply(base, p, width); err != nil || !bytes.Equal(now, base) {
			t.Fatalf("Apply gives wrong bytes: %v", err)
		}
	})
}

func BenchmarkEncode(b *testing.B) {
	now, base := change(rand.New(rand.NewPCG(8, 1)), 256<<10, 2, 0.01, false)
	b.SetBytes(int64(len(now)))
	p := make([]byte, 0, Room(len(now)))
	for b.Loop() {
		p, _ = Encode(p[:0], now, base, 2)
	}
}

func BenchmarkApply(b *testing.B) {
	now, base := change(rand.New(rand.NewPCG(8, 1)), 256<<10, 2, 0.01, false)
	p, _ := Encode(nil, now, base, 2)
	b.SetBytes(int64(len(now)))
	for b.Loop() {
		if err := Apply(base, p, 2); err != nil {
			b.Fatal(err)
		}
	}
}

// An XOR that is wider than its element is refused, because it would change the next element.
func TestTooWide(t *testing.T) {
	base := make([]byte, 1024)
	now := bytes.Clone(base)
	now[10], now[11] = 1, 0x80
	p, err := Encode(nil, now, base, 2)
	if err != nil {
		t.Fatal(err)
	}
	if err := Check(p, len(base), 2); err != nil {
		t.Fatal(err)
	}
	if err := Check(p, len(base), 1); !errors.Is(err, errs.ErrCorrupt) {
		t.Fatalf("an XOR of 16 bits for bytes: %v", err)
	}
}
