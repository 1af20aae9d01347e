package delta

// Parses, checks and applies chunks.

import (
	"math/bits"

	"github.com/overwire/overwire/gosrc/errs"
)

// A chunk is a stored chunk whose header has been parsed and checked. Its runs may still be invalid.
type chunk struct {
	raw           []byte // the XOR of all bytes in mode 1, otherwise nil
	k, run, runs  int    // parameter k, elements per run, number of runs
	n, lg         int
	table, stream []byte
	look          [1 << maxCode]uint32 // class << 16 | rest << 8 | code length, by the next maxCode bits; 0 if no code
}

func corruptError(format string, args ...any) error {
	return errs.New(errs.ErrCorrupt, format, args...)
}

// parseHeader reads the header of a chunk of n logical bytes.
func parseHeader(src []byte, n, width int) (*chunk, error) {
	lg, err := log2Width(width)
	if err != nil || n < 0 || n%width != 0 || n > MaxBytes {
		return nil, errs.New(errs.ErrArgument, "invalid size: %d bytes with elements of %d bytes", n, width)
	}
	if len(src) < Head || len(src)%4 != 0 || n == 0 {
		return nil, corruptError("invalid size: a delta of %d bytes for a chunk of %d bytes", len(src), n)
	}
	c := &chunk{n: n >> lg, lg: lg}
	if src[0] == modeRaw {
		if len(src) != Room(n) || !isZero(src[1:Head]) || !isZero(src[Head+n:]) {
			return nil, corruptError("invalid size: an uncoded delta of %d bytes for a chunk of %d bytes", len(src), n)
		}
		c.raw = src[Head : Head+n]
		return c, nil
	}
	if src[0] != modeCoded || src[1] > maxK || src[2] > maxS || src[3] != 0 {
		return nil, corruptError("invalid header of a delta: % x", src[:4])
	}
	c.k, c.run = int(src[1]), runBytes<<src[2]>>lg
	var length [classes]uint8
	kinds := 0
	for i := range length {
		length[i] = src[4+i/2] >> (4 * (i & 1)) & 15
		if length[i] > maxCode {
			return nil, corruptError("invalid code of %d bits", length[i])
		}
		if length[i] > 0 {
			kinds++
		}
	}
	start, sum := codeStarts(&length)
	if sum != 1<<maxCode && (kinds != 1 || sum != 1<<(maxCode-1)) {
		return nil, corruptError("the codes of a delta are incomplete: %d of 256", sum)
	}
	for i, l := range length {
		if l == 0 {
			continue
		}
		for j := range 1 << (maxCode - l) {
			c.look[bits.Reverse8(uint8(start[i]+j))] = uint32(i)<<16 | uint32(restOf(i, lg))<<8 | uint32(l)
		}
	}
	c.runs = (c.n + c.run - 1) / c.run
	end := Head + (2*c.runs+3)&^3
	if len(src) < end || !isZero(src[Head+2*c.runs:end]) {
		return nil, corruptError("invalid size: a delta of %d bytes with %d runs", len(src), c.runs)
	}
	c.table, c.stream = src[Head:Head+2*c.runs], src[end:]
	total := 0
	for r := range c.runs {
		total += int(le.Uint16(c.table[2*r:]))
	}
	if total == 0 || (total+31)/32*4 != len(c.stream) {
		return nil, corruptError("invalid size: a delta of %d bits in %d bytes", total, len(c.stream))
	}
	if n := total % 32; n != 0 && le.Uint32(c.stream[len(c.stream)-4:])>>n != 0 {
		return nil, corruptError("the padding of a delta is not zero")
	}
	return c, nil
}

func isZero(p []byte) bool {
	for _, b := range p {
		if b != 0 {
			return false
		}
	}
	return true
}

// A reader reads the bits of a chunk.
type reader struct {
	p   []byte
	pos int // bits
}

// peekBits returns at least 56 bits from pos on. After the last bit, it returns zeros.
func (r *reader) peekBits() uint64 {
	at := r.pos >> 3
	if at+8 <= len(r.p) {
		return le.Uint64(r.p[at:]) >> (r.pos & 7)
	}
	v := uint64(0)
	for i := len(r.p) - 1; i >= at; i-- {
		v = v<<8 | uint64(r.p[i])
	}
	return v >> (r.pos & 7)
}

// eachChange checks all runs, and calls f, if not nil, for every changed element in order.
func (c *chunk) eachChange(f func(i int, x uint64)) error {
	const sure = 56 // minimum number of bits that peekBits returns
	r := reader{p: c.stream}
	low := uint64(1)<<c.k - 1
	for run := range c.runs {
		end := r.pos + int(le.Uint16(c.table[2*run:]))
		at, last := run*c.run, min(c.n, (run+1)*c.run)
		for r.pos < end {
			gap := 0
			v := r.peekBits()
			for v&0xffffffff == 0 && r.pos < end {
				gap += 32
				r.pos += 32
				v = r.peekBits()
			}
			z := bits.TrailingZeros64(v | 1<<32)
			// v holds the bits after the first `used` bits.
			used := z + 1
			v >>= used
			if used+c.k+maxCode > sure {
				r.pos += used
				v, used = r.peekBits(), 0
			}
			// Even an invalid gap cannot overflow `at`: it is at most maxBits << maxK.
			at += (gap+z)<<c.k + int(v&low)
			v >>= c.k
			e := c.look[v&(1<<maxCode-1)]
			class, n, code := int(e>>16), int(e>>8&255), int(e&255)
			v >>= code
			if used += c.k + code; used+n > sure {
				r.pos += used
				v, used = r.peekBits(), 0
			}
			rest := v & (1<<min(n, 32) - 1)
			r.pos += used + n
			if n > 32 {
				r.pos -= n - 32
				rest |= (r.peekBits() & (^uint64(0) >> (96 - n))) << 32
				r.pos += n - 32
			}
			x := valueOf(class, rest, c.lg)
			if e == 0 || at >= last || r.pos > end || x == 0 || x>>(8<<c.lg) != 0 {
				return corruptError("invalid run %d of a delta: element %d, bit %d of %d", run, at, r.pos, end)
			}
			if class >= ones {
				if again, _ := classOf(x, c.lg); again != class {
					return corruptError("invalid run %d of a delta: %#x in class %d", run, x, class)
				}
			}
			if f != nil {
				f(at, x)
			}
			at++
		}
	}
	return nil
}

// Check checks a stored chunk for n logical bytes without applying it. An invalid chunk gives errs.ErrCorrupt. Apply
// accepts every chunk that Check accepts.
func Check(src []byte, n, width int) error {
	c, err := parseHeader(src, n, width)
	if err != nil || c.raw != nil {
		return err
	}
	return c.eachChange(nil)
}

// Apply XORs a stored chunk into dst. Applying it twice restores dst. The caller should Check the chunk first: Apply
// may apply a part of an invalid chunk. It never writes outside dst.
func Apply(dst, src []byte, width int) error {
	c, err := parseHeader(src, len(dst), width)
	if err != nil {
		return err
	}
	if c.raw != nil {
		for i, x := range c.raw {
			dst[i] ^= x
		}
		return nil
	}
	switch c.lg {
	case 0:
		return c.eachChange(func(i int, x uint64) { dst[i] ^= byte(x) })
	case 1:
		return c.eachChange(func(i int, x uint64) { le.PutUint16(dst[2*i:], le.Uint16(dst[2*i:])^uint16(x)) })
	case 2:
		return c.eachChange(func(i int, x uint64) { le.PutUint32(dst[4*i:], le.Uint32(dst[4*i:])^uint32(x)) })
	}
	return c.eachChange(func(i int, x uint64) { le.PutUint64(dst[8*i:], le.Uint64(dst[8*i:])^x) })
}
