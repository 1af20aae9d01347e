// Package blocksum computes an XXH3-128 from block sums and the last bytes. A GPU computes the block sums, so that
// the bytes can stay on the GPU (cuda/hash.cuh).
//
// The hash is specified in doc/xxhash_spec.md of github.com/Cyan4973/xxHash. The 16 stripes of a 1 KiB block are added
// to the eight accumulators. Their sum does not depend on earlier bytes; only the scramble at the end of a block does.
package blocksum

import (
	"encoding/binary"
	"math/bits"

	"github.com/zeebo/xxh3"
)

const (
	// Block is the number of bytes that a sum covers. Sum is the size of a sum in bytes.
	Block, Sum = 1024, 64
	// MaxTail is the maximum result of Tail.
	MaxTail = Block + stripe

	stripe = 64

	prime32a, prime32b, prime32c           = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
	prime64a, prime64b, prime64c, prime64d = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9,
		0x85EBCA77C2B2AE63
	prime64e, avalanche = 0x27D4EB2F165667C5, 0x165667919E3779F9
)

// secret is the hash's default secret, in 8-byte words.
var secret = [24]uint64{
	0xbe4ba423396cfeb8, 0x1cad21f72c81017c, 0xdb979083e96dd4de, 0x1f67b3b7a4a44072, 0x78e5c0cc4ee679cb,
	0x2172ffcc7dd05a82,
	0x8e2443f7744608b8, 0x4c263a81e69035e0, 0xcb00c391bb52283c, 0xa32e531b8b65d088, 0x4ef90da297486471,
	0xd8acdea946ef1938,
	0x3f349ce33f76faa8, 0x1d4f0bc7c7bbdcf9, 0x3159b4cd4be0518a, 0x647378d9c97e9fc8, 0xc3ebd33483acc5ea,
	0xeb6313faffa081c5,
	0x49daf0b751dd0d17, 0x9e68d429265516d3, 0xfca1477d58be162b, 0xce31d07ad1b8f88f, 0x280416958f3acb45,
	0x7e404bbbcafbd7af,
}

// at returns the word of the secret that starts at byte i.
func at(i int) uint64 {
	w, s := i/8, 8*(i%8)
	if s == 0 {
		return secret[w]
	}
	return secret[w]>>s | secret[w+1]<<(64-s)
}

// A State computes a hash from block sums, which must be added in order. It is not safe for concurrent use.
type State struct {
	acc    [8]uint64
	total  uint64 // total number of bytes
	blocks int64  // number of missing sums
}

// blocksOf returns the number of blocks that are scrambled: all except the last one, even if it is complete.
func blocksOf(total int64) int64 { return max(0, total-1) / Block }

// Tail returns how many of the last bytes Finish needs if there are total bytes.
func Tail(total int64) int {
	n := total - blocksOf(total)*Block
	return int(min(total, n+stripe))
}

// New starts the hash of total bytes.
func New(total int64) State {
	return State{
		acc:   [8]uint64{prime32c, prime64a, prime64b, prime64c, prime64d, prime32b, prime64e, prime32a},
		total: uint64(total), blocks: blocksOf(total),
	}
}

// Add adds the sums of whole blocks in the kernel's format. It ignores a sum of the last block, because Finish gets
// the bytes of that block.
func (s *State) Add(sums []byte) {
	n := min(s.blocks, int64(len(sums)/Sum))
	s.blocks -= n
	a, b, c, d, e, f, g, h := s.acc[0], s.acc[1], s.acc[2], s.acc[3], s.acc[4], s.acc[5], s.acc[6], s.acc[7]
	for ; n > 0; n-- { // the eight chains are independent, so their latencies overlap
		p := (*[Sum]byte)(sums)
		a = scramble(a+binary.LittleEndian.Uint64(p[0:]), 0)
		b = scramble(b+binary.LittleEndian.Uint64(p[8:]), 1)
		c = scramble(c+binary.LittleEndian.Uint64(p[16:]), 2)
		d = scramble(d+binary.LittleEndian.Uint64(p[24:]), 3)
		e = scramble(e+binary.LittleEndian.Uint64(p[32:]), 4)
		f = scramble(f+binary.LittleEndian.Uint64(p[40:]), 5)
		g = scramble(g+binary.LittleEndian.Uint64(p[48:]), 6)
		h = scramble(h+binary.LittleEndian.Uint64(p[56:]), 7)
		sums = sums[Sum:]
	}
	s.acc = [8]uint64{a, b, c, d, e, f, g, h}
}

func scramble(x uint64, k int) uint64 { return (x ^ x>>47 ^ secret[16+k]) * prime32a }

// Finish returns the two halves of the hash, given the tail. ok is false if sums are missing or the tail has the
// wrong length.
func (s *State) Finish(tail []byte) (high, low uint64, ok bool) {
	if s.blocks != 0 || len(tail) != Tail(int64(s.total)) {
		return 0, 0, false
	}
	if uint64(len(tail)) == s.total { // the tail is the whole input, so the library can hash it
		h := xxh3.Hash128(tail)
		return h.Hi, h.Lo, true
	}
	acc := s.acc
	last := tail[len(tail)-stripe:]
	rest := tail[stripe:] // from the start of the last block
	for i := 0; i < (len(rest)-1)/stripe; i++ {
		add(&acc, rest[i*stripe:], 8*i)
	}
	add(&acc, last, 8*len(secret)-stripe-7)
	return merge(&acc, 8*len(secret)-stripe-11, ^(s.total * prime64b)), merge(&acc, 11, s.total*prime64a), true
}

func add(acc *[8]uint64, p []byte, key int) {
	for k := range acc {
		v := binary.LittleEndian.Uint64(p[8*k:])
		x := v ^ at(key+8*k)
		acc[k^1] += v
		acc[k] += (x & 0xffffffff) * (x >> 32)
	}
}

func merge(acc *[8]uint64, key int, h uint64) uint64 {
	for k := 0; k < len(acc); k += 2 {
		high, low := bits.Mul64(acc[k]^at(key+8*k), acc[k+1]^at(key+8*k+8))
		h += high ^ low
	}
	h = (h ^ h>>37) * avalanche
	return h ^ h>>32
}
