package planes

// Encodes chunks.

import (
	"bytes"
	"encoding/binary"
	"math/bits"
)

// minZip is the minimum advantage of a Zstandard frame: it must save 1/minZip of a plane compared with blocks, which
// decode faster.
const minZip = 1024

// An Encoder encodes chunks and reuses its buffers. The zero value is ready to use. It must not be used concurrently.
type Encoder struct {
	memory [maxPlanes][]byte
	words  []byte
	hists  []histogram
	kinds  []byte
	frame  []byte
	out    []byte
	zipped bool
}

// Zipped reports whether the last chunk has a plane that is stored as a Zstandard frame.
func (e *Encoder) Zipped() bool { return e.zipped }

// Encode appends the chunk of src to dst. If the chunk would not be shorter than src, ok is false and dst is
// unchanged. The same src gives the same chunk on every machine.
func (e *Encoder) Encode(dst, src []byte, transform uint8) (out []byte, ok bool) {
	e.zipped = false
	if !isKnown(transform) || len(src) == 0 || len(src)%transforms[transform].width != 0 {
		return dst, false
	}
	f := &transforms[transform]
	out = binary.LittleEndian.AppendUint32(dst, uint32(len(src)))
	if f.width == 1 {
		out = e.plane(out, src)
	} else {
		n := len(src) / f.width
		var p [maxPlanes][]byte
		for i := range f.width {
			if cap(e.memory[i]) < n {
				e.memory[i] = make([]byte, n)
			}
			p[i] = e.memory[i][:n]
		}
		splitPlanes(src, &p, f.width, f.rotate)
		for i := range f.width {
			out = e.plane(out, p[i])
		}
	}
	if len(out)-len(dst) >= len(src) {
		return dst, false
	}
	return out, true
}

// plane appends a plane in its shortest form, if this form is worth its decoding time.
func (e *Encoder) plane(out, p []byte) []byte {
	blocks := e.appendBlocks(e.out[:0], p)
	e.out = blocks
	e.frame = e.frame[:0]
	if e.mayRepeat(p) {
		e.frame = appendFrame(e.frame, p)
	}
	switch {
	case len(e.frame) > 0 && len(e.frame)+4+len(p)/minZip < min(len(blocks), len(p)):
		e.zipped = true
		out = append(out, formZstd)
		out = binary.LittleEndian.AppendUint32(out, uint32(len(e.frame)))
		return append(out, e.frame...)
	case len(blocks) < len(p):
		return append(append(out, formBlocks), blocks...)
	}
	return append(append(out, formRaw), p...)
}

// mayRepeat reports whether a Zstandard frame may be worth the time. It is false for a long plane if none of four
// samples has redundancy beyond its order-0 entropy.
func (e *Encoder) mayRepeat(p []byte) bool {
	const samples, size = 4, 32 << 10
	if len(p) <= 2*samples*size {
		return true
	}
	for i := range samples {
		s := p[i*(len(p)-size)/(samples-1):][:size]
		h := countValues(s)
		if bytes.Count(s, s[:1]) == len(s) {
			continue // a constant sample gives no information about the rest
		}
		t := fitTable(&h, size)
		e.frame = appendFrame(e.frame[:0], s)
		if uint64(len(e.frame)+size/minZip) < min(t.costOf(&h), size) {
			e.frame = e.frame[:0]
			return true
		}
	}
	e.frame = e.frame[:0]
	return false
}

// appendBlocks appends a plane as blocks, without the form byte.
func (e *Encoder) appendBlocks(out, p []byte) []byte {
	n := (len(p) + blockBytes - 1) / blockBytes
	e.hists, e.kinds = e.hists[:0], e.kinds[:0]
	for i := range n {
		b := blockOf(p, i)
		e.hists = append(e.hists, countValues(b))
		kind := byte(kindShared)
		if bytes.Count(b, b[:1]) == len(b) {
			kind = kindConstant
		}
		e.kinds = append(e.kinds, kind)
	}
	// Blocks that do not gain from the shared table stop using it. Then it is fitted to the remaining blocks.
	sharedTable := e.fitSharedTable()
	e.chooseKinds(p, &sharedTable)
	sharedTable = e.fitSharedTable()
	e.chooseKinds(p, &sharedTable)
	if bytes.Count(e.kinds, []byte{kindShared}) == 1 { // a single block does not share its table
		e.kinds[bytes.IndexByte(e.kinds, kindShared)] = kindOwn
	}
	out = append(out, e.kinds...)
	if bytes.Contains(e.kinds, []byte{kindShared}) {
		out = sharedTable.appendTable(out)
	}
	for i, k := range e.kinds {
		b := blockOf(p, i)
		switch k {
		case kindRaw:
			out = append(out, b...)
		case kindConstant:
			out = append(out, b[0])
		case kindOwn:
			t := fitTable(&e.hists[i], uint32(len(b)))
			out = e.encodeBlock(t.appendTable(out), b, &t)
		case kindShared:
			out = e.encodeBlock(out, b, &sharedTable)
		}
	}
	return out
}

func blockOf(p []byte, i int) []byte { return p[i*blockBytes : min(len(p), (i+1)*blockBytes)] }

// fitSharedTable fits a table to the blocks that share it, if there are any.
func (e *Encoder) fitSharedTable() (t table) {
	var sum histogram
	n := uint32(0)
	for i, k := range e.kinds {
		if k == kindShared {
			for v, c := range e.hists[i] {
				sum[v] += c
				n += c
			}
		}
	}
	if n > 0 {
		t = fitTable(&sum, n)
	}
	return t
}

// chooseKinds decides how to store each block that has been marked as shared.
func (e *Encoder) chooseKinds(p []byte, shared *table) {
	for i, k := range e.kinds {
		if k != kindShared {
			continue
		}
		h := &e.hists[i]
		raw := uint64(len(blockOf(p, i)))
		common := blockHead + shared.costOf(h)
		own := fitTable(h, uint32(raw))
		alone := blockHead + uint64(own.encodedSize()) + own.costOf(h)
		// Require an advantage of a few bytes, because costs are rounded.
		switch {
		case raw <= min(common, alone)+8:
			e.kinds[i] = kindRaw
		case alone+8 < common:
			e.kinds[i] = kindOwn
		}
	}
}

// countValues counts the values of a block. It uses four tables, so that increments for equal adjacent values do not
// wait for each other.
func countValues(p []byte) (out histogram) {
	var h [4]histogram
	for ; len(p) >= 4; p = p[4:] {
		h[0][p[0]]++
		h[1][p[1]]++
		h[2][p[2]]++
		h[3][p[3]]++
	}
	for _, v := range p {
		h[0][v]++
	}
	for v := range out {
		out[v] = h[0][v] + h[1][v] + h[2][v] + h[3][v]
	}
	return out
}

// splitPlanes divides elements into planes.
func splitPlanes(src []byte, p *[maxPlanes][]byte, width int, rotate bool) {
	le, turn := binary.LittleEndian, 0
	if rotate {
		turn = 1
	}
	n := len(src) / width
	switch width {
	case 2:
		a, b := p[0][:n], p[1][:n]
		for i := range a {
			w := bits.RotateLeft16(le.Uint16(src[2*i:]), turn)
			a[i], b[i] = byte(w), byte(w>>8)
		}
	case 4:
		a, b, c, d := p[0][:n], p[1][:n], p[2][:n], p[3][:n]
		for i := range a {
			w := bits.RotateLeft32(le.Uint32(src[4*i:]), turn)
			a[i], b[i], c[i], d[i] = byte(w), byte(w>>8), byte(w>>16), byte(w>>24)
		}
	case 8:
		for i := range n {
			w := bits.RotateLeft64(le.Uint64(src[8*i:]), turn)
			for k := range 8 {
				p[k][i] = byte(w >> (8 * k))
			}
		}
	}
}

// mergePlanes is the inverse of splitPlanes.
func mergePlanes(dst []byte, p *[maxPlanes][]byte, width int, rotate bool) {
	le, turn := binary.LittleEndian, 0
	if rotate {
		turn = -1
	}
	n := len(dst) / width
	switch width {
	case 2:
		a, b := p[0][:n], p[1][:n]
		for i := range a {
			le.PutUint16(dst[2*i:], bits.RotateLeft16(uint16(a[i])|uint16(b[i])<<8, turn))
		}
	case 4:
		a, b, c, d := p[0][:n], p[1][:n], p[2][:n], p[3][:n]
		for i := range a {
			w := uint32(a[i]) | uint32(b[i])<<8 | uint32(c[i])<<16 | uint32(d[i])<<24
			le.PutUint32(dst[4*i:], bits.RotateLeft32(w, turn))
		}
	case 8:
		for i := range n {
			w := uint64(0)
			for k := range 8 {
				w |= uint64(p[k][i]) << (8 * k)
			}
			le.PutUint64(dst[8*i:], bits.RotateLeft64(w, turn))
		}
	}
}
