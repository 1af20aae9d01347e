package gdeflate

// Builds Huffman codes.

import (
	"math/bits"
	"slices"
)

// fastBits is the maximum length of codes that are looked up in a table. Longer codes are decoded bit by bit.
const fastBits = 10

// A table decodes one canonical code.
type table struct {
	fast    [1 << fastBits]uint16 // symbol<<4 | bits, or 0 if the code is longer or does not exist
	count   [maxBits + 1]uint16   // number of codes of each length
	symbols [literals]uint16      // in the order of their codes
}

// buildFrom builds the table for code lengths. It refuses an incomplete code, unless it has no symbol or only one
// symbol of one bit.
func (t *table) buildFrom(lengths []uint8) error {
	clear(t.count[:])
	for _, n := range lengths {
		t.count[n]++
	}
	t.count[0] = 0
	remaining, used := 1, 0
	var next [maxBits + 2]uint16
	for n := 1; n <= maxBits; n++ {
		remaining = remaining<<1 - int(t.count[n])
		if remaining < 0 {
			return corruptError("a Huffman code has too many symbols")
		}
		used += int(t.count[n])
		next[n+1] = next[n] + t.count[n]
	}
	if remaining > 0 && (used > 1 || used == 1 && t.count[1] != 1) {
		return corruptError("a Huffman code is incomplete")
	}
	clear(t.fast[:])
	code, codes := 0, [maxBits + 1]int{}
	for n := 1; n <= maxBits; n++ {
		codes[n] = code
		code = (code + int(t.count[n])) << 1
	}
	for s, n := range lengths {
		if n == 0 {
			continue
		}
		t.symbols[next[n]] = uint16(s)
		next[n]++
		c := codes[n]
		codes[n]++
		if n <= fastBits {
			for i := int(bits.Reverse16(uint16(c)) >> (16 - n)); i < 1<<fastBits; i += 1 << n {
				t.fast[i] = uint16(s)<<4 | uint16(n)
			}
		}
	}
	return nil
}

// decodeSymbol returns the symbol of the code in the lowest bits, and the code's length. The length is 0 if there is
// no such code.
func (t *table) decodeSymbol(b uint64) (symbol, n int) {
	if e := t.fast[b&(1<<fastBits-1)]; e != 0 {
		return int(e >> 4), int(e & 15)
	}
	code, first, index := 0, 0, 0
	for n := 1; n <= maxBits; n++ {
		code |= int(b & 1)
		b >>= 1
		count := int(t.count[n])
		if code-first < count {
			return int(t.symbols[index+code-first]), n
		}
		index += count
		first = (first + count) << 1
		code <<= 1
	}
	return 0, 0
}

// A code holds the bits of each symbol for encoding; the first bit to write is the lowest.
type code struct {
	bits   []uint16
	length []uint8
}

// codeFor returns a code of at most limit bits for symbols with these frequencies. At least two symbols get a code,
// because some readers require that.
func codeFor(freq []uint32, limit int) code {
	var leaves []int // frequency<<16 | symbol
	for s, f := range freq {
		if f > 0 {
			leaves = append(leaves, int(f)<<16|s)
		}
	}
	for s := 0; len(leaves) < 2; s++ {
		if freq[s] == 0 {
			leaves = append(leaves, 1<<16|s)
		}
	}
	slices.Sort(leaves)

	// This is the two-queue method: inner nodes are created in ascending order of weight.
	n := len(leaves)
	weight, parent := make([]uint64, 2*n-1), make([]int, 2*n-1)
	for i, l := range leaves {
		weight[i] = uint64(l >> 16)
	}
	a, b := 0, n // the next leaf and the next inner node
	for node := n; node < 2*n-1; node++ {
		for range 2 {
			if a < n && (b == node || weight[a] <= weight[b]) {
				weight[node] += weight[a]
				parent[a] = node
				a++
			} else {
				weight[node] += weight[b]
				parent[b] = node
				b++
			}
		}
	}
	depth := make([]int, 2*n-1)
	count := make([]int, limit+1)
	for i := 2*n - 3; i >= 0; i-- {
		depth[i] = depth[parent[i]] + 1
		if i < n {
			count[min(depth[i], limit)]++
		}
	}
	// Codes that were shortened to the limit overflow the code space. Lengthen shorter ones until all fit.
	claim := 0
	for l := 1; l <= limit; l++ {
		claim += count[l] << (limit - l)
	}
	for ; claim > 1<<limit; claim-- {
		count[limit]--
		for l := limit - 1; ; l-- {
			if count[l] > 0 {
				count[l]--
				count[l+1] += 2
				break
			}
		}
	}

	c := code{bits: make([]uint16, len(freq)), length: make([]uint8, len(freq))}
	at := 0
	for l := limit; l > 0; l-- { // the rarest symbols get the longest codes
		for range count[l] {
			c.length[leaves[at]&0xffff] = uint8(l)
			at++
		}
	}
	c.numberCodes()
	return c
}

func (c *code) numberCodes() {
	var count, next [maxBits + 2]int
	for _, n := range c.length {
		count[n]++
	}
	count[0] = 0
	for n := 1; n <= maxBits; n++ {
		next[n] = (next[n-1] + count[n-1]) << 1
	}
	for s, n := range c.length {
		if n > 0 {
			c.bits[s] = bits.Reverse16(uint16(next[n])) >> (16 - n)
			next[n]++
		}
	}
}

func makeFixedCodes() (lit, dist code) {
	lit = code{bits: make([]uint16, literals), length: make([]uint8, literals)}
	for s := range lit.length {
		switch {
		case s < 144 || s >= 280:
			lit.length[s] = 8
		case s < 256:
			lit.length[s] = 9
		default:
			lit.length[s] = 7
		}
	}
	lit.numberCodes()
	dist = code{bits: make([]uint16, dists), length: slices.Repeat([]uint8{5}, dists)}
	dist.numberCodes()
	return lit, dist
}
