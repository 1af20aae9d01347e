package x16

// The reference reader and writer in this file share no code with the product. They implement docs/format.md section
// 3 sentence by sentence, slowly. The writer writes chunks that the specification allows but our encoder never
// writes.

import (
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"slices"
)

// A pageForm is a row of the table of transforms: which bits of an element are the symbol value, and which bits each
// plane has, from low to high.
type pageForm struct {
	width    int
	identity bool
	value    []int
	planes   [][]int
}

func span(lo, hi int) (bits []int) {
	for b := lo; b <= hi; b++ {
		bits = append(bits, b)
	}
	return bits
}

var page = map[uint8]pageForm{
	1: {16, false, span(7, 14), [][]int{append([]int{15}, span(0, 6)...)}},
	2: {16, false, span(10, 14), [][]int{span(0, 7), {8}, {9}, {15}}},
	3: {32, false, span(23, 30), [][]int{append([]int{31}, span(16, 22)...), span(8, 15), span(0, 7)}},
	4: {8, true, span(3, 6), [][]int{{0, 1, 2, 7}}},
	5: {8, false, span(2, 6), [][]int{{0}, {1}, {7}}},
	6: {8, true, span(4, 7), [][]int{span(0, 3)}},
	7: {4, true, span(0, 3), nil},
	8: {8, false, span(0, 7), nil},
}

// element returns element i of p. put sets it.
func (f pageForm) element(p []byte, i int) (e uint32) {
	for b := range f.width {
		at := i*f.width + b
		e |= uint32(p[at/8]>>(at%8)&1) << b
	}
	return e
}

func (f pageForm) put(p []byte, i int, e uint32) {
	for b := range f.width {
		at := i*f.width + b
		p[at/8] = p[at/8]&^(1<<(at%8)) | byte(e>>b&1)<<(at%8)
	}
}

func pick(e uint32, bits []int) (v uint32) {
	for i, b := range bits {
		v |= e >> b & 1 << i
	}
	return v
}

func place(v uint32, bits []int) (e uint32) {
	for i, b := range bits {
		e |= v >> i & 1 << b
	}
	return e
}

// owner returns the lane and the step that encode a symbol of a tile.
func owner(symbol int) (lane, step int) {
	for l := range 32 {
		h, g, q := l/16, l%16/4, l%4
		if first := 128*h + 8*(4*q+g); symbol >= first && symbol < first+8 {
			return l, symbol - first
		}
	}
	panic("no lane")
}

var owners = func() (of [8][32]int) { // number of the symbol, by step and lane
	for s := range 256 {
		l, t := owner(s)
		of[t][l] = s
	}
	return of
}()

var errPage = errors.New("docs/format.md forbids this chunk")

// pageSlots returns the symbol and rank of each slot.
func pageSlots(freq, divider, alias []byte) (symbol [256]byte, rank [256]int, err error) {
	sum := 0
	for b := range 16 {
		d, a := int(divider[b]), int(alias[b])
		if d > 16 || a > 15 || (d == 16) != (a == b) {
			return symbol, rank, errPage
		}
		sum += int(freq[b])
	}
	if sum != 256 {
		return symbol, rank, errPage
	}
	var given [16]int
	for b := range 16 {
		for r := range int(divider[b]) {
			symbol[16*b+r], rank[16*b+r] = byte(b), given[b]
			given[b]++
		}
	}
	for b := range 16 {
		for r := int(divider[b]); r < 16; r++ {
			a := alias[b]
			symbol[16*b+r], rank[16*b+r] = a, given[a]
			given[a]++
		}
	}
	for k := range 16 {
		if given[k] != int(freq[k]) {
			return symbol, rank, errPage
		}
	}
	return symbol, rank, nil
}

// pageDecode decodes a chunk of a given logical size.
func pageDecode(src []byte, size int, transform uint8, segTiles uint16) ([]byte, error) {
	f, ok := page[transform]
	if !ok || len(src) < 96 || segTiles < 1 || segTiles > 256 {
		return nil, errPage
	}
	n := size * 8 / f.width
	tiles := n / 256
	h := src[:96]
	mode, only, constant, escape := h[0], h[1], h[2], int(h[3])-1
	if mode > 1 || only > 15 || mode == 0 && only != 0 || uint32(tiles) != binary.LittleEndian.Uint32(h[4:]) ||
		tiles == 0 || escape > 15 ||
		int(constant) >= 1<<len(f.planes) || binary.LittleEndian.Uint64(h[80:]) != 0 ||
		binary.LittleEndian.Uint64(h[88:]) != 0 {
		return nil, errPage
	}
	for i, v := range h[8:16] {
		if constant>>i&1 == 0 && v != 0 || constant>>i&1 == 1 && int(v) >= 1<<len(f.planes[i]) {
			return nil, errPage
		}
	}
	palette, freq := h[16:32], h[32:48]
	if escape >= 0 && (f.identity || mode == 1 || freq[escape] == 0) {
		return nil, errPage
	}
	for k, v := range palette {
		occurs := freq[k] > 0 && k != escape || mode == 1 && k == int(only)
		if f.identity && int(v) != k || !f.identity && (occurs && int(v) >= 1<<len(f.value) || !occurs && v != 0) {
			return nil, errPage
		}
	}
	values := make([]byte, tiles*256)
	at := 96
	if mode == 1 {
		if slices.ContainsFunc(h[32:80], func(b byte) bool { return b != 0 }) {
			return nil, errPage
		}
		for i := range values {
			values[i] = palette[only]
		}
	} else {
		symbol, rank, err := pageSlots(freq, h[48:64], h[64:80])
		if err != nil {
			return nil, err
		}
		if at, err = pageSegments(src, values, f, palette, freq, escape, int(segTiles), symbol, rank); err != nil {
			return nil, err
		}
	}
	return pageJoin(src, at, size, tiles, f, h, values)
}

// pageSegments decodes all segments, and returns the end of the last one.
func pageSegments(src, values []byte, f pageForm, palette, freq []byte, escape, segTiles int, symbol [256]byte,
	rank [256]int) (int, error) {
	tiles := len(values) / 256
	segs := (tiles + segTiles - 1) / segTiles
	first := (96 + 8*(segs+1) + 15) / 16 * 16
	if len(src) < first || slices.ContainsFunc(src[96+8*(segs+1):first], func(b byte) bool { return b != 0 }) {
		return 0, errPage
	}
	entry := func(i int) (off, escs int) {
		return int(binary.LittleEndian.Uint32(src[96+8*i:])), int(binary.LittleEndian.Uint32(src[96+8*i+4:]))
	}
	if off, _ := entry(0); off != first {
		return 0, errPage
	}
	for g := range segs {
		begin, escs := entry(g)
		end, after := entry(g + 1)
		last := min(tiles, (g+1)*segTiles)
		part := values[g*segTiles*256 : last*256]
		if begin%16 != 0 || end%16 != 0 || begin > end || end > len(src) || end-begin < 128 ||
			g == segs-1 && after != 0 {
			return 0, errPage
		}
		if err := pageSegment(src[begin:end], part, f, palette, freq, escape, escs, symbol, rank); err != nil {
			return 0, err
		}
	}
	end, _ := entry(segs)
	return end, nil
}

func pageSegment(seg, part []byte, f pageForm, palette, freq []byte, escape, escs int, symbol [256]byte,
	rank [256]int) error {
	var x [32]uint64
	for l := range x {
		if x[l] = uint64(binary.LittleEndian.Uint32(seg[4*l:])); x[l] < 1<<16 {
			return errPage
		}
	}
	cur := 128
	var escaped []int
	for t := 0; t < len(part); t += 256 {
		for step := range 8 {
			for l := range 32 {
				s := x[l] & 255
				k := symbol[s]
				x[l] = uint64(freq[k])*(x[l]>>8) + uint64(rank[s])
				at := t + owners[step][l]
				part[at] = palette[k]
				if int(k) == escape {
					escaped = append(escaped, at)
				}
			}
			if step%2 == 0 {
				continue
			}
			for l := range 32 {
				if x[l] < 1<<16 {
					if cur+2 > len(seg) {
						return errPage
					}
					x[l] = x[l]<<16 | uint64(binary.LittleEndian.Uint16(seg[cur:]))
					cur += 2
				}
			}
		}
	}
	for l := range x {
		if x[l] != 1<<16 {
			return errPage
		}
	}
	if slices.Sort(escaped); len(escaped) != escs {
		return errPage
	}
	list, end := cur, cur+3*escs
	if end > len(seg) || len(seg)-end >= 16 || slices.ContainsFunc(seg[end:], func(b byte) bool { return b != 0 }) {
		return errPage
	}
	for i, at := range escaped {
		v := seg[list+2*escs+i]
		if int(binary.LittleEndian.Uint16(seg[list+2*i:])) != at || int(v) >= 1<<len(f.value) {
			return errPage
		}
		part[at] = v
	}
	return nil
}

// pageJoin reads the planes and the tail and returns the logical bytes.
func pageJoin(src []byte, at, size, tiles int, f pageForm, h, values []byte) ([]byte, error) {
	planes := make([][]byte, len(f.planes))
	for i, bits := range f.planes {
		if h[2]>>i&1 == 1 {
			continue
		}
		n := 32 * len(bits) * tiles
		if at+n > len(src) {
			return nil, errPage
		}
		planes[i] = src[at : at+n]
		at += n
	}
	out := make([]byte, size)
	body := tiles * 256 * f.width / 8
	if len(src)-at != size-body {
		return nil, errPage
	}
	copy(out[body:], src[at:])
	for i, v := range values {
		e := place(uint32(v), f.value)
		for k, bits := range f.planes {
			w := uint32(h[8+k])
			if planes[k] != nil {
				b := i * len(bits)
				w = uint32(planes[k][b/8]>>(b%8)) & (1<<len(bits) - 1)
			}
			e |= place(w, bits)
		}
		f.put(out, i, e)
	}
	return out, nil
}

// A pageWriter writes chunks with random choices: any palette, any frequencies, any alias table, needless escapes,
// segments of any length, and stored constant planes.
type pageWriter struct{ r *rand.Rand }

// table chooses random frequencies for the symbols that must occur and for others, and one of many possible alias
// tables.
func (w pageWriter) table(must []bool) (freq, divider, alias [16]byte) {
	left := 256
	var shares [16]int
	for k := range 16 {
		if must[k] {
			shares[k], left = 1, left-1
		}
	}
	kinds := 0
	for k := range 16 {
		if shares[k] > 0 {
			kinds++
		}
	}
	for k := 0; kinds < 2; k++ { // a frequency is at most 255
		if shares[k] == 0 {
			shares[k], left, kinds = 1, left-1, kinds+1
		}
	}
	for left > 0 {
		k := w.r.IntN(16)
		if shares[k] == 0 && w.r.IntN(4) > 0 {
			continue
		}
		n := min(left, 1+w.r.IntN(40), 255-shares[k])
		shares[k], left = shares[k]+n, left-n
	}
	for k := range 16 {
		freq[k] = byte(shares[k])
	}
	// Buckets are closed in any order. If a symbol cannot fill its bucket, the rest goes to any symbol with more than
	// 16 slots left. Such a symbol exists, because some symbol has fewer than 16 slots left.
	rest := shares
	open := w.r.Perm(16)
	for len(open) > 0 {
		at := slices.IndexFunc(open, func(b int) bool { return rest[b] < 16 })
		if at < 0 {
			break
		}
		b := open[at]
		open = slices.Delete(open, at, at+1)
		givers := slices.DeleteFunc(slices.Clone(open), func(k int) bool { return rest[k] <= 16 })
		giver := givers[w.r.IntN(len(givers))]
		divider[b], alias[b] = byte(rest[b]), byte(giver)
		rest[giver] -= 16 - rest[b]
	}
	for _, b := range open {
		divider[b], alias[b] = 16, byte(b)
	}
	return freq, divider, alias
}

// chunk writes size bytes of random elements with few different values, and returns the chunk and the bytes.
func (w pageWriter) chunk(transform uint8, size, segTiles int) (chunk, logical []byte) {
	f := page[transform]
	tiles := size * 8 / f.width / 256
	logical = make([]byte, size)
	palette, few := w.fill(logical, f, tiles*256)
	head := make([]byte, 96)
	binary.LittleEndian.PutUint32(head[4:], uint32(tiles))
	for k := range 16 {
		if f.identity {
			head[16+k] = byte(k)
		}
	}
	// code maps values to symbols. Values without a symbol are escaped, and sometimes other values.
	code := map[byte]int{}
	escape := -1
	must := make([]bool, 16)
	symbols := w.r.Perm(16)
	if f.identity {
		for _, v := range few {
			code[v], must[v] = int(v), true
		}
	} else {
		for _, v := range few[:min(len(few), len(palette))] {
			k := symbols[len(code)]
			code[v], must[k] = k, true
		}
		if len(few) > len(palette) || len(code) < 16 && w.r.IntN(2) == 0 {
			escape = symbols[len(code)]
			must[escape] = true
		}
	}
	freq, divider, alias := w.table(must)
	copy(head[32:], freq[:])
	copy(head[48:], divider[:])
	copy(head[64:], alias[:])
	head[3] = byte(escape + 1)
	if !f.identity {
		for v, k := range code {
			head[16+k] = v
		}
		for k := range 16 { // symbols that do not occur may have any value
			if freq[k] > 0 && !must[k] {
				head[16+k] = byte(w.r.IntN(1 << len(f.value)))
			}
		}
	}
	symbol, rank, err := pageSlots(freq[:], divider[:], alias[:])
	if err != nil {
		panic(err)
	}
	slotOf := map[[2]int]int{}
	for s := range 256 {
		slotOf[[2]int{int(symbol[s]), rank[s]}] = s
	}
	planes := w.planes(head, f, logical, tiles)
	segs := (tiles + segTiles - 1) / segTiles
	first := (96 + 8*(segs+1) + 15) / 16 * 16
	chunk = append(head, make([]byte, first-96)...)
	for g := range segs {
		lo, hi := g*segTiles*256, min(tiles, (g+1)*segTiles)*256
		binary.LittleEndian.PutUint32(chunk[96+8*g:], uint32(len(chunk)))
		seg, escs := w.segment(f, logical, lo, hi, code, escape, freq, slotOf)
		binary.LittleEndian.PutUint32(chunk[96+8*g+4:], uint32(escs))
		chunk = append(chunk, seg...)
	}
	binary.LittleEndian.PutUint32(chunk[96+8*segs:], uint32(len(chunk)))
	for _, p := range planes {
		chunk = append(chunk, p...)
	}
	return append(chunk, logical[tiles*256*f.width/8:]...), logical
}

// fill fills logical with elements. The first n are encoded. palette has the values that may get symbols; few has all
// values that occur.
func (w pageWriter) fill(logical []byte, f pageForm, n int) (palette, few []byte) {
	for i := range logical {
		logical[i] = byte(w.r.Uint32())
	}
	all := w.r.Perm(1 << len(f.value))
	few = make([]byte, min(len(all), 1+w.r.IntN(24)))
	for i := range few {
		few[i] = byte(all[i])
	}
	still := w.r.Uint32() // which planes are constant, and their bits
	for i := range n {
		e := f.element(logical, i)
		at := w.r.IntN(len(few))
		e = e&^place(1<<len(f.value)-1, f.value) | place(uint32(few[at*at/len(few)]), f.value)
		for k, bits := range f.planes {
			if still>>k&1 == 1 {
				e = e&^place(1<<len(bits)-1, bits) | place(still>>8&(1<<len(bits)-1), bits)
			}
		}
		f.put(logical, i, e)
	}
	return few[:min(len(few), 1+w.r.IntN(15))], few
}

// planes returns the stored planes of a chunk, and writes the constants of the others to the head.
func (w pageWriter) planes(head []byte, f pageForm, logical []byte, tiles int) (planes [][]byte) {
	for k, bits := range f.planes {
		p := make([]byte, 32*len(bits)*tiles)
		same := true
		first := pick(f.element(logical, 0), bits)
		for i := range tiles * 256 {
			v := pick(f.element(logical, i), bits)
			same = same && v == first
			b := i * len(bits)
			p[b/8] |= byte(v << (b % 8))
		}
		if same && w.r.IntN(3) > 0 {
			head[2] |= 1 << k
			head[8+k] = byte(first)
			continue
		}
		planes = append(planes, p)
	}
	return planes
}

// segment encodes the symbols lo..hi, from last to first.
func (w pageWriter) segment(f pageForm, logical []byte, lo, hi int, code map[byte]int, escape int, freq [16]byte,
	slotOf map[[2]int]int) (seg []byte, escs int) {
	syms := make([]int, hi-lo)
	var positions, values []byte
	for i := range syms {
		v := byte(pick(f.element(logical, lo+i), f.value))
		k, has := code[v]
		if !has || escape >= 0 && w.r.IntN(50) == 0 {
			k = escape
			positions, values = binary.LittleEndian.AppendUint16(positions, uint16(i)), append(values, v)
		}
		syms[i] = k
	}
	var x [32]uint64
	for l := range x {
		x[l] = 1 << 16
	}
	var words []uint16
	code1 := func(l, k int) {
		n := uint64(freq[k])
		x[l] = x[l]/n<<8 | uint64(slotOf[[2]int{k, int(x[l] % n)}])
	}
	for t := len(syms) - 256; t >= 0; t -= 256 {
		for pair := 6; pair >= 0; pair -= 2 {
			for l := 31; l >= 0; l-- {
				k0, k1 := syms[t+owners[pair][l]], syms[t+owners[pair+1][l]]
				if x[l] >= uint64(freq[k0])*uint64(freq[k1])<<16 {
					words = append(words, uint16(x[l]))
					x[l] >>= 16
				}
				code1(l, k1)
				code1(l, k0)
			}
		}
	}
	for l := range x {
		seg = binary.LittleEndian.AppendUint32(seg, uint32(x[l]))
	}
	slices.Reverse(words)
	for _, word := range words {
		seg = binary.LittleEndian.AppendUint16(seg, word)
	}
	seg = append(append(seg, positions...), values...)
	return append(seg, make([]byte, -len(seg)&15)...), len(values)
}
