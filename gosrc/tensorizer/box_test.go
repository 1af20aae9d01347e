package tensorizer

import (
	"bytes"
	"math/rand/v2"
	"testing"
	"time"

	"golang.org/x/crypto/nacl/secretbox"
)

// Boxes of any size equal those of x/crypto's secretbox and can be opened. Both ciphers detect a flipped bit and a
// wrong MAC, nonce or key.
func TestBoxes(t *testing.T) {
	for _, c := range []cipher{{"x/crypto", sealBox, openBox}, boxes()} {
		t.Run(c.name, func(t *testing.T) { testBoxes(t, c) })
	}
}

func testBoxes(t *testing.T, c cipher) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	sizes := []int{1, 31, 32, 33, 63, 64, 65, 1023, 1024, 1055, 1056, 1057, 5000, 1 << 15, 1<<15 + 1, 1<<16 + 32,
		1 << 17}
	for range 60 {
		sizes = append(sizes, 1+r.IntN(9000), 1+r.IntN(100_000))
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
		mac := c.seal(got, &nonce, &key)
		if !bytes.Equal(mac[:], want[:macBytes]) || !bytes.Equal(got, want[macBytes:]) {
			t.Fatalf("%d bytes differ from secretbox", n)
		}
		bad := bytes.Clone(got)
		bad[r.IntN(n)] ^= 1 << r.IntN(8)
		badMAC, badNonce, badKey := mac, nonce, key
		badMAC[r.IntN(16)] ^= 1
		badNonce[r.IntN(24)] ^= 1
		badKey[r.IntN(32)] ^= 1
		if c.open(bad, &mac, &nonce, &key) || c.open(bytes.Clone(got), &badMAC, &nonce, &key) ||
			c.open(bytes.Clone(got), &mac, &badNonce, &key) || c.open(bytes.Clone(got), &mac, &nonce, &badKey) {
			t.Fatalf("%d bytes: a change was not detected", n)
		}
		if !c.open(got, &mac, &nonce, &key) || !bytes.Equal(got, plain) {
			t.Fatalf("%d bytes were not opened", n)
		}
	}
}

func BenchmarkOpen(b *testing.B) {
	p := make([]byte, ChunkBytes)
	var key [keyBytes]byte
	var nonce [nonceBytes]byte
	mac := sealBox(p, &nonce, &key)
	sealed := bytes.Clone(p)
	for _, c := range []cipher{{"x/crypto", sealBox, openBox}, boxes()} {
		b.Run(c.name, func(b *testing.B) {
			b.SetBytes(int64(len(p)))
			for b.Loop() {
				copy(p, sealed)
				if !c.open(p, &mac, &nonce, &key) {
					b.Fatal("not opened")
				}
			}
		})
	}
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
