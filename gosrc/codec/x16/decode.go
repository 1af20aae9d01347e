package x16

// Decodes chunks with the fastest decoder for this machine.

import (
	"slices"
	"sync"

	"github.com/overwire/overwire/gosrc/errs"
)

// A Level is a decoder's instruction set.
type Level uint8

// Levels, from slow to fast.
const (
	Scalar Level = iota
	NEON
	AVX2
	AVX512
)

// String returns the level's name ("AVX-512").
func (l Level) String() string { return [...]string{"scalar", "NEON", "AVX2", "AVX-512"}[l] }

// levels are the levels that this machine and build support, from slow to fast. level is the one in use.
var (
	levels = detectLevels()
	best   = levels[len(levels)-1]
	level  = best
)

// Levels returns the levels that this machine and build support, from slow to fast.
func Levels() []Level { return slices.Clone(levels) }

// Best returns the fastest level that this machine and build support.
func Best() Level { return best }

// Using returns the level that Decode and Encode use.
func Using() Level { return level }

// Use sets the level of Decode and Encode. A level that is not in Levels selects Best. Use must be called at the
// start of a process, because it must not run concurrently with Decode or Encode.
func Use(l Level) {
	if !slices.Contains(levels, l) {
		l = best
	}
	level = l
}

var decoders = sync.Pool{New: func() any { return &decoder{lanes: new(laneMemory)} }}

// Decode fills dst with the logical bytes of the chunk src. The transform and the tiles per segment come from the
// index.
//
// Any error is errs.ErrCorrupt, and the contents of dst are then undefined. Decode never reads outside src or writes
// outside dst. It is safe for concurrent use.
func Decode(dst, src []byte, transform uint8, segTiles uint16) error {
	return DecodeAt(level, dst, src, transform, segTiles)
}

// DecodeAt is Decode at a given level, for tests and benchmarks. A level that is not in Levels gives
// errs.ErrNotSupported.
func DecodeAt(level Level, dst, src []byte, transform uint8, segTiles uint16) error {
	if !slices.Contains(levels, level) {
		return errs.New(errs.ErrNotSupported, "this machine or build does not support %v", level)
	}
	d := decoders.Get().(*decoder)
	d.level = level
	err := d.decodeChunk(dst, src, transform, segTiles)
	d.src, d.dst = nil, nil
	decoders.Put(d)
	return err
}

func (d *decoder) decodeChunk(dst, src []byte, transform uint8, segTiles uint16) error {
	if err := d.parseChunk(dst, src, transform, segTiles); err != nil {
		return err
	}
	copy(dst[d.tiles*d.tileBytes():], src[d.tailAt:])
	if d.one {
		d.decodeOne()
		return nil
	}
	d.buildSlots()
	if d.level > Scalar {
		d.fast.build(d)
	}
	// Decode several segments together: the work on one hides the latency of another.
	for seg := 0; seg < d.segs; {
		n := min(len(d.run), d.segs-seg)
		run := d.run[:n]
		for i := range run {
			run[i].vals = &d.vals[i]
			if err := d.beginSegment(&run[i], seg+i); err != nil {
				return err
			}
		}
		if err := d.decodeSegments(run); err != nil {
			return err
		}
		for i := range run {
			if err := d.finishSegment(&run[i]); err != nil {
				return err
			}
		}
		seg += n
	}
	return nil
}

// decodeSegments decodes all tiles of the segments of run, batch by batch.
func (d *decoder) decodeSegments(run []segment) error {
	for remaining := run[0].tiles; remaining > 0; remaining -= batch {
		for i := range run {
			run[i].want, run[i].got = min(batch, run[i].tiles), 0
		}
		d.decodeFast(run) // the scalar decoder below decodes the rest
		for i := range run {
			s := &run[i]
			if !d.decodeScalar(s, s.vals[s.got*tileSyms:s.want*tileSyms]) {
				return corruptError("segment at %d: words extend past its end at %d", s.begin, s.end)
			}
			d.mergeTiles(s.vals[:s.want*tileSyms], s.tile)
			s.tile += s.want
			s.tiles -= s.want
		}
	}
	return nil
}

// decodeOne decodes a chunk that contains only one symbol.
func (d *decoder) decodeOne() {
	v := d.palette[d.symbol]
	vals := d.vals[0][:fillTiles*tileSyms]
	for i := range vals {
		vals[i] = v
	}
	for t := 0; t < d.tiles; t += fillTiles {
		d.mergeTiles(vals[:min(fillTiles, d.tiles-t)*tileSyms], t)
	}
}

// planesOf returns the bytes of each plane for the n tiles from tile on.
func (d *decoder) planesOf(tile, n int) (p [maxPlanes][]byte) {
	for i, bits := range d.form.planes {
		size := n * tileSyms / 8 * bits
		if d.constant[i] {
			p[i] = d.fills[i][:size]
		} else {
			at := d.planeAt[i] + tile*tileSyms/8*bits
			p[i] = d.src[at : at+size]
		}
	}
	return
}

// mergeTiles joins the values of whole tiles with their planes into elements in dst.
func (d *decoder) mergeTiles(vals []byte, tile int) {
	size := d.tileBytes()
	for len(vals) > 0 {
		n := len(vals) / tileSyms
		if d.constant != [maxPlanes]bool{} {
			n = min(n, fillTiles)
		}
		dst := d.dst[tile*size : (tile+n)*size]
		p := d.planesOf(tile, n)
		if d.level == Scalar || !mergeFast(d.level, d.transform, dst, vals[:n*tileSyms], &p) {
			mergeScalar(d.transform, dst, vals[:n*tileSyms], &p)
		}
		tile += n
		vals = vals[n*tileSyms:]
	}
}
