package digest

// Computes keyed digests. A process uses them to recognise tensors that it has seen before, even if someone who can
// choose the tensors wants it to mistake one for another.
//
// The key has 18 random words. A tensor is padded with zeros to whole tiles of 512 words. Row r = 32*tile + lane of the
// tensor has the 16 words at 64*k + 2*lane and the next position of the tile, for k from 0 to 7. With lo and hi for the
// halves of a product of 128 bits, and mix and A as for other digests:
//
//	x, y    the sums over k of lo and hi of (w[2k] + key[2k]) * (w[2k+1] + key[2k+1])
//	a, b    the sums over r of lo and hi of (x + mix(key[16] + r*A)) * (y + mix(key[17] + r*A))
//
// The digest follows from a and b as for other digests. These are two levels of the hash NH of UMAC (RFC 4418), with
// words of 64 bits. If the words of the key and the results of mix are random, two tensors of one size that were chosen
// without the key have the same digest with a probability of at most 2^-62: 2^-63 for the rows, and as much for their
// sum.

import (
	"crypto/rand"
	"encoding/binary"
	"math/bits"
	"sync"
	"unsafe"
)

const (
	rowPairs  = 8
	tileBytes = 4096
)

// A Key is the secret of keyed digests. It must not leave the process.
type Key [2*rowPairs + 2]uint64

// NewKey returns a random key.
func NewKey() *Key {
	k := new(Key)
	_, _ = rand.Read(unsafe.Slice((*byte)(unsafe.Pointer(k)), unsafe.Sizeof(*k))) // never fails
	return k
}

// ProcessKey returns the key of this process.
var ProcessKey = sync.OnceValue(NewKey)

// Add adds bytes of a tensor to a keyed State. at must be a multiple of tileBytes, and so must len(p) unless p ends the
// tensor.
func (key *Key) Add(s *State, at int64, p []byte) {
	row := uint64(at) / tileBytes * 32 * stepA
	for ; len(p) >= tileBytes; p = p[tileBytes:] {
		key.addTile(s, row, (*[tileBytes]byte)(p))
		row += 32 * stepA & (1<<64 - 1)
	}
	if len(p) > 0 {
		var last [tileBytes]byte
		copy(last[:], p)
		key.addTile(s, row, &last)
	}
}

// addTile adds a tile. row is the number of its first row, times stepA.
func (key *Key) addTile(s *State, row uint64, tile *[tileBytes]byte) {
	const lanes, pair = 32, 2 * WordBytes
	for lane := range lanes {
		var x, y uint64
		for k := range rowPairs {
			w := tile[(lanes*k+lane)*pair:][:pair]
			v := binary.LittleEndian.Uint64(w) + key[2*k]
			hi, lo := bits.Mul64(v, binary.LittleEndian.Uint64(w[WordBytes:])+key[2*k+1])
			x += lo
			y += hi
		}
		hi, lo := bits.Mul64(x+mixWord(key[2*rowPairs]+row), y+mixWord(key[2*rowPairs+1]+row))
		s.A += lo
		s.B += hi
		row += stepA
	}
}
