// Package delta is codec 5. It encodes the changes between two chunks of equal length as the gaps between changed
// elements and the XOR of each element. Apply XORs the changes into memory in place; a second Apply restores it.
//
// A chunk (docs/format.md 7.2) is
//
//	u8 mode | u8 k | u8 s | u8 0 | u4 length[24] | body
//
// In mode 1, the body is the XOR of all bytes. In mode 0, the chunk is divided into runs of 512 << s bytes. The body
// is u16 bits[runs], zeros to a multiple of 4 bytes, the bits of all runs, lowest bit first, and zeros to a multiple
// of 4 bytes. For each changed element, a run contains the distance from the previous changed element (Golomb-Rice
// with k low bits), the class of the element's XOR in a canonical prefix code, and the remaining bits of the XOR.
//
// Only this package writes this layout. Sources: S. Golomb, "Run-length encodings" (1966); R. Rice, "Some practical
// universal noiseless coding techniques" (1979).
package delta

import (
	"encoding/binary"
	"math/bits"

	"github.com/overwire/overwire/gosrc/errs"
)

const (
	// MaxBytes is the maximum number of logical bytes of a chunk.
	MaxBytes = 16 << 20
	// Head is the size of a stored chunk's header. A chunk has at most this size plus its logical bytes, rounded up
	// to a multiple of 4.
	Head = 16

	modeCoded = 0
	modeRaw   = 1

	runBytes = 512 // bytes of a run with s = 0
	maxS     = 9
	maxK     = 24
	ones     = 8 // number of classes for the XORs 1, 11, 111, ... in binary
	classes  = ones + 16
	maxCode  = 8 // maximum code length in bits
	aim      = 24
	maxBits  = 1<<16 - 1 // maximum number of bits in a run
	skip     = 64        // bytes that are compared at once to skip unchanged ones
)

var le = binary.LittleEndian

// Room returns the maximum number of bytes that Encode appends for a chunk of n bytes.
func Room(n int) int { return Head + (n+3)&^3 }

// log2Width returns log2 of the element size in bytes: 0 to 3.
func log2Width(width int) (int, error) {
	if width != 1 && width != 2 && width != 4 && width != 8 {
		return 0, errs.New(errs.ErrArgument, "invalid element size %d: expected 1, 2, 4 or 8 bytes", width)
	}
	return bits.TrailingZeros(uint(width)), nil
}

// log2Group returns log2 of the number of bit lengths that share a class.
func log2Group(lg int) int { return max(0, lg-1) }

// classOf returns the class of a nonzero XOR, and the number of its low bits that follow the class.
func classOf(x uint64, lg int) (class, rest int) {
	n := bits.Len64(x)
	if x&(x+1) == 0 && n <= ones {
		return n - 1, 0
	}
	g := log2Group(lg)
	class = (n - 1) >> g
	return ones + class, restOf(ones+class, lg)
}

func restOf(class, lg int) int {
	switch g := log2Group(lg); {
	case class < ones:
		return 0
	case g == 0:
		return class - ones // the highest bit is known
	default:
		return (class - ones + 1) << g
	}
}

// valueOf returns the XOR for a class and the bits that follow it.
func valueOf(class int, rest uint64, lg int) uint64 {
	switch {
	case class < ones:
		return 1<<(class+1) - 1
	case log2Group(lg) == 0:
		return rest | 1<<(class-ones)
	}
	return rest
}

// codeLengths returns a code length of at most maxCode bits for each class that occurs. The codes are complete,
// except that a single class gets one bit. It only uses integer arithmetic, so every encoder gets the same lengths.
func codeLengths(count *[classes]uint32) (length [classes]uint8) {
	total, kinds, sum := uint64(0), 0, 0
	for _, c := range count {
		total += uint64(c)
	}
	for i, c := range count {
		if c == 0 {
			continue
		}
		n := 1
		for n < maxCode && uint64(c)<<n < total {
			n++
		}
		length[i] = uint8(n)
		kinds++
		sum += 1 << (maxCode - n)
	}
	if kinds < 2 {
		return length
	}
	const full = 1 << maxCode
	for sum > full { // lengthen the code of the rarest class
		at := -1
		for i, c := range count {
			if c > 0 && length[i] < maxCode && (at < 0 || c < count[at]) {
				at = i
			}
		}
		length[at]++
		sum -= 1 << (maxCode - length[at])
	}
	for sum < full { // shorten the code of the most frequent class for which this is possible
		at := -1
		for i, c := range count {
			if c > 0 && length[i] > 1 && 1<<(maxCode-length[i]) <= full-sum && (at < 0 || c > count[at]) {
				at = i
			}
		}
		sum += 1 << (maxCode - length[at])
		length[at]--
	}
	return length
}

// codeStarts returns where the codes of each class start among the 256 values of maxCode bits, highest bit first, and
// the total number of values in use.
func codeStarts(length *[classes]uint8) (start [classes]int, sum int) {
	for n := uint8(1); n <= maxCode; n++ {
		for i := range length {
			if length[i] == n {
				start[i] = sum
				sum += 1 << (maxCode - n)
			}
		}
	}
	return start, sum
}

// riceParameter returns k for n elements with c changes. c must be at least 1.
func riceParameter(n, c int) int {
	return bits.Len64(63 * uint64(2*n-c) / (262 * uint64(c))) // Rice's optimum: log2(0.48 (mean gap + 1/2)) + 1
}

// runOf returns s for a chunk of n bytes with c changes, so that a run has about `aim` changes.
func runOf(n, c int) int {
	s := 0
	for s < maxS && uint64(c)*(runBytes<<s) < aim*uint64(n) {
		s++
	}
	return s
}

// loadElement returns element i of p. Elements have 1 << lg bytes.
func loadElement(p []byte, i, lg int) uint64 {
	switch lg {
	case 0:
		return uint64(p[i])
	case 1:
		return uint64(le.Uint16(p[2*i:]))
	case 2:
		return uint64(le.Uint32(p[4*i:]))
	}
	return le.Uint64(p[8*i:])
}

// eachDifference calls f for every changed element in [lo, hi).
func eachDifference(now, base []byte, lo, hi, lg int, f func(i int, x uint64)) {
	per := 8 >> lg
	mask := ^uint64(0) >> (64 - 8<<lg)
	i := lo
	for ; i+per <= hi; i += per {
		at := i << lg
		for at%skip == 0 && at+skip <= hi<<lg && [skip]byte(now[at:]) == [skip]byte(base[at:]) {
			at += skip
		}
		if i = at >> lg; i+per > hi {
			break
		}
		x := le.Uint64(now[at:]) ^ le.Uint64(base[at:])
		for k := i; x != 0; k++ {
			if v := x & mask; v != 0 {
				f(k, v)
			}
			if lg == 3 {
				break
			}
			x >>= 8 << lg
		}
	}
	for ; i < hi; i++ {
		if x := loadElement(now, i, lg) ^ loadElement(base, i, lg); x != 0 {
			f(i, x)
		}
	}
}

// Changed returns the number of elements that differ.
func Changed(now, base []byte, width int) (n int64, err error) {
	lg, err := log2Width(width)
	if err != nil || len(now) != len(base) || len(now)%width != 0 {
		return 0, errs.New(errs.ErrArgument, "invalid sizes: %d and %d bytes with elements of %d bytes: expected "+
			"equal multiples of the element size, which is 1, 2, 4 or 8", len(now), len(base), width)
	}
	eachDifference(now, base, 0, len(now)/width, lg, func(int, uint64) { n++ })
	return n, nil
}

// A writer appends bits, lowest first.
type writer struct {
	p    []byte
	acc  uint64
	have int
}

func (w *writer) putBits(v uint64, n int) {
	for n > 32 {
		w.putBits(v&0xffffffff, 32)
		v, n = v>>32, n-32
	}
	w.acc |= v << w.have
	if w.have += n; w.have >= 32 {
		w.p = le.AppendUint32(w.p, uint32(w.acc))
		w.acc >>= 32
		w.have -= 32
	}
}

// Encode appends the delta from base to now, or nothing if they are equal. Both must have the same length, which is
// at most MaxBytes and a multiple of the element width (1, 2, 4 or 8). The same bytes give the same delta on every
// machine.
func Encode(dst, now, base []byte, width int) ([]byte, error) {
	lg, err := log2Width(width)
	if err != nil || len(now) != len(base) || len(now)%width != 0 || len(now) > MaxBytes {
		return dst, errs.New(errs.ErrArgument, "invalid sizes: %d and %d bytes with elements of %d bytes: expected "+
			"equal multiples of the element size, which is 1, 2, 4 or 8, and at most %d bytes",
			len(now), len(base), width, MaxBytes)
	}
	n := len(now) >> lg
	var count [classes]uint32
	changes := 0
	eachDifference(now, base, 0, n, lg, func(_ int, x uint64) {
		c, _ := classOf(x, lg)
		count[c]++
		changes++
	})
	if changes == 0 {
		return dst, nil
	}
	from := len(dst)
	if dst, ok := appendCoded(dst, now, base, lg, &count, changes); ok {
		return dst, nil
	}
	dst = append(dst[:from], modeRaw, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
	for i := range now {
		dst = append(dst, now[i]^base[i])
	}
	for (len(dst)-from)%4 != 0 {
		dst = append(dst, 0)
	}
	return dst, nil
}

// appendCoded appends a chunk of mode 0 and reports whether it is shorter than mode 1.
func appendCoded(dst, now, base []byte, lg int, count *[classes]uint32, changed int) ([]byte, bool) {
	n := len(now) >> lg
	k, s := riceParameter(n, changed), runOf(len(now), changed)
	length := codeLengths(count)
	start, _ := codeStarts(&length)
	from, room := len(dst), Room(len(now))
	dst = append(dst, modeCoded, byte(k), byte(s), 0)
	for i := 0; i < classes; i += 2 {
		dst = append(dst, length[i]|length[i+1]<<4)
	}
	run := runBytes << s >> lg
	runs := (n + run - 1) / run
	table := len(dst)
	dst = append(dst, make([]byte, (2*runs+3)&^3)...)
	w := writer{p: dst}
	for r := range runs {
		before, at := 8*len(w.p)+w.have, r*run
		eachDifference(now, base, at, min(n, at+run), lg, func(i int, x uint64) {
			gap := i - at
			at = i + 1
			for q := gap >> k; ; q -= 32 {
				if q < 32 {
					w.putBits(1<<q, q+1)
					break
				}
				w.putBits(0, 32)
			}
			w.putBits(uint64(gap)&(1<<k-1), k)
			c, rest := classOf(x, lg)
			w.putBits(uint64(bits.Reverse8(uint8(start[c]))), int(length[c]))
			if rest > 0 {
				w.putBits(x&(^uint64(0)>>(64-rest)), rest)
			}
		})
		used := 8*len(w.p) + w.have - before
		if used > maxBits || len(w.p)-from >= room {
			return dst, false
		}
		le.PutUint16(w.p[table+2*r:], uint16(used))
	}
	if w.have > 0 {
		w.putBits(0, 32-w.have)
	}
	return w.p, len(w.p)-from < room
}
