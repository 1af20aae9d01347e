package tensors

import (
	"bytes"
	"math/rand/v2"
	"testing"
	"time"

	"golang.org/x/crypto/nacl/secretbox"
	//lint:ignore SA1019 the twin
	"golang.org/x/crypto/poly1305"
	//lint:ignore SA1019 the twin
	"golang.org/x/crypto/salsa20/salsa"
)

// Boxes of any size are those of x/crypto's secretbox, and are opened again; a
// changed bit anywhere, or another MAC, nonce or key, is seen.
func TestBoxes(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	sizes := []int{1, 31, 32, 33, 63, 64, 65, 1023, 1024, 1055, 1056, 1057, 5000, 2*stretch - 1, 2 * stretch, 2*stretch + 1, 3 * stretch, 3*stretch + 32, 1 << 17}
	for range 60 {
		sizes = append(sizes, 1+r.IntN(9000), 1+r.IntN(6*stretch))
	}
	for _, n := range sizes {
		var key [keyBytes]byte
		var nonce [nonceBytes]byte
		plain := make([]byte, n)
		for _, b := range [][]byte{key[:], nonce[:], plain} {
			for i := range b {
				b[i] = byte(r.Uint32())
			}
		}
		want := secretbox.Seal(nil, plain, &nonce, &key)
		got := bytes.Clone(plain)
		mac := sealBox(got, &nonce, &key)
		if !bytes.Equal(mac[:], want[:macBytes]) || !bytes.Equal(got, want[macBytes:]) {
			t.Fatalf("%d bytes differ from secretbox", n)
		}
		bad := bytes.Clone(got)
		bad[r.IntN(n)] ^= 1 << r.IntN(8)
		badMAC, badNonce, badKey := mac, nonce, key
		badMAC[r.IntN(16)] ^= 1
		badNonce[r.IntN(24)] ^= 1
		badKey[r.IntN(32)] ^= 1
		if openBox(bad, &mac, &nonce, &key) || openBox(bytes.Clone(got), &badMAC, &nonce, &key) ||
			openBox(bytes.Clone(got), &mac, &badNonce, &key) || openBox(bytes.Clone(got), &mac, &nonce, &badKey) {
			t.Fatalf("%d bytes: a change was not seen", n)
		}
		if !openBox(got, &mac, &nonce, &key) || !bytes.Equal(got, plain) {
			t.Fatalf("%d bytes were not opened", n)
		}
	}
}

// The number of a block goes on where its low half ends.
func TestCounter(t *testing.T) {
	var key [32]byte
	for _, first := range []uint64{1<<32 - 40, 1<<32 - 16, 1<<32 - 17, 1<<40 + 3} {
		k := keystream{key: key}
		le.PutUint64(k.counter[8:], first)
		a, b := make([]byte, 8192), make([]byte, 8192)
		done := xorGroups(a, &k.counter, &k.key)
		le.PutUint64(k.counter[8:], first)
		salsa.XORKeyStream(b, b, &k.counter, &k.key)
		if !bytes.Equal(a[:done], b[:done]) {
			t.Errorf("from block %d", first)
		}
	}
}

// Authenticators are x/crypto's, for any split of any message, numbers at the
// edge of the modulus included.
func TestPoly(t *testing.T) {
	if !wide {
		t.Skip("this CPU sums up one block after the other")
	}
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	for i := range 3000 {
		var key [32]byte
		p := make([]byte, r.IntN(1500))
		fill := func(b []byte) {
			kind := r.IntN(4)
			for i := range b {
				b[i] = [4]byte{0, 0xff, 0xfb, byte(r.Uint32())}[kind]
			}
		}
		fill(key[:16])
		fill(key[16:])
		fill(p)
		if i%3 == 0 { // r = 1, 2, ...: the sum of blocks, near 2^130
			clear(key[:16])
			key[0] = byte(1 + r.IntN(5))
		}
		var want [16]byte
		poly1305.Sum(&want, p, &key)
		sum, rest := newPoly(&key), p
		for r.IntN(3) > 0 && len(rest) >= polyGroup {
			n := (1 + r.IntN(len(rest)/polyGroup)) * polyGroup
			sum.groups(rest[:n])
			rest = rest[n:]
		}
		if got := sum.sum(rest); got != want {
			t.Fatalf("%x of key %x: %x, not %x", p, key, got, want)
		}
	}
}

func BenchmarkOpen(b *testing.B) {
	p := make([]byte, ChunkBytes)
	var key [keyBytes]byte
	var nonce [nonceBytes]byte
	mac := sealBox(p, &nonce, &key)
	sealed := bytes.Clone(p)
	b.Run("own", func(b *testing.B) {
		b.SetBytes(int64(len(p)))
		for b.Loop() {
			copy(p, sealed)
			if !openBox(p, &mac, &nonce, &key) {
				b.Fatal("not opened")
			}
		}
	})
	whole := append(mac[:], sealed...)
	b.Run("secretbox", func(b *testing.B) {
		b.SetBytes(int64(len(p)))
		for b.Loop() {
			if _, ok := secretbox.Open(p[:0], whole, &nonce, &key); !ok {
				b.Fatal("not opened")
			}
		}
	})
}
