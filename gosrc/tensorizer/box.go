package tensorizer

// This file seals and opens one box.

import (
	"crypto/subtle"

	//lint:ignore SA1019 the format's own authenticator, with a key for each box
	"golang.org/x/crypto/poly1305"
	//lint:ignore SA1019 the format's own cipher
	"golang.org/x/crypto/salsa20/salsa"
)

// A box is libsodium's secretbox with the MAC apart: XSalsa20-Poly1305. x/crypto's
// own secretbox needs a second buffer of the box's size; its two parts, used here,
// work in place.

// keystream is a box's: its first 32 bytes are the authenticator's key, and the
// data begin behind them.
type keystream struct {
	key     [32]byte
	counter [16]byte // nonce, number of the block
	first   [64]byte
}

func newKeystream(nonce *[nonceBytes]byte, key *[keyBytes]byte) *keystream {
	var k keystream
	salsa.HSalsa20(&k.key, (*[16]byte)(nonce[:16]), key, &salsa.Sigma)
	copy(k.counter[:8], nonce[16:])
	salsa.XORKeyStream(k.first[:], k.first[:], &k.counter, &k.key)
	return &k
}

// xor encrypts p in place, or decrypts it.
func (k *keystream) xor(p []byte) {
	n := subtle.XORBytes(p, p, k.first[32:])
	counter := k.counter
	counter[8] = 1
	salsa.XORKeyStream(p[n:], p[n:], &counter, &k.key)
}

func (k *keystream) authKey() *[32]byte { return (*[32]byte)(k.first[:32]) }

// sealBox encrypts p in place and returns the MAC.
func sealBox(p []byte, nonce *[nonceBytes]byte, key *[keyBytes]byte) (mac [macBytes]byte) {
	k := newKeystream(nonce, key)
	k.xor(p)
	poly1305.Sum(&mac, p, k.authKey())
	return mac
}

// openBox decrypts p in place if the MAC is that of its bytes, and says whether
// it is.
func openBox(p []byte, mac *[macBytes]byte, nonce *[nonceBytes]byte, key *[keyBytes]byte) bool {
	k := newKeystream(nonce, key)
	if !poly1305.Verify(mac, p, k.authKey()) {
		return false
	}
	k.xor(p)
	return true
}
