package x16

// Decodes a chunk with the fastest decoder of this machine.

import (
	"slices"
	"sync"

	"github.com/overwire/overwire/gosrc/errs"
)

// A Level is an instruction set of a decoder.
type Level uint8

// The levels, from slow to fast.
const (
	Scalar Level = iota
	NEON
	AVX2
	AVX512
)

// String returns the level's name ("AVX-512").
func (l Level) String() string { return [...]string{"scalar", "NEON", "AVX2", "AVX-512"}[l] }

// levels are the levels of this machine and build, from slow to fast. level is the one in use.
var (
	levels = detectLevels()
	best   = levels[len(levels)-1]
	level  = best
)

// Levels returns the levels of this machine and build, from slow to fast.
func Levels() []Level { return slices.Clone(levels) }

// Best returns the highest level of this machine and build.
func Best() Level { return best }

// Using returns the level that Decode and Encode use.
func Using() Level { return level }

// Use sets the level of Decode and Encode. A level that is not among Levels means Best. Call it at the start of a
// process: it is not safe while Decode or Encode runs.
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
// Any error is errs.ErrCorrupt, and the content of dst is then undefined. Decode reads nothing outside src,
// writes nothing outside dst, and is safe for concurrent use.
func Decode(dst, src []byte, transform uint8, segTiles uint16) error {
	return DecodeAt(level, dst, src, transform, segTiles)
}

// DecodeAt is Decode at a given level, for tests and benchmarks. A level that is not among Levels is
// errs.ErrNotSupported.
func DecodeAt(level Level, dst, src []byte, transform uint8, segTiles uint16) error {
	if !slices.Contains(levels, level) {
		return errs.New(errs.ErrNotSupported, "%v on this machine", level)
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
	// Several segments are decoded together to hide the latencies of one by the work of the others.
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
		d.decodeFast(run) // leaves the rest to the scalar decoder
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

// decodeOne decodes a chunk with a single symbol.
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

// planesOf returns the bytes of every plane for n tiles from tile on.
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

// mergeTiles joins the values of whole tiles and their planes into dst.
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
