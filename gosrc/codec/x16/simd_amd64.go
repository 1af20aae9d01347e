//go:build goexperiment.simd && amd64 && !scalar

package x16

// Contains the code that the AVX2 and AVX-512 decoders share.

import (
	"simd/archsimd"
	"unsafe"
)

// slack is the number of bytes that must follow the cursor for the vector kernels to decode one tile without checks:
// 4 pairs of steps read at most 256 bytes, and the last load of 16 words reads 32 bytes more.
const slack = 320

// escapeLabel is the label of the escape symbol in kernels. It is the largest label, so a single unsigned maximum
// detects escapes.
const escapeLabel = 15

// fastTables holds a chunk's tables for the vector decoders. Kernels emit labels, which are symbols renumbered so
// that the escape has the largest number. values maps labels to symbol values.
type fastTables struct {
	// entry holds two dwords per bucket: the first for positions below the divider, the second for the others. Each
	// is freq | bias + 16 << 8 | label << 28, where rank = position + bias.
	entry [32]uint32
	// above is (bucket << 5) + 32 - divider. Adding position - 16 carries into bit 4 if the position belongs to the
	// alias, so bits 4..8 of the sum are an index into entry.
	above  [16]uint32
	values [64]byte // indexed by label, repeated four times
	limit  uint8    // the label of the escape, or 255 if there is none
	narrow tables256
}

// detectLevels returns the levels of this machine. It checks AVX512 in addition to VBMI2, because the VBMI2 flag
// stays true under GODEBUG=cpu.avx512f=off, when Go does not save ZMM registers.
func detectLevels() []Level {
	levels := []Level{Scalar}
	x := archsimd.X86
	if x.AVX2() {
		levels = append(levels, AVX2)
	}
	if x.AVX512() && x.AVX512VBMI() && x.AVX512VBMI2() {
		levels = append(levels, AVX512)
	}
	return levels
}

func (t *fastTables) build(level Level, y *symbols) {
	if level == AVX2 {
		t.narrow.build(y)
		return
	}
	label := func(k int) int { // swaps the escape symbol and 15
		switch {
		case y.escape < 0:
			return k
		case k == y.escape:
			return escapeLabel
		case k == escapeLabel:
			return y.escape
		}
		return k
	}
	pack := func(k, bias int) uint32 {
		// bias is in [-15, 239], because the last rank of an alias is below 255.
		return uint32(y.table.freq[k]) | uint32(bias+16)<<8 | uint32(label(k))<<28
	}
	bias := y.table.aliasBias()
	for b := range 16 {
		t.entry[2*b] = pack(b, 0)
		t.entry[2*b+1] = pack(int(y.table.alias[b]), bias[b])
		t.above[b] = uint32(b<<5 + 32 - int(y.table.divider[b]))
	}
	for k, v := range y.values {
		for i := 0; i < 64; i += 16 {
			t.values[i+label(k)] = v
		}
	}
	t.limit = 255
	if y.escape >= 0 {
		t.limit = escapeLabel
	}
}

// decodeFast decodes tiles of each segment until the segment has enough tiles or too few input bytes are left. Each
// call of a vector kernel decodes at least one tile of each of its segments. Segments that are finished or too close
// to the end of the chunk are excluded from further calls.
func (d *decoder) decodeFast(run []segment) {
	if d.level < AVX2 {
		return
	}
	most := len(d.chunk.src) - slack
	for {
		active := d.active[:0]
		for i := range run {
			if s := &run[i]; s.got < s.want && s.cur <= most {
				active = append(active, s)
			}
		}
		switch {
		case len(active) == 0:
			return
		case d.level == AVX512:
			d.kernel512(active)
		default:
			d.kernel256(active)
		}
	}
}

// at returns a pointer to byte i after base. The caller must have checked the bounds.
func at[T any](base unsafe.Pointer, i int) *T { return (*T)(unsafe.Add(base, i)) }

// planePointers returns pointers to elements and to their values and planes. ok is false if there are no whole tiles
// or the lengths do not match.
func planePointers(transform uint8, elements, vals []byte, p *[maxPlanes][]byte) (e, v unsafe.Pointer,
	q [maxPlanes]unsafe.Pointer, ok bool) {
	n, f := len(vals), &forms[transform]
	if n == 0 || n%tileSyms != 0 || len(elements) != n/8*f.bits {
		return e, v, q, false
	}
	for i, bits := range f.planes {
		if len(p[i]) != n/8*bits {
			return e, v, q, false
		}
		q[i] = unsafe.Pointer(unsafe.SliceData(p[i]))
	}
	return unsafe.Pointer(unsafe.SliceData(elements)), unsafe.Pointer(unsafe.SliceData(vals)), q, true
}
