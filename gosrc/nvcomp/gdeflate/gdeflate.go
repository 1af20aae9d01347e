// Package gdeflate implements GDeflate: Deflate with its bits in 32 lanes, so that 32 threads can decode one stream.
// Other writers are DirectStorage and nvCOMP. The layout is that of github.com/NVIDIA/libdeflate, branch gdeflate
// (MIT, Apache-2.0).
//
// A lane is a sequence of bits in words of 32 bits, lowest bit first. A stream starts with the first word of each
// lane. Whenever a reader has used bits of a lane and fewer than 32 are left, it reads the lane's next word. The
// words are in the order in which a reader that goes from lane to lane needs them. All integers are little-endian.
//
// Blocks are those of Deflate (RFC 1951). Lane 0 contains the header of a block (1 bit: whether it is the last one; 2
// bits: its kind) and the three counts of a dynamic block. Each of the following sequences starts at lane 0 and goes
// from lane to lane in rounds:
//
//	the lengths of the code-length code   3 bits each
//	the code lengths                      a code and its extra bits each
//	the symbols                           a code and its extra bits each
//	the bytes of a stored block           8 bits each, after 16 bits of length in lane 0, not aligned
//
// After the length of a match, a lane contains the match's distance in the next round, and no other symbol in that
// round. After the end of the block there are no more symbols, but the remaining distances follow, including those of
// one last round.
//
// Unlike in Deflate, length symbol 285 is 3 with 16 extra bits, and distance symbols 30 and 31 are 32769 and 49153
// with 14 extra bits.
package gdeflate

import "math/bits"

const (
	lanes    = 32
	literals = 288 // symbols of the literal/length alphabet; two are never used
	dists    = 32
	endBlock = 256
	maxBits  = 15 // maximum length of a code
	minMatch = 3
	maxMatch = minMatch + 1<<16 - 1
	maxStore = 1<<16 - 1 // maximum bytes of a stored block
)

// MaxRatio is an upper bound for the number of bytes that one byte decodes to: a match of 65538 bytes takes at least 18
// bits.
const MaxRatio = 29128

// Bound returns the maximum number of bytes that Encode appends for n bytes. For each lane, it includes a word that
// is not full and one that the reader only prefetches.
func Bound(n int) int { return n + 3*(n/maxStore+1) + 8*lanes }

// codeOrder is the order in which the lengths of the code-length code are stored.
var codeOrder = [19]uint8{16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15}

// These tables hold the base and extra bits of each length symbol from 257 on, and of each distance symbol.
var (
	lengthBase, lengthExtra = extraBitsTable(29, 4, minMatch, 28)
	distBase, distExtra     = extraBitsTable(dists, 2, 1, dists)
)

// extraBitsTable returns a table in which the first 2n symbols have no extra bits, and each group of n symbols after
// that has one bit more than the group before. From `wide` on, a symbol is minMatch with 16 bits.
func extraBitsTable(symbols, n int, first int32, wide int) (base []int32, extra []uint8) {
	for s, at := 0, first; s < symbols; s++ {
		if s >= wide {
			base, extra = append(base, minMatch), append(extra, 16)
			continue
		}
		e := max(0, s/n-1)
		base, extra = append(base, at), append(extra, uint8(e))
		at += 1 << e
	}
	return base, extra
}

// lengthSymbol returns the symbol of a match's length, minus 257.
func lengthSymbol(n int32) int {
	if n > 258 {
		return 28
	}
	return symbolOf(n-minMatch, 2)
}

// distSymbol returns the symbol of a match's distance.
func distSymbol(d int32) int { return symbolOf(d-1, 1) }

// symbolOf returns the symbol of v in a series with 1<<log symbols per number of extra bits.
func symbolOf(v int32, log int) int {
	if v < 2<<log {
		return int(v)
	}
	e := bits.Len32(uint32(v)) - 1 - log
	return e<<log + int(v>>e)
}
