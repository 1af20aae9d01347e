package x16

// Encodes chunks.

import (
	"encoding/binary"
	"math/bits"
)

// gain is the maximum stored size as a share of the logical bytes. Larger chunks are stored raw.
const gain = 0.99

// defaultSegTiles is the maximum length of the segments that encoders write: 64 Ki symbols. With half that
// length, chunks would be 0.13 % larger and decode 4 % faster on the CPU. On an H200, large launches would not be
// faster. A single launch of 64 MiB still decodes at 0.49 TB/s, six times the rate of the PCIe link.
const defaultSegTiles = 256

// An Encoder encodes chunks. It reuses its buffers, so the next chunk of the same size allocates nothing. The zero
// value is ready to use. It must not be used concurrently.
type Encoder struct {
	vals  []byte            // symbol values, which are later replaced by symbols
	plane [maxPlanes][]byte // the planes
	words [4][]byte         // the words of four segments, filled from the end
	escs  []escape
	hist  [4][256]uint32
	syms  [256]byte // value -> symbol
	coder [16]coder
	slots [16][256]byte // symbol, rank -> slot
	table table
	group [4]coding
	fast  fastCoder
	// segTiles, if not 0, replaces defaultSegTiles in measurements and tests.
	segTiles int
	level    Level
	forced   bool
}

type escape struct {
	at    int // offset in the chunk
	value byte
}

// A coder holds the parameters to encode a symbol.
type coder struct {
	inverse uint64 // ceil(2^56 / freq): exact for all x < 2^32
	freq    uint32
}

// Encode appends the chunk of src to dst. The caller must store the number of tiles per segment in the index. If
// encoding saves too little, ok is false and dst is unchanged; the caller should then store the bytes raw. The same
// src gives the same chunk on every machine.
func (e *Encoder) Encode(dst, src []byte, transform uint8) (out []byte, segTiles uint16, ok bool) {
	if !isTransform(transform) {
		return dst, 0, false
	}
	if !e.forced {
		e.level = level
	}
	f := &forms[transform]
	tiles := len(src) * 8 / f.bits / tileSyms
	if tiles == 0 {
		return dst, 0, false
	}
	body := src[:tiles*tileSyms/8*f.bits]
	e.splitElements(transform, body, tiles*tileSyms)
	hist := e.histogram()
	m := fitModel(&hist, tiles*tileSyms, f.identity)
	s, segs := segmentGrid(tiles, e.segTiles)
	limit := int(gain * float64(len(src)))
	if m.one < 0 && headerBytes+segs*(stateBytes+8)+int(m.bits/8) > limit {
		return dst, 0, false
	}
	base := len(dst)
	var head [headerBytes]byte
	binary.LittleEndian.PutUint32(head[4:], uint32(tiles))
	copy(head[16:], m.palette[:])
	for i, p := range e.plane[:len(f.planes)] {
		if v := p[0]; isUniform(p, v) && isRepeated(v, f.planes[i]) {
			head[2] |= 1 << i
			head[8+i] = v & byte(1<<f.planes[i]-1)
		}
	}
	if m.one >= 0 {
		head[0], head[1] = 1, byte(m.one)
		out = append(dst, head[:]...)
	} else {
		e.table = newTable(m.freq)
		head[3] = byte(m.escape + 1)
		copy(head[32:], e.table.freq[:])
		copy(head[48:], e.table.divider[:])
		copy(head[64:], e.table.alias[:])
		out = append(dst, head[:]...)
		out = e.appendSegments(out, base, &m, s, segs)
	}
	for i := range f.planes {
		if head[2]>>i&1 == 0 {
			out = append(out, e.plane[i]...)
		}
		if len(out)-base > limit {
			return dst, 0, false
		}
	}
	out = append(out, src[len(body):]...)
	if len(out)-base > limit {
		return dst, 0, false
	}
	return out, uint16(s), true
}

// isRepeated reports whether the elements in one byte of a plane are all equal.
func isRepeated(v byte, bits int) bool {
	switch bits {
	case 4:
		return v>>4 == v&15
	case 1:
		return v == 0 || v == 0xff
	}
	return true
}

// minSegTiles is the minimum length of segments when encoders divide a chunk to get four of them. Shorter segments
// would decode small chunks faster, but the states of four segments are 13 % of a bf16 tensor of 4 KB.
const minSegTiles = 32

// segmentGrid divides tiles into equal segments of at most `longest` tiles. If there are enough tiles, the number of
// segments is a multiple of four, because decoders process four at a time.
func segmentGrid(tiles, longest int) (segTiles, segs int) {
	if longest == 0 {
		longest = defaultSegTiles
	}
	segs = (tiles + longest - 1) / longest
	segs = min((segs+3)&^3, max(segs, tiles/minSegTiles, 1))
	segTiles = (tiles + segs - 1) / segs
	return segTiles, (tiles + segTiles - 1) / segTiles
}

func withLength(p []byte, n int) []byte {
	if cap(p) < n {
		return make([]byte, n)
	}
	return p[:n]
}

// splitElements fills e.vals and e.plane.
func (e *Encoder) splitElements(transform uint8, src []byte, n int) {
	f := &forms[transform]
	e.vals = withLength(e.vals, n)
	for i, b := range f.planes {
		e.plane[i] = withLength(e.plane[i], n/8*b)
	}
	if e.level == Scalar || !splitFast(e.level, transform, src, e.vals, &e.plane) {
		splitScalar(transform, src, e.vals, &e.plane)
	}
}

// histogram counts values. It uses four tables, so that increments for equal adjacent values do not wait for each
// other.
func (e *Encoder) histogram() (out [256]int) {
	h := &e.hist
	*h = [4][256]uint32{}
	for p := e.vals; len(p) >= 8; p = p[8:] {
		w := binary.LittleEndian.Uint64(p)
		h[0][byte(w)]++
		h[1][byte(w>>8)]++
		h[2][byte(w>>16)]++
		h[3][byte(w>>24)]++
		h[0][byte(w>>32)]++
		h[1][byte(w>>40)]++
		h[2][byte(w>>48)]++
		h[3][byte(w>>56)]++
	}
	for v := range out {
		out[v] = int(h[0][v]) + int(h[1][v]) + int(h[2][v]) + int(h[3][v])
	}
	return
}

// appendSegments appends the directory and all segments to the chunk that starts at out[base].
func (e *Encoder) appendSegments(out []byte, base int, m *model, s, segs int) []byte {
	e.prepareTables(m)
	e.turnIntoSymbols(m)
	dir := len(out)
	size := up16(headerBytes+8*(segs+1)) - headerBytes
	for range size {
		out = append(out, 0)
	}
	escs := e.escs
	for seg := 0; seg < segs; seg += len(e.words) {
		var syms [4][]byte
		n := min(len(syms), segs-seg)
		for i := range n {
			first := (seg + i) * s * tileSyms
			syms[i] = e.vals[first:min(first+s*tileSyms, len(e.vals))]
			// Two symbols produce at most one word. Vector stores need space after the words.
			e.words[i] = withLength(e.words[i], len(syms[i])+64)[:len(syms[i])]
		}
		if e.level == Scalar || !e.groupFast(syms[:n]) {
			for i := range n {
				e.codeSegment(syms[i], i)
			}
		}
		for i := range n {
			binary.LittleEndian.PutUint32(out[dir+8*(seg+i):], uint32(len(out)-base))
			first := (seg + i) * s * tileSyms
			escapeCount := 0
			for escapeCount < len(escs) && escs[escapeCount].at < first+len(syms[i]) {
				escapeCount++
			}
			binary.LittleEndian.PutUint32(out[dir+8*(seg+i)+4:], uint32(escapeCount))
			out = e.appendSegment(out, i, first, escs[:escapeCount])
			escs = escs[escapeCount:]
			for (len(out)-base)%16 != 0 {
				out = append(out, 0)
			}
		}
	}
	binary.LittleEndian.PutUint32(out[dir+8*segs:], uint32(len(out)-base))
	return out
}

// appendSegment appends the encoded segment i of the group.
func (e *Encoder) appendSegment(out []byte, i, first int, escs []escape) []byte {
	g := &e.group[i]
	for _, x := range g.states {
		out = binary.LittleEndian.AppendUint32(out, x)
	}
	out = append(out, e.words[i][g.at:]...)
	for _, x := range escs {
		out = binary.LittleEndian.AppendUint16(out, uint16(x.at-first))
	}
	for _, x := range escs {
		out = append(out, x.value)
	}
	return out
}

// prepareTables builds the coding tables for a model.
func (e *Encoder) prepareTables(m *model) {
	for k, f := range m.freq {
		e.coder[k] = coder{}
		if f > 0 {
			e.coder[k] = coder{(1<<56 + uint64(f) - 1) / uint64(f), uint32(f)}
		}
	}
	for s, sl := range e.table.expandSlots() {
		e.slots[sl.symbol][sl.rank] = byte(s)
	}
	for v := range e.syms {
		e.syms[v] = byte(max(m.escape, 0))
	}
	for k, v := range m.palette {
		if m.freq[k] > 0 && k != m.escape {
			e.syms[v] = byte(k)
		}
	}
	if e.level > Scalar {
		e.prepareFast(m)
	}
}

// turnIntoSymbols replaces the values in e.vals by symbols and collects the escapes.
func (e *Encoder) turnIntoSymbols(m *model) {
	e.escs = e.escs[:0]
	from := 0
	if e.level > Scalar {
		from = e.symbolsFast(m)
	}
	vals := e.vals[from:]
	for i, v := range vals {
		k := e.syms[v]
		if int(k) == m.escape {
			e.escs = append(e.escs, escape{from + i, v})
		}
		vals[i] = k
	}
}

// A coding is the state of encoding a segment: the lanes' states and the position of the last word.
type coding struct {
	states [lanes]uint32
	at     int
}

// codeSegment encodes the symbols of one segment, from last to first, as segment i of the group.
func (e *Encoder) codeSegment(syms []byte, i int) {
	x, words := &e.group[i].states, e.words[i]
	for l := range x {
		x[l] = start
	}
	at := len(words)
	for t := len(syms) - tileSyms; t >= 0; t -= tileSyms {
		tile := (*[tileSyms]byte)(syms[t:])
		for pair := 6; pair >= 0; pair -= 2 {
			for l := lanes - 1; l >= 0; l-- {
				u := (int(units[l]) + pair) & 254
				k0, k1 := tile[u]&15, tile[u+1]&15
				c0, c1 := &e.coder[k0], &e.coder[k1]
				v := x[l]
				// The word is always written, but only kept if `at` moves.
				binary.LittleEndian.PutUint16(words[at-2:], uint16(v))
				full := uint(0)
				if v >= c0.freq*c1.freq<<16 {
					full = 1
				}
				at -= int(2 * full)
				v >>= full << 4 & 31
				q, _ := bits.Mul64(uint64(v)<<8, c1.inverse)
				v = uint32(q)<<8 | uint32(e.slots[k1][byte(v-uint32(q)*c1.freq)])
				q, _ = bits.Mul64(uint64(v)<<8, c0.inverse)
				v = uint32(q)<<8 | uint32(e.slots[k0][byte(v-uint32(q)*c0.freq)])
				x[l] = v
			}
		}
	}
	e.group[i].at = at
}

// Estimate returns the expected stored size of a tensor as a share of its logical size, estimated from a sample. It
// is 1 if the tensor cannot be compressed. Estimate allocates memory and reads the sample once.
func Estimate(sample []byte, transform uint8) float64 {
	if !isTransform(transform) {
		return 1
	}
	f := &forms[transform]
	n := len(sample) * 8 / f.bits / tileSyms * tileSyms
	if n == 0 {
		return 1
	}
	e := Encoder{level: level}
	e.splitElements(transform, sample[:n/8*f.bits], n)
	hist := e.histogram()
	m := fitModel(&hist, n, f.identity)
	// Count the states and padding as for segments of full length, regardless of the sample's length.
	size := m.bits / 8
	if m.one < 0 {
		size += float64(n) / (defaultSegTiles * tileSyms) * (stateBytes + 16)
	}
	for i, p := range e.plane[:len(f.planes)] {
		if !isUniform(p, p[0]) || !isRepeated(p[0], f.planes[i]) {
			size += float64(len(p))
		}
	}
	return min(1, size/float64(n/8*f.bits))
}
