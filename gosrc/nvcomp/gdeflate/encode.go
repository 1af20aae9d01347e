package gdeflate

// Encodes GDeflate streams.

import (
	"encoding/binary"
	"slices"
	"sync"

	"github.com/overwire/overwire/gosrc/errs"
)

// blockBytes is the content size of one block.
const blockBytes = 1 << 16

// A writer writes bits to lanes, and places each word of a lane where a reader expects it.
type writer struct {
	out  []byte
	lane [lanes]struct {
		bits uint64 // bits that are not written yet
		n    int    // number of bits
		has  int    // bits of this lane that the reader has not used yet
		slot [3]int // offsets of the next words
		next int    // number of offsets in slot
	}
}

// assignWord appends a word to the stream and assigns it to a lane.
func (w *writer) assignWord(lane int) {
	l := &w.lane[lane]
	l.slot[l.next] = len(w.out)
	l.next++
	l.has += 32
	w.out = append(w.out, 0, 0, 0, 0)
}

func (w *writer) start(dst []byte) {
	w.out = dst
	for i := range w.lane {
		l := &w.lane[i]
		l.bits, l.n, l.has, l.next = 0, 0, 0, 0
		w.assignWord(i)
	}
}

// putBits writes n < 32 bits, which the reader uses in one step.
func (w *writer) putBits(lane int, v uint32, n int) {
	l := &w.lane[lane]
	l.bits |= uint64(v) << l.n
	if l.n += n; l.n >= 32 {
		w.flushLane(lane)
	}
	if l.has -= n; l.has < 32 {
		w.assignWord(lane)
	}
}

func (w *writer) flushLane(lane int) {
	l := &w.lane[lane]
	binary.LittleEndian.PutUint32(w.out[l.slot[0]:], uint32(l.bits))
	copy(l.slot[:], l.slot[1:])
	l.next--
	l.bits >>= 32
	l.n -= 32
}

func (w *writer) endStream() []byte {
	for i := range w.lane {
		if w.lane[i].n > 0 {
			w.flushLane(i)
		}
	}
	return w.out
}

// An encoder encodes one stream at a time.
type encoder struct {
	writer
	finder
	list []uint32
}

var encoders = sync.Pool{New: func() any { return new(encoder) }}

var fixedCodes = sync.OnceValues(makeFixedCodes)

// Encode appends src to dst as one stream. level is nvCOMP's algorithm_type: 0 finds no matches, 5 the most. It is
// safe for concurrent use.
func Encode(dst, src []byte, level int) ([]byte, error) {
	if level < 0 || level >= len(efforts) {
		return dst, errs.New(errs.ErrArgument, "invalid level (algorithm_type) %d: expected 0 to %d",
			level, len(efforts)-1)
	}
	if len(src) > 1<<31-2 {
		return dst, errs.New(errs.ErrArgument, "GDeflate cannot encode %d bytes: expected at most %d",
			len(src), 1<<31-2)
	}
	e := encoders.Get().(*encoder)
	defer encoders.Put(e)
	clear(e.head[:])
	e.start(dst)
	for at := 0; ; {
		end := min(at+blockBytes, len(src))
		e.list = e.appendTokens(e.list[:0], src, at, end, efforts[level])
		e.writeBlock(src[at:end], end == len(src))
		if at = end; at == len(src) {
			break
		}
	}
	out := e.endStream()
	e.out = nil
	return out, nil
}

// writeBlock writes one block as the shortest of the three kinds.
func (e *encoder) writeBlock(src []byte, last bool) {
	lits, distances := make([]uint32, literals), make([]uint32, dists)
	lits[endBlock] = 1
	extra := 0
	for _, t := range e.list {
		if t < match {
			lits[t]++
			continue
		}
		length, dist := splitToken(t)
		ls, ds := lengthSymbol(length), distSymbol(dist)
		lits[endBlock+1+ls]++
		distances[ds]++
		extra += int(lengthExtra[ls]) + int(distExtra[ds])
	}
	cost := func(lit, dist code) int {
		n := extra
		for s, f := range lits {
			n += int(f) * int(lit.length[s])
		}
		for s, f := range distances {
			n += int(f) * int(dist.length[s])
		}
		return n
	}
	lit, dist := codeFor(lits, maxBits), codeFor(distances, maxBits)
	head := headerOf(lit, dist)
	fixedLit, fixedDist := fixedCodes()
	dynamic, plain := cost(lit, dist)+head.countBits(), cost(fixedLit, fixedDist)
	plainBits := 8*len(src) + 16 + 19*(len(src)/maxStore)

	kind := uint32(2)
	if plain <= dynamic {
		kind, lit, dist = 1, fixedLit, fixedDist
	}
	if plainBits < min(plain, dynamic) {
		for len(src) > 0 {
			n := min(len(src), maxStore)
			e.putBlockHead(0, last && n == len(src))
			e.putBits(0, uint32(n), 16)
			for i, b := range src[:n] {
				e.putBits(i%lanes, uint32(b), 8)
			}
			src = src[n:]
		}
		return
	}
	e.putBlockHead(kind, last)
	if kind == 2 {
		head.writeTo(&e.writer)
	}
	e.writeSymbols(lit, dist)
}

func (w *writer) putBlockHead(kind uint32, last bool) {
	v := kind << 1
	if last {
		v |= 1
	}
	w.putBits(0, v, 3)
}

func splitToken(t uint32) (length, dist int32) {
	return int32(t>>15&(1<<16-1)) + minMatch, int32(t&(1<<15-1)) + 1
}

// writeSymbols writes the tokens and the end of the block in rounds.
func (e *encoder) writeSymbols(lit, dist code) {
	var due [lanes]int32 // for each lane, the distance that comes next
	at, hasEnded := 0, false
	for {
		final := hasEnded
		for lane := range lanes {
			if d := due[lane]; d > 0 {
				due[lane] = 0
				s := distSymbol(d)
				e.putBits(lane, uint32(dist.bits[s])|uint32(d-distBase[s])<<dist.length[s],
					int(dist.length[s])+int(distExtra[s]))
				continue
			}
			if hasEnded {
				continue
			}
			if at == len(e.list) {
				e.putBits(lane, uint32(lit.bits[endBlock]), int(lit.length[endBlock]))
				hasEnded = true
				continue
			}
			t := e.list[at]
			at++
			if t < match {
				e.putBits(lane, uint32(lit.bits[t]), int(lit.length[t]))
				continue
			}
			length, d := splitToken(t)
			s := lengthSymbol(length)
			k := endBlock + 1 + s
			e.putBits(lane, uint32(lit.bits[k])|uint32(length-lengthBase[s])<<lit.length[k],
				int(lit.length[k])+int(lengthExtra[s]))
			due[lane] = d
		}
		if final {
			return
		}
	}
}

// A header is the encoded form of the two codes of a dynamic block.
type header struct {
	nlit, ndist, nlens int
	lens               code
	runs               []run
}

// A run is a symbol of the code-length code with its extra bits.
type run struct{ sym, extra, n uint8 }

func headerOf(lit, dist code) header {
	h := header{nlit: literals, ndist: dists, nlens: 19}
	for h.nlit > endBlock+1 && lit.length[h.nlit-1] == 0 {
		h.nlit--
	}
	for h.ndist > 1 && dist.length[h.ndist-1] == 0 {
		h.ndist--
	}
	all := slices.Concat(lit.length[:h.nlit], dist.length[:h.ndist])
	freq := make([]uint32, 19)
	add := func(sym, extra, n int) {
		h.runs = append(h.runs, run{uint8(sym), uint8(extra), uint8(n)})
		freq[sym]++
	}
	for i := 0; i < len(all); {
		v, n := all[i], 1
		for i+n < len(all) && all[i+n] == v {
			n++
		}
		i += n
		if v != 0 {
			add(int(v), 0, 0)
			n--
		}
		for n > 0 {
			switch {
			case n < 3:
				add(int(v), 0, 0)
				n--
			case v != 0:
				k := min(n, 6)
				add(16, k-3, 2)
				n -= k
			case n < 11:
				add(17, n-3, 3)
				n = 0
			default:
				k := min(n, 138)
				add(18, k-11, 7)
				n -= k
			}
		}
	}
	h.lens = codeFor(freq, 7)
	for h.nlens > 4 && h.lens.length[codeOrder[h.nlens-1]] == 0 {
		h.nlens--
	}
	return h
}

func (h *header) countBits() int {
	n := 14 + 3*h.nlens
	for _, r := range h.runs {
		n += int(h.lens.length[r.sym]) + int(r.n)
	}
	return n
}

func (h *header) writeTo(w *writer) {
	w.putBits(0, uint32(h.nlit-257|(h.ndist-1)<<5|(h.nlens-4)<<10), 14)
	for i, s := range codeOrder[:h.nlens] {
		w.putBits(i, uint32(h.lens.length[s]), 3)
	}
	for i, r := range h.runs {
		n := int(h.lens.length[r.sym])
		w.putBits(i%lanes, uint32(h.lens.bits[r.sym])|uint32(r.extra)<<n, n+int(r.n))
	}
}

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
