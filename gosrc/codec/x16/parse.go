package x16

// Parses a chunk and drives the decoding of its segments.

import (
	"encoding/binary"

	"github.com/overwire/overwire/gosrc/errs"
)

// batch is the number of tiles of a segment that are decoded into symbol values before they are joined with their
// planes. It is a whole segment of the encoder. Long batches let the processor prefetch planes and destination: with
// 8 tiles, decoding to memory that is not cached took 1.5 times as long.
const batch = defaultSegTiles

// fillTiles is the number of tiles that are joined at a time if a plane is constant. The bytes of such a plane are in
// a small buffer.
const fillTiles = 8

// A segment is the state of decoding one run of tiles.
type segment struct {
	x      [lanes]uint32
	vals   *[batch * tileSyms]byte // values of the current batch
	cur    int                     // offset of the next word in the chunk
	escs   int                     // escape symbols seen
	tile   int                     // number in the chunk of the next tile to merge
	tiles  int                     // tiles left to merge
	want   int                     // tiles to decode in this batch
	got    int                     // decoded tiles of this batch
	first  int                     // number of the first tile
	total  int                     // number of tiles
	begin  int                     // offset in the chunk
	end    int
	listed int // number of escapes according to the directory
}

// A laneMemory holds the data that vector kernels keep in memory. It has no pointers, so that the allocator aligns it
// to a cache line; a state that crosses a line costs twice as much.
type laneMemory struct {
	states  [4][lanes]uint32
	labels  [4][lanes]uint32    // AVX-512: 8 nibbles per lane
	symbols [4][4][lanes]uint32 // AVX2: two bytes per lane for each pair of steps
}

// symbols are the symbols of a chunk, and their values.
type symbols struct {
	one      bool  // mode 1: the chunk has only one symbol
	symbol   uint8 // the only symbol in mode 1
	escape   int   // the escape symbol, or -1
	sentinel byte  // value that marks an escape; no other symbol has it
	palette  [16]byte
	values   [16]byte // palette with the sentinel
	table    table
}

// A chunk is a parsed chunk and its destination.
type chunk struct {
	form      *form
	transform uint8
	src, dst  []byte
	tiles     int // T in docs/format.md
	segTiles  int // S in docs/format.md
	segs      int // G in docs/format.md
	symbols   symbols
	planeAt   [maxPlanes]int // offset in src; constant planes have their own copy
	constant  [maxPlanes]bool
	tailAt    int
	fills     [maxPlanes][fillTiles * tileSyms]byte // bytes of a constant plane
}

// A decoder is the state of decoding one chunk. Decoders are pooled, because they take about 150 KB, too much for the
// stack of every goroutine.
type decoder struct {
	vals   [4][batch * tileSyms]byte // symbol values, in natural order; first, so that it is aligned to a cache line
	level  Level
	chunk  chunk
	run    [4]segment
	lanes  *laneMemory
	active [4]*segment
	fast   fastTables
	slots  scalarSlots
}

func corruptError(format string, args ...any) error {
	return errs.New(errs.ErrCorrupt, format, args...)
}

// parse checks everything that can be checked before words are decoded. After that, every offset in c is inside
// src and every count fits dst.
func (c *chunk) parse(dst, src []byte, transform uint8, segTiles uint16) error {
	if !isTransform(transform) {
		return corruptError("unknown X16 transform %d", transform)
	}
	f := &forms[transform]
	c.form, c.transform, c.src, c.dst = f, transform, src, dst
	if len(src) < headerBytes {
		return corruptError("an X16 chunk has only %d bytes", len(src))
	}
	if segTiles < 1 || segTiles > maxSegTiles {
		return corruptError("invalid segment length: %d tiles per segment", segTiles)
	}
	c.tiles = len(dst) * 8 / f.bits / tileSyms
	if t := binary.LittleEndian.Uint32(src[4:]); t == 0 || uint64(t) != uint64(c.tiles) {
		return corruptError("the chunk states %d tiles, but %d bytes have %d", t, len(dst), c.tiles)
	}
	c.segTiles = int(segTiles)
	if err := c.parseHeader(); err != nil {
		return err
	}
	at := headerBytes
	c.segs = 0
	if !c.symbols.one {
		c.segs = (c.tiles + c.segTiles - 1) / c.segTiles
		var err error
		if at, err = c.parseDirectory(); err != nil {
			return err
		}
	}
	for i, bits := range f.planes {
		c.planeAt[i] = at
		if !c.constant[i] {
			at += c.tiles * tileSyms / 8 * bits
		}
	}
	c.tailAt = at
	if rest := len(dst) - c.tiles*c.tileBytes(); len(src)-at != rest {
		return corruptError("the chunk has %d stored bytes, expected %d", len(src), at+rest)
	}
	return nil
}

func (c *chunk) tileBytes() int { return c.form.bits * (tileSyms / 8) }

// parseHeader reads the header, except for the tile count.
func (c *chunk) parseHeader() error {
	h, f, y := c.src[:headerBytes], c.form, &c.symbols
	if h[0] > 1 {
		return corruptError("unknown mode %d", h[0])
	}
	y.one, y.symbol = h[0] == 1, h[1]
	if y.symbol > 15 || !y.one && y.symbol != 0 {
		return corruptError("invalid symbol %d in mode %d", y.symbol, h[0])
	}
	if int(h[2])>>len(f.planes) != 0 {
		return corruptError("invalid constant planes %#x: the transform has %d planes", h[2], len(f.planes))
	}
	for i, v := range h[8:16] {
		is := h[2]>>i&1 != 0
		limit := 0
		if is {
			limit = 1<<f.planes[i] - 1
		}
		if int(v) > limit {
			return corruptError("constant plane %d has the invalid value %d", i, v)
		}
		if is {
			c.fillConstant(i, v)
		}
		if i < maxPlanes {
			c.constant[i] = is
		}
	}
	y.escape = int(h[3]) - 1
	if y.escape > 15 || y.escape >= 0 && (y.one || f.identity) {
		return corruptError("invalid escape symbol %d", y.escape)
	}
	copy(y.table.freq[:], h[32:48])
	copy(y.table.divider[:], h[48:64])
	copy(y.table.alias[:], h[64:80])
	if y.escape >= 0 && y.table.freq[y.escape] == 0 {
		return corruptError("the escape symbol %d does not occur", y.escape)
	}
	copy(y.palette[:], h[16:32])
	for k, v := range y.palette {
		limit := 0 // a symbol that does not occur must have the value 0
		switch {
		case f.identity && int(v) != k:
			limit = -1
		case f.identity, k != y.escape && (y.table.freq[k] > 0 || y.one && k == int(y.symbol)):
			limit = f.values - 1
		}
		if int(v) > limit {
			return corruptError("invalid palette: symbol %d has value %d", k, v)
		}
	}
	y.values = y.palette
	if y.escape >= 0 {
		y.sentinel = unusedValue(&y.palette, y.escape)
		y.values[y.escape] = y.sentinel
	}
	if !isZero(h[80:]) || y.one && !isZero(h[32:80]) {
		return corruptError("header bytes that must be zero are not zero")
	}
	if !y.one {
		return y.table.checkParts()
	}
	return nil
}

// unusedValue returns a value that no symbol except k has. At most 16 of at least 32 values are in use.
func unusedValue(palette *[16]byte, k int) byte {
	var isTaken [32]bool
	for i, v := range palette {
		if i != k && v < 32 {
			isTaken[v] = true
		}
	}
	for v, t := range isTaken {
		if !t {
			return byte(v)
		}
	}
	return 0
}

// fillConstant fills the buffer of the constant plane i.
func (c *chunk) fillConstant(i int, v byte) {
	switch c.form.planes[i] {
	case 4:
		v |= v << 4
	case 1:
		v = -v
	}
	p := &c.fills[i]
	if p[0] == v && p[len(p)-1] == v && isUniform(p[:], v) {
		return
	}
	for j := range p {
		p[j] = v
	}
}

func isUniform(p []byte, v byte) bool {
	w := uint64(v) * 0x0101010101010101
	for len(p) >= 8 {
		if binary.LittleEndian.Uint64(p) != w {
			return false
		}
		p = p[8:]
	}
	for _, b := range p {
		if b != v {
			return false
		}
	}
	return true
}

func isZero(p []byte) bool { return isUniform(p, 0) }

// parseDirectory checks the segments' offsets and returns the end of the last segment.
func (c *chunk) parseDirectory() (end int, err error) {
	first := up16(headerBytes + 8*(c.segs+1))
	if first > len(c.src) {
		return 0, corruptError("%d bytes are too few for a directory of %d segments", len(c.src), c.segs)
	}
	last := 0
	for i := range c.segs + 1 {
		off := binary.LittleEndian.Uint32(c.src[headerBytes+8*i:])
		escs := binary.LittleEndian.Uint32(c.src[headerBytes+8*i+4:])
		if off%16 != 0 || uint64(off) > uint64(len(c.src)) || i == 0 && int(off) != first {
			return 0, corruptError("invalid offset: segment %d at %d", i, off)
		}
		if i > 0 && int(off)-last < stateBytes+3*c.escapeCount(i-1) {
			return 0, corruptError("invalid size: segment %d of %d bytes", i-1, int(off)-last)
		}
		most := uint64(c.tilesOf(i) * tileSyms)
		if uint64(escs) > most || escs > 0 && c.symbols.escape < 0 {
			return 0, corruptError("invalid directory: segment %d with %d escapes", i, escs)
		}
		last = int(off)
	}
	if !isZero(c.src[headerBytes+8*(c.segs+1) : first]) {
		return 0, corruptError("the padding of the directory is not zero")
	}
	return last, nil
}

// planesOf returns the bytes of each plane for the n tiles from tile on.
func (c *chunk) planesOf(tile, n int) (p [maxPlanes][]byte) {
	for i, bits := range c.form.planes {
		size := n * tileSyms / 8 * bits
		if c.constant[i] {
			p[i] = c.fills[i][:size]
		} else {
			at := c.planeAt[i] + tile*tileSyms/8*bits
			p[i] = c.src[at : at+size]
		}
	}
	return
}

// escapeCount and segmentOffset read the directory, which parseDirectory has checked.
func (c *chunk) escapeCount(seg int) int {
	return int(binary.LittleEndian.Uint32(c.src[headerBytes+8*seg+4:]))
}

func (c *chunk) segmentOffset(seg int) int {
	return int(binary.LittleEndian.Uint32(c.src[headerBytes+8*seg:]))
}

// tilesOf returns the number of tiles of a segment, or 0 after the last one.
func (c *chunk) tilesOf(seg int) int {
	return max(0, min(c.segTiles, c.tiles-seg*c.segTiles))
}

// beginSegment starts decoding a segment and reads its initial states.
func (c *chunk) beginSegment(s *segment, seg int) error {
	s.begin, s.end = c.segmentOffset(seg), c.segmentOffset(seg+1)
	s.first, s.total = seg*c.segTiles, c.tilesOf(seg)
	s.tile, s.tiles = s.first, s.total
	s.listed, s.escs = c.escapeCount(seg), 0
	s.cur = s.begin + stateBytes
	low := ^uint32(0)
	for l := range s.x {
		s.x[l] = binary.LittleEndian.Uint32(c.src[s.begin+4*l:])
		low = min(low, s.x[l])
	}
	if low < start {
		return corruptError("segment %d begins with state %d, expected at least 65536", seg, low)
	}
	return nil
}

// finishSegment checks the end of a decoded segment and replaces sentinels by the values of the escapes.
func (c *chunk) finishSegment(s *segment) error {
	for l, x := range s.x {
		if x != start {
			return corruptError("lane %d ends in state %#x, expected 0x10000", l, x)
		}
	}
	list := s.cur
	pad := list + 3*s.listed
	if pad > s.end || s.end-pad >= 16 || !isZero(c.src[pad:s.end]) {
		return corruptError("segment at %d: words and escapes end at %d, but the segment ends at %d", s.begin, pad,
			s.end)
	}
	if s.escs != s.listed {
		return corruptError("segment at %d has %d escapes, but the directory lists %d", s.begin, s.escs, s.listed)
	}
	values := list + 2*s.listed
	last, base := -1, s.first*tileSyms
	for i := range s.listed {
		at := int(binary.LittleEndian.Uint16(c.src[list+2*i:]))
		v := c.src[values+i]
		if at <= last || at >= s.total*tileSyms || int(v) >= c.form.values {
			return corruptError("escape %d: invalid value %d at %d", i, v, at)
		}
		last = at
		if !c.patchEscape(base+at, v) {
			return corruptError("escape %d: there is no escape symbol at %d", i, at)
		}
	}
	return nil
}

// patchEscape replaces the sentinel in element i by v. It returns false if the element does not have the sentinel.
func (c *chunk) patchEscape(i int, v byte) bool {
	le := binary.LittleEndian
	x := v ^ c.symbols.sentinel // XOR with x replaces the sentinel by v
	switch c.transform {
	case BF16:
		w := le.Uint16(c.dst[2*i:])
		le.PutUint16(c.dst[2*i:], w^uint16(x)<<7)
		return byte(w>>7) == c.symbols.sentinel
	case FP16:
		w := le.Uint16(c.dst[2*i:])
		le.PutUint16(c.dst[2*i:], w^uint16(x)<<10)
		return byte(w>>10)&31 == c.symbols.sentinel
	case FP32:
		w := le.Uint32(c.dst[4*i:])
		le.PutUint32(c.dst[4*i:], w^uint32(x)<<23)
		return byte(w>>23) == c.symbols.sentinel
	case E5M2:
		w := c.dst[i]
		c.dst[i] = w ^ x<<2
		return w>>2&31 == c.symbols.sentinel
	case Bytes:
		w := c.dst[i]
		c.dst[i] = v
		return w == c.symbols.sentinel
	}
	return false // other transforms have no escapes
}
