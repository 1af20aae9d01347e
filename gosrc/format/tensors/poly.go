package tensors

import "math/bits"

// Poly1305 (RFC 8439, 2.5) of whole groups of blocks by eight sums side by side,
// for boxes that are long; numbers modulo 2^130-5 in limbs of 44, 44 and 42 bits.

const (
	blockBytes = 16
	polyGroup  = 8 * blockBytes
	low44      = 1<<44 - 1
	low42      = 1<<42 - 1
)

// polyOrder are the blocks of a group by the sum that each is in.
var polyOrder = [8]int{0, 4, 1, 5, 2, 6, 3, 7}

type limbs [3]uint64

// times is a times b. Limbs of both may be a few bits too long.
func (a limbs) times(b limbs) limbs {
	b1, b2 := 20*b[1], 20*b[2] // 2^132 is 20
	var hi, lo [3]uint64
	mac := func(k int, x, y uint64) {
		h, l := bits.Mul64(x, y)
		var c uint64
		lo[k], c = bits.Add64(lo[k], l, 0)
		hi[k] += h + c
	}
	mac(0, a[0], b[0])
	mac(0, a[1], b2)
	mac(0, a[2], b1)
	mac(1, a[0], b[1])
	mac(1, a[1], b[0])
	mac(1, a[2], b2)
	mac(2, a[0], b[2])
	mac(2, a[1], b[1])
	mac(2, a[2], b[0])
	carry := func(k int, n uint) {
		var c uint64
		lo[k+1], c = bits.Add64(lo[k+1], hi[k]<<(64-n)|lo[k]>>n, 0)
		hi[k+1] += c + hi[k]>>n
		lo[k] &= 1<<n - 1
	}
	carry(0, 44)
	carry(1, 44)
	c := hi[2]<<22 | lo[2]>>42
	return limbs{lo[0] + 5*c, lo[1], lo[2] & low42}.carried()
}

func (a limbs) plus(b limbs) limbs {
	return limbs{a[0] + b[0], a[1] + b[1], a[2] + b[2]}.carried()
}

// carried has limbs of their length, but for the second, which may be 2^44.
func (a limbs) carried() limbs {
	a[1] += a[0] >> 44
	a[2] += a[1] >> 44
	c := a[2] >> 42
	a = limbs{a[0]&low44 + 5*c, a[1] & low44, a[2] & low42}
	a[1] += a[0] >> 44
	a[0] &= low44
	return a
}

// block is a block of up to 16 bytes as a number, the one behind them included.
func block(p []byte) limbs {
	var b [24]byte
	copy(b[:], p)
	b[len(p)] = 1
	lo, hi, top := le.Uint64(b[:]), le.Uint64(b[8:]), le.Uint64(b[16:])
	return limbs{lo & low44, (lo>>44 | hi<<20) & low44, hi>>24 | top<<40}
}

// A poly is a message on its way to its authenticator.
type poly struct {
	s      [2]uint64
	acc    [3][8]uint64
	powers [8]limbs // r to the 1, 2, ...
	by     [5]uint64
}

func newPoly(key *[32]byte) *poly {
	var p poly
	clamped := *key
	for i := 3; i < 16; i += 4 {
		clamped[i] &= 15
	}
	for i := 4; i < 16; i += 4 {
		clamped[i] &= 252
	}
	r := block(clamped[:16])
	r[2] &= low42 >> 2 // without the one behind
	p.s = [2]uint64{le.Uint64(key[16:]), le.Uint64(key[24:])}
	p.powers[0] = r
	for i := 1; i < len(p.powers); i++ {
		p.powers[i] = p.powers[i-1].times(r)
	}
	top := p.powers[7]
	p.by = [5]uint64{top[0], top[1], top[2], 20 * top[1], 20 * top[2]}
	return &p
}

// groups takes whole groups of blocks.
func (p *poly) groups(b []byte) {
	if n := len(b) / polyGroup; n > 0 {
		poly8(&p.acc, &p.by, &b[0], n)
	}
}

// sum takes the rest of the message, whatever its length, and ends it.
func (p *poly) sum(rest []byte) (mac [macBytes]byte) {
	n := len(rest) &^ (polyGroup - 1)
	p.groups(rest[:n])
	rest = rest[n:]
	var h limbs
	for i, at := range polyOrder {
		h = h.plus(limbs{p.acc[0][i], p.acc[1][i], p.acc[2][i]}.times(p.powers[7-at]))
	}
	for len(rest) > 0 {
		n := min(len(rest), blockBytes)
		h = h.plus(block(rest[:n])).times(p.powers[0])
		rest = rest[n:]
	}
	h = h.carried().carried()
	// Minus 2^130-5, if it is not below it.
	g := limbs{h[0] + 5, h[1], h[2]}
	g[1] += g[0] >> 44
	g[2] += g[1] >> 44
	over := -(g[2] >> 42) // all ones, if it is not
	for i := range h {
		h[i] = h[i]&^over | g[i]&over
	}
	h[0], h[1], h[2] = h[0]&low44, h[1]&low44, h[2]&low42
	lo, c := bits.Add64(h[0]|h[1]<<44, p.s[0], 0)
	hi, _ := bits.Add64(h[1]>>20|h[2]<<24, p.s[1], c)
	le.PutUint64(mac[:], lo)
	le.PutUint64(mac[8:], hi)
	return mac
}
