package tensorizer

// This file encrypts and decrypts one box.

import (
	"crypto/subtle"
	"sync"

	//lint:ignore SA1019 the format's own authenticator, with a separate key for each box
	"golang.org/x/crypto/poly1305"
	//lint:ignore SA1019 the format's own cipher
	"golang.org/x/crypto/salsa20/salsa"

	"github.com/overwire/overwire/gosrc/internal/sodium"
)

// A box is libsodium's secretbox with a separate MAC: XSalsa20-Poly1305. If libsodium is installed, it encrypts and
// decrypts boxes, three times as fast as the fallback, x/crypto. (tensorizer itself requires libsodium.) The fallback
// uses the two primitives in place, because x/crypto's secretbox needs a second buffer.

// cipher encrypts and decrypts boxes.
type cipher struct {
	name string
	seal func(p []byte, nonce *[nonceBytes]byte, key *[keyBytes]byte) [macBytes]byte
	open func(p []byte, mac *[macBytes]byte, nonce *[nonceBytes]byte, key *[keyBytes]byte) bool
}

var boxes = sync.OnceValue(func() cipher {
	if version := sodium.Version(); version != "" {
		return cipher{"libsodium " + version, sodium.Seal, sodium.Open}
	}
	return cipher{"golang.org/x/crypto; installing libsodium makes this three times as fast", sealBox, openBox}
})

// Cipher returns the name of the library that encrypts and decrypts.
func Cipher() string { return boxes().name }

// keystream is the key stream of a box. Its first 32 bytes are the authentication key; the rest encrypts the data.
type keystream struct {
	key     [32]byte
	counter [16]byte // nonce and block number
	first   [64]byte
}

func newKeystream(nonce *[nonceBytes]byte, key *[keyBytes]byte) *keystream {
	var k keystream
	salsa.HSalsa20(&k.key, (*[16]byte)(nonce[:16]), key, &salsa.Sigma)
	copy(k.counter[:8], nonce[16:])
	salsa.XORKeyStream(k.first[:], k.first[:], &k.counter, &k.key)
	return &k
}

// xorStream encrypts or decrypts p in place.
func (k *keystream) xorStream(p []byte) {
	n := subtle.XORBytes(p, p, k.first[32:])
	counter := k.counter
	counter[8] = 1
	salsa.XORKeyStream(p[n:], p[n:], &counter, &k.key)
}

func (k *keystream) authKey() *[32]byte { return (*[32]byte)(k.first[:32]) }

// sealBox encrypts p in place and returns the MAC.
func sealBox(p []byte, nonce *[nonceBytes]byte, key *[keyBytes]byte) (mac [macBytes]byte) {
	k := newKeystream(nonce, key)
	k.xorStream(p)
	poly1305.Sum(&mac, p, k.authKey())
	return mac
}

// openBox decrypts p in place if the MAC matches, and reports whether it does.
func openBox(p []byte, mac *[macBytes]byte, nonce *[nonceBytes]byte, key *[keyBytes]byte) bool {
	k := newKeystream(nonce, key)
	if !poly1305.Verify(mac, p, k.authKey()) {
		return false
	}
	k.xorStream(p)
	return true
}
