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
	d.chunk.src, d.chunk.dst = nil, nil
	decoders.Put(d)
	return err
}

func (d *decoder) decodeChunk(dst, src []byte, transform uint8, segTiles uint16) error {
	if err := d.chunk.parse(dst, src, transform, segTiles); err != nil {
		return err
	}
	copy(dst[d.chunk.tiles*d.chunk.tileBytes():], src[d.chunk.tailAt:])
	if d.chunk.symbols.one {
		d.decodeOne()
		return nil
	}
	d.slots.build(&d.chunk.symbols)
	if d.level > Scalar {
		d.fast.build(d.level, &d.chunk.symbols)
	}
	// Decode several segments together: the work on one hides the latency of another.
	for seg := 0; seg < d.chunk.segs; {
		n := min(len(d.run), d.chunk.segs-seg)
		run := d.run[:n]
		for i := range run {
			run[i].vals = &d.vals[i]
			if err := d.chunk.beginSegment(&run[i], seg+i); err != nil {
				return err
			}
		}
		if err := d.decodeSegments(run); err != nil {
			return err
		}
		for i := range run {
			if err := d.chunk.finishSegment(&run[i]); err != nil {
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
	v := d.chunk.symbols.palette[d.chunk.symbols.symbol]
	vals := d.vals[0][:fillTiles*tileSyms]
	for i := range vals {
		vals[i] = v
	}
	for t := 0; t < d.chunk.tiles; t += fillTiles {
		d.mergeTiles(vals[:min(fillTiles, d.chunk.tiles-t)*tileSyms], t)
	}
}

// mergeTiles joins the values of whole tiles with their planes into elements in dst.
func (d *decoder) mergeTiles(vals []byte, tile int) {
	size := d.chunk.tileBytes()
	for len(vals) > 0 {
		n := len(vals) / tileSyms
		if d.chunk.constant != [maxPlanes]bool{} {
			n = min(n, fillTiles)
		}
		dst := d.chunk.dst[tile*size : (tile+n)*size]
		p := d.chunk.planesOf(tile, n)
		if d.level == Scalar || !mergeFast(d.level, d.chunk.transform, dst, vals[:n*tileSyms], &p) {
			mergeScalar(d.chunk.transform, dst, vals[:n*tileSyms], &p)
		}
		tile += n
		vals = vals[n*tileSyms:]
	}
}
