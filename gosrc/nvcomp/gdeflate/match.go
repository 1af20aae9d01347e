package gdeflate

// Finds matches.

import "encoding/binary"

// match marks tokens of matches. A token is a literal byte, or match | (length-minMatch)<<15 | distance-1.
const match = 1 << 31

const (
	window   = 1 << 15 // the largest distance that Encode uses; Deflate's limit
	hashBits = 15
)

// An effort defines how thoroughly to search for matches: how many candidates to try, whether to also try the next
// byte, and which length ends the search.
type effort struct {
	chain int
	lazy  bool
	good  int
}

// efforts are indexed by nvCOMP's algorithm_type. 0 does not search for matches.
var efforts = [...]effort{{}, {4, false, 32}, {16, true, 64}, {16, true, 64}, {64, true, 128}, {1024, true, 258}}

// A finder stores the last position of each four bytes, and for each position the previous one.
type finder struct {
	head [1 << hashBits]int32 // position + 1; 0 for none
	prev [window]int32
}

func hashWord(v uint32) uint32 { return v * 0x9E3779B1 >> (32 - hashBits) }

func (f *finder) add(src []byte, i int) {
	if len(src)-i < 4 {
		return
	}
	h := hashWord(binary.LittleEndian.Uint32(src[i:]))
	f.prev[i%window] = f.head[h]
	f.head[h] = int32(i) + 1
}

// longestMatch returns the longest match for src[i:end], or 0, 0.
func (f *finder) longestMatch(src []byte, i, end int, e effort) (length, dist int) {
	if end-i < 4 {
		return 0, 0
	}
	most := min(end-i, maxMatch)
	at := int(f.head[hashWord(binary.LittleEndian.Uint32(src[i:]))]) - 1
	length = minMatch
	for range e.chain {
		if at < 0 || i-at > window {
			break
		}
		if src[at+length] == src[i+length] {
			n := 0
			for n < most && src[at+n] == src[i+n] {
				n++
			}
			if n > length {
				length, dist = n, i-at
				if n >= e.good || n == most {
					break
				}
			}
		}
		before := int(f.prev[at%window]) - 1
		if before >= at {
			break // the position was overwritten
		}
		at = before
	}
	if dist == 0 {
		return 0, 0
	}
	return length, dist
}

// appendTokens appends the tokens of src[from:to] to out. Matches may refer to bytes before from.
func (f *finder) appendTokens(out []uint32, src []byte, from, to int, e effort) []uint32 {
	if e.chain == 0 {
		for _, b := range src[from:to] {
			out = append(out, uint32(b))
		}
		return out
	}
	for i := from; i < to; {
		length, dist := f.longestMatch(src, i, to, e)
		f.add(src, i)
		if length == 0 {
			out = append(out, uint32(src[i]))
			i++
			continue
		}
		for e.lazy && length < e.good && i+1 < to {
			n, d := f.longestMatch(src, i+1, to, e)
			if n <= length {
				break
			}
			out = append(out, uint32(src[i]))
			i++
			f.add(src, i)
			length, dist = n, d
		}
		out = append(out, match|uint32(length-minMatch)<<15|uint32(dist-1))
		// In a long match, only add the first positions.
		for k := i + 1; k < i+min(length, 512); k++ {
			f.add(src, k)
		}
		i += length
	}
	return out
}
