package x16

// Chooses the symbols of a chunk and their frequencies.

import "math"

// escapeBits is the size of one escape in addition to its symbol: u16 + u8.
const escapeBits = 24

// A model determines how a chunk is encoded: which values have symbols, and how many slots each symbol has.
type model struct {
	palette [16]byte
	freq    [16]uint8
	escape  int // the escape symbol, or -1
	one     int // the only symbol, or -1
	// bits is the encoded size of the histogram's symbols and escapes.
	bits float64
}

// fitModel finds the cheapest model for a histogram of n > 0 values.
//
// The best m values to represent by symbols are the m most frequent ones, so trying every m finds the optimum. A value
// gets a symbol only if this is cheaper than escaping the value. The cost includes the slots that other symbols lose.
func fitModel(hist *[256]int, n int, identity bool) (best model) {
	var order [256]uint8
	kinds := 0
	if identity {
		m := model{escape: -1, one: -1}
		var counts [16]int
		for k := range 16 {
			m.palette[k] = byte(k)
			counts[k] = hist[k]
			if hist[k] == n {
				m.one = k
			}
		}
		if m.one >= 0 {
			return m
		}
		m.freq, m.bits = fitFreq(&counts, n)
		return m
	}
	for v, c := range hist {
		if c > 0 {
			order[kinds] = uint8(v)
			kinds++
		}
	}
	top := min(kinds, 16)
	selectTop(order[:kinds], hist, top)
	if kinds == 1 {
		best = model{escape: -1, one: 0}
		best.palette[0] = order[0]
		return best
	}
	best.bits = math.Inf(1)
	if kinds <= 16 {
		best = modelOf(order[:kinds], hist, n, 0)
	}
	escapeCount := n
	for _, v := range order[:min(15, kinds-1)] {
		escapeCount -= hist[v]
	}
	for m := min(15, kinds-1); m >= 1; m-- {
		if float64(escapeCount)*escapeBits >= best.bits {
			break // with fewer values there are only more escapes
		}
		if c := modelOf(order[:m], hist, n, escapeCount); c.bits < best.bits {
			best = c
		}
		escapeCount += hist[order[m-1]]
	}
	return best
}

// selectTop moves the most frequent values to the front, in order; ties are sorted by value.
func selectTop(order []uint8, hist *[256]int, top int) {
	for i := range top {
		b := i
		for j := i + 1; j < len(order); j++ {
			if c := hist[order[j]]; c > hist[order[b]] || c == hist[order[b]] && order[j] < order[b] {
				b = j
			}
		}
		order[i], order[b] = order[b], order[i]
	}
}

// modelOf returns the model with the best frequencies for a palette. The escape, if any, is the last symbol.
func modelOf(values []uint8, hist *[256]int, n, escaped int) model {
	m := model{escape: -1, one: -1}
	var counts [16]int
	for k, v := range values {
		m.palette[k] = v
		counts[k] = hist[v]
	}
	if escaped > 0 {
		m.escape = len(values)
		counts[m.escape] = escaped
	}
	m.freq, m.bits = fitFreq(&counts, n)
	m.bits += float64(escaped) * escapeBits
	return m
}

// log2 is a table of log2 for 1..256. Frequencies are never larger.
var log2 = func() (t [257]float64) {
	for i := 1; i < len(t); i++ {
		t[i] = math.Log2(float64(i))
	}
	return
}()

// fitFreq distributes 256 slots among counts that sum to n, so that the encoded size is minimal. At least two counts
// must not be zero. It returns the frequencies and the size in bits.
//
// The size is a sum of convex functions of each share, so moving single slots as long as this helps ends at the
// optimum.
func fitFreq(counts *[16]int, n int) (freq [16]uint8, bits float64) {
	var f [16]int
	var c [16]float64
	sum := 0
	for k, cnt := range counts {
		if cnt > 0 {
			c[k] = float64(cnt)
			f[k] = min(255, max(1, (cnt*512+n)/(2*n)))
			sum += f[k]
		}
	}
	more := func() (at int) { // the symbol that saves most with one more slot
		at, best := -1, -1.0
		for k := range f {
			if c[k] > 0 && f[k] < 255 {
				if g := c[k] * (log2[f[k]+1] - log2[f[k]]); g > best {
					at, best = k, g
				}
			}
		}
		return at
	}
	less := func() (at int) { // the symbol that loses least with one slot less
		at, best := -1, math.Inf(1)
		for k := range f {
			if f[k] > 1 {
				if g := c[k] * (log2[f[k]] - log2[f[k]-1]); g < best {
					at, best = k, g
				}
			}
		}
		return at
	}
	for ; sum < 256; sum++ {
		f[more()]++
	}
	for ; sum > 256; sum-- {
		f[less()]--
	}
	for {
		up, down := more(), less()
		if up < 0 || down < 0 || up == down ||
			c[up]*(log2[f[up]+1]-log2[f[up]]) <= c[down]*(log2[f[down]]-log2[f[down]-1]) {
			break
		}
		f[up]++
		f[down]--
	}
	for k := range f {
		freq[k] = uint8(f[k])
		bits += c[k] * (8 - log2[f[k]])
	}
	return freq, bits
}
