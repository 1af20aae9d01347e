package tensors

import (
	"crypto/subtle"

	//lint:ignore SA1019 the format's own authenticator, with a key for each box
	"golang.org/x/crypto/poly1305"
	//lint:ignore SA1019 the format's own cipher
	"golang.org/x/crypto/salsa20/salsa"
)

// A box is libsodium's secretbox: XSalsa20-Poly1305, the MAC apart. It is put
// together here from x/crypto's parts, because that lets boxes be opened in
// place, and both parts be made many blocks at a time (Bernstein's Salsa20 and
// Poly1305; the latter is RFC 8439, 2.5).

// keystream is a box's: its first 32 bytes are the authenticator's key.
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

// head crypts the front of p in place, which begins behind the authenticator's
// key, and returns how many bytes that were: blocks follow.
func (k *keystream) head(p []byte) int {
	le.PutUint64(k.counter[8:], 1)
	return subtle.XORBytes(p, p, k.first[32:])
}

// blocks crypts p in place, which begins with the block that counter has, and
// counts on. Only the last call may have a part of a block.
func (k *keystream) blocks(p []byte) {
	n := k.next() + uint64(len(p)+63)/64
	if done := xorGroups(p, &k.counter, &k.key); done > 0 {
		p = p[done:]
		le.PutUint64(k.counter[8:], k.next()+uint64(done)/64)
	}
	if len(p) > 0 {
		salsa.XORKeyStream(p, p, &k.counter, &k.key)
	}
	le.PutUint64(k.counter[8:], n)
}

func (k *keystream) next() uint64 { return le.Uint64(k.counter[8:]) }

// group is how many bytes are crypted at once: sixteen blocks.
const group = 16 * 64

// xorGroups crypts whole groups at the front of p with Salsa20/20 and returns
// how many bytes that were; counter has the number of the first block.
func xorGroups(p []byte, counter *[16]byte, key *[32]byte) int {
	at := le.Uint64(counter[8:])
	n := len(p) / group
	if left := (1<<32 - at&(1<<32-1)) / 16; uint64(n) > left {
		n = int(left) // the high half is one for all lanes
	}
	if !wide || n == 0 {
		return 0
	}
	var words [16]uint32
	for i, c := range [4]uint32{0x61707865, 0x3320646e, 0x79622d32, 0x6b206574} {
		words[5*i] = c
	}
	for i := range 4 {
		words[1+i] = le.Uint32(key[4*i:])
		words[11+i] = le.Uint32(key[16+4*i:])
		words[6+i] = le.Uint32(counter[4*i:])
	}
	salsa16(&p[0], n, &words)
	return n * group
}

func (k *keystream) authKey() *[32]byte { return (*[32]byte)(k.first[:32]) }

// stretch is what is crypted and summed up before the next is looked at: it
// stays in a core's first cache. Whole groups of either.
const stretch = 16 << 10

// sealBox encrypts p in place and returns the MAC.
func sealBox(p []byte, nonce *[nonceBytes]byte, key *[keyBytes]byte) (mac [macBytes]byte) {
	k := newKeystream(nonce, key)
	if !wide || len(p) < 2*stretch {
		k.blocks(p[k.head(p):])
		poly1305.Sum(&mac, p, k.authKey())
		return mac
	}
	sum := newPoly(k.authKey())
	crypted := k.head(p)
	for ; len(p)-crypted > stretch; p = p[stretch:] {
		k.blocks(p[crypted : crypted+stretch])
		sum.groups(p[:stretch])
	}
	k.blocks(p[crypted:])
	return sum.sum(p)
}

// openBox decrypts p in place and says whether the MAC is that of its bytes. If
// not, p is of no use.
func openBox(p []byte, mac *[macBytes]byte, nonce *[nonceBytes]byte, key *[keyBytes]byte) bool {
	k := newKeystream(nonce, key)
	if !wide || len(p) < 2*stretch {
		if !poly1305.Verify(mac, p, k.authKey()) {
			return false
		}
		k.blocks(p[k.head(p):])
		return true
	}
	sum := newPoly(k.authKey())
	sum.groups(p[:stretch])
	done := k.head(p)
	for ; len(p) > 2*stretch; p = p[stretch:] { // the sum is a stretch ahead
		sum.groups(p[stretch : 2*stretch])
		k.blocks(p[done : done+stretch])
	}
	is := sum.sum(p[stretch:])
	k.blocks(p[done:])
	return subtle.ConstantTimeCompare(is[:], mac[:]) == 1
}
