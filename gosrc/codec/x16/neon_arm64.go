//go:build arm64 && !scalar

package x16

// Decodes with NEON, which every 64-bit Arm processor supports. The kernel processes the low bytes of 16 states at a
// time, because TBL looks up 16 bytes in a table of 16.

import (
	"bytes"
)

// slack is the number of bytes that must follow the cursor for the kernel to decode one tile without checks: 4 pairs
// of steps read at most 256 bytes, and the last load of 8 words reads 16 bytes more.
const slack = 272

// tablesNEON holds a chunk's tables: the first three are indexed by bucket, the others by symbol. The assembly code
// relies on their order.
type tablesNEON struct {
	divider, alias, bias [16]uint8 // bias is modulo 256, like ranks
	freq, values         [16]uint8
}

type fastTables struct{ neon tablesNEON }

func (f *fastTables) build(_ Level, y *symbols) {
	t := &f.neon
	t.divider, t.alias, t.freq, t.values = y.table.divider, y.table.alias, y.table.freq, y.values
	for b, bias := range y.table.aliasBias() {
		t.bias[b] = uint8(bias)
	}
}

func detectLevels() []Level { return []Level{Scalar, NEON} }

// ordersNEON holds the constants of the kernel: four orders that extend 4 of 16 bytes to dwords, a bit for each of 8
// lanes, and the order of the units of 16 lanes.
var ordersNEON = func() (o [6][16]uint8) {
	for i := range 4 {
		for j := range o[i] {
			o[i][j] = 255 // TBL gives 0
			if j%4 == 0 {
				o[i][j] = uint8(4*i + j/4)
			}
		}
	}
	for l := range 8 {
		o[4][2*l] = 1 << l
	}
	for l := range 16 {
		o[5][unitStart(l)/8] = uint8(l)
	}
	return
}()

// expandNEON lists, for each set of 8 lanes that need a word, which bytes each lane gets. bytesNEON is the total number
// of these bytes.
var expandNEON, bytesNEON = func() (t [256][16]uint8, n [256]uint8) {
	for m := range t {
		for l := range 8 {
			t[m][2*l], t[m][2*l+1] = 255, 255
			if m>>l&1 == 1 {
				t[m][2*l], t[m][2*l+1] = n[m], n[m]+1
				n[m] += 2
			}
		}
	}
	return
}()

// decodeFast decodes tiles of each segment until the segment has enough tiles or too few input bytes are left.
func (d *decoder) decodeFast(run []segment) {
	if d.level != NEON {
		return
	}
	most := len(d.chunk.src) - slack
	for i := range run {
		s := &run[i]
		from := s.got
		for ; s.got < s.want && s.cur <= most; s.got++ {
			s.cur += tileNEON(&s.x, &d.chunk.src[s.cur], &d.fast.neon, (*[tileSyms]byte)(s.vals[s.got*tileSyms:]))
		}
		if d.chunk.symbols.escape >= 0 {
			s.escs += bytes.Count(s.vals[from*tileSyms:s.got*tileSyms], []byte{d.chunk.symbols.sentinel})
		}
	}
}

// mergeFast is mergeScalar for the transforms that it supports. It returns false for others.
func mergeFast(_ Level, transform uint8, dst, vals []byte, p *[maxPlanes][]byte) bool {
	n := len(vals)
	if n == 0 {
		return true
	}
	switch transform {
	case BF16:
		_, _ = dst[2*n-1], p[0][n-1]
		mergeBF16NEON(&dst[0], &vals[0], &p[0][0], n)
	case FP32:
		_, _, _, _ = dst[4*n-1], p[0][n-1], p[1][n-1], p[2][n-1]
		mergeFP32NEON(&dst[0], &vals[0], &p[0][0], &p[1][0], &p[2][0], n)
	default:
		return false
	}
	return true
}

// tileNEON decodes a tile of one segment and returns the number of bytes of words that it read. At least slack bytes
// must be readable at words.
//
//go:noescape
func tileNEON(states *[lanes]uint32, words *byte, t *tablesNEON, out *[tileSyms]byte) (used int)

// mergeBF16NEON joins n values with their plane. n must be a multiple of 16.
//
//go:noescape
func mergeBF16NEON(dst, vals, plane *byte, n int)

// mergeFP32NEON joins n values with their planes. n must be a multiple of 16.
//
//go:noescape
func mergeFP32NEON(dst, vals, high, middle, low *byte, n int)
