package gdeflate

// Decodes GDeflate streams.

import (
	"encoding/binary"
	"sync"

	"github.com/overwire/overwire/gosrc/errs"
)

// A decoder decodes one stream. If dst is nil, it only counts bytes.
type decoder struct {
	src  []byte
	at   int // offset of the next word
	lane [lanes]struct {
		bits uint64
		n    int // number of bits, at least 32
	}
	dst  []byte
	out  int64 // bytes so far, including matches that still lack their distance
	want int64 // maximum number of bytes

	lit, dist, lens table
	err             error
}

var decoders = sync.Pool{New: func() any { return new(decoder) }}

func corruptError(format string, args ...any) error {
	return errs.New(errs.ErrCorrupt, "GDeflate: "+format, args...)
}

// dropBits removes n bits from a lane, and reads the lane's next word if fewer than 32 bits are left.
func (d *decoder) dropBits(lane, n int) bool {
	l := &d.lane[lane]
	l.bits >>= n
	if l.n -= n; l.n < 32 {
		if len(d.src)-d.at < 4 {
			d.err = corruptError("the stream is truncated at byte %d", d.at)
			return false
		}
		l.bits |= uint64(binary.LittleEndian.Uint32(d.src[d.at:])) << l.n
		l.n += 32
		d.at += 4
	}
	return true
}

func (d *decoder) takeBits(lane, n int) (int, bool) {
	v := int(d.lane[lane].bits & (1<<n - 1))
	return v, d.dropBits(lane, n)
}

func (d *decoder) decodeStream() error {
	if len(d.src) < 4*lanes {
		return corruptError("the stream is too short: %d bytes, expected at least %d", len(d.src), 4*lanes)
	}
	for i := range d.lane {
		d.lane[i].bits, d.lane[i].n = uint64(binary.LittleEndian.Uint32(d.src[4*i:])), 32
	}
	d.at, d.out, d.err = 4*lanes, 0, nil
	for last := 0; last == 0; {
		header := d.lane[0].bits
		last = int(header & 1)
		if !d.dropBits(0, 3) {
			return d.err
		}
		var err error
		switch header >> 1 & 3 {
		case 0:
			err = d.decodeStored()
		case 1:
			lit, dist := fixedCodes()
			if err = d.lit.buildFrom(lit.length); err == nil {
				err = d.dist.buildFrom(dist.length)
			}
			if err == nil {
				err = d.decodeBlock()
			}
		case 2:
			if err = d.readCodes(); err == nil {
				err = d.decodeBlock()
			}
		default:
			err = corruptError("a block has an unknown kind")
		}
		if err != nil {
			return err
		}
	}
	// Some writers append the words of another round.
	if rest := d.src[d.at:]; len(rest) > 4*lanes {
		return corruptError("%d bytes follow the end of the stream", len(rest))
	}
	for i, b := range d.src[d.at:] {
		if b != 0 {
			return corruptError("data follows the end of the stream, at byte %d", d.at+i)
		}
	}
	return nil
}

// growOutput grows the output by n bytes, up to the maximum.
func (d *decoder) growOutput(n int64) error {
	if n > d.want-d.out {
		return corruptError("the content has more than %d bytes", d.want)
	}
	d.out += n
	return nil
}

func (d *decoder) decodeStored() error {
	n, ok := d.takeBits(0, 16)
	if !ok {
		return d.err
	}
	at := d.out
	if err := d.growOutput(int64(n)); err != nil {
		return err
	}
	for i := range n {
		b, ok := d.takeBits(i%lanes, 8)
		if !ok {
			return d.err
		}
		if d.dst != nil {
			d.dst[at+int64(i)] = byte(b)
		}
	}
	return nil
}

// readCodes reads the two codes of a dynamic block.
func (d *decoder) readCodes() error {
	counts, ok := d.takeBits(0, 14)
	if !ok {
		return d.err
	}
	nlit, ndist, nlens := counts&31+257, counts>>5&31+1, counts>>10+4
	var lens [19]uint8
	for i := range nlens {
		n, ok := d.takeBits(i, 3)
		if !ok {
			return d.err
		}
		lens[codeOrder[i]] = uint8(n)
	}
	if err := d.lens.buildFrom(lens[:]); err != nil {
		return err
	}
	var lengths [literals + dists]uint8
	for at, lane := 0, 0; at < nlit+ndist; lane = (lane + 1) % lanes {
		bits := d.lane[lane].bits
		sym, n := d.lens.decodeSymbol(bits)
		if n == 0 {
			return corruptError("invalid code length at byte %d", d.at)
		}
		bits >>= n
		var value uint8
		times := 1
		switch {
		case sym < 16:
			value = uint8(sym)
		case sym == 16:
			if at == 0 {
				return corruptError("a code length is repeated before the first one")
			}
			value, times = lengths[at-1], 3+int(bits&3)
			n += 2
		case sym == 17:
			times = 3 + int(bits&7)
			n += 3
		default:
			times = 11 + int(bits&127)
			n += 7
		}
		if times > nlit+ndist-at {
			return corruptError("there are more code lengths than codes")
		}
		for range times {
			lengths[at] = value
			at++
		}
		if !d.dropBits(lane, n) {
			return d.err
		}
	}
	if lengths[endBlock] == 0 {
		return corruptError("a block has no end")
	}
	if err := d.lit.buildFrom(lengths[:nlit]); err != nil {
		return err
	}
	return d.dist.buildFrom(lengths[nlit : nlit+ndist])
}

func (d *decoder) decodeBlock() error {
	var due [lanes]int32 // for each lane, the length of a match that still lacks its distance
	var to [lanes]int64  // the match's offset in the output
	for isLast := false; ; {
		final := isLast // one more round, for the remaining distances
		for lane := range d.lane {
			bits := d.lane[lane].bits
			if length := due[lane]; length > 0 {
				due[lane] = 0
				sym, n := d.dist.decodeSymbol(bits)
				if n == 0 {
					return corruptError("invalid distance at byte %d", d.at)
				}
				extra := int(distExtra[sym])
				dist := int64(distBase[sym]) + int64(bits>>n&(1<<extra-1))
				if dist > to[lane] {
					return corruptError("invalid distance %d of a match at byte %d", dist, to[lane])
				}
				if d.dst != nil {
					repeatPattern(d.dst[to[lane]-dist:to[lane]+int64(length)], int(dist))
				}
				if !d.dropBits(lane, n+extra) {
					return d.err
				}
				continue
			}
			if isLast {
				continue
			}
			sym, n := d.lit.decodeSymbol(bits)
			switch {
			case n == 0 || sym > endBlock+len(lengthBase):
				return corruptError("invalid symbol at byte %d", d.at)
			case sym < endBlock:
				if d.out == d.want {
					return d.growOutput(1)
				}
				if d.dst != nil {
					d.dst[d.out] = byte(sym)
				}
				d.out++
			case sym == endBlock:
				isLast = true
			default:
				extra := int(lengthExtra[sym-endBlock-1])
				length := lengthBase[sym-endBlock-1] + int32(bits>>n&(1<<extra-1))
				due[lane], to[lane] = length, d.out
				if err := d.growOutput(int64(length)); err != nil {
					return err
				}
				n += extra
			}
			if !d.dropBits(lane, n) {
				return d.err
			}
		}
		if final {
			return nil
		}
	}
}

// repeatPattern repeats the first dist bytes of b until the end of b.
func repeatPattern(b []byte, dist int) {
	for n := dist; n < len(b); n *= 2 {
		copy(b[n:], b[:n])
	}
}

// Size returns the number of bytes that src decodes to. It decodes src and discards the output. Errors are
// errs.ErrCorrupt.
func Size(src []byte) (int64, error) {
	d := decoders.Get().(*decoder)
	defer d.free()
	d.src, d.dst, d.want = src, nil, 1<<62
	if err := d.decodeStream(); err != nil {
		return 0, err
	}
	return d.out, nil
}

// Decode fills dst, which must have the length of the content. A different length or an invalid stream gives
// errs.ErrCorrupt. It never writes outside dst. It is safe for concurrent use.
func Decode(dst, src []byte) error {
	d := decoders.Get().(*decoder)
	defer d.free()
	d.src, d.dst, d.want = src, dst, int64(len(dst))
	if err := d.decodeStream(); err != nil {
		return err
	}
	if d.out != d.want {
		return corruptError("the content has %d bytes, expected %d", d.out, d.want)
	}
	return nil
}

func (d *decoder) free() {
	d.src, d.dst = nil, nil
	decoders.Put(d)
}
