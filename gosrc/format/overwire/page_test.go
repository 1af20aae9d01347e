package overwire

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"math/rand/v2"
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/format/safetensors"
	"github.com/overwire/overwire/gosrc/tensor"
)

// The reference reader in this file implements docs/format.md sections 1, 2 and 4 sentence by sentence, and shares no
// code with the product.

// forbidden returns an error with the line in this file of the broken rule.
func forbidden() error {
	_, _, line, _ := runtime.Caller(1)
	return fmt.Errorf("docs/format.md forbids it: see line %d of page_test.go", line)
}

// A pageTensor is a tensor as the reference reader reads it.
type pageTensor struct {
	name          string
	dtype         tensor.DType
	shape         []uint64
	bytes, stored uint64
	layout, parts uint8
	chunkBytes    uint32
	first, count  uint32
	alias         uint32
	hash          [16]byte
	off           int64 // offset in the file
}

type pageChunk struct {
	off              uint64
	stored, logical  uint32
	sum              uint32
	codec, transform uint8
	tiles            uint16
}

// pageIndex reads the index of a file with the header h.
func pageIndex(blob []byte, h *safetensors.Header) ([]pageTensor, []pageChunk, error) {
	u16, u32, u64 := binary.LittleEndian.Uint16, binary.LittleEndian.Uint32, binary.LittleEndian.Uint64
	if len(blob) < 72 || len(blob)%64 != 0 || string(blob[:4]) != "OWIX" || u16(blob[4:]) != 1 ||
		u64(blob[8:])>>2 != 0 || u16(blob[28:]) != 64 ||
		u16(blob[30:]) != 32 || u64(blob[32:]) != uint64(len(blob)) || u32(blob[40:]) != h.Sum || h.Data%4096 != 0 {
		return nil, nil, forbidden()
	}
	exact := u16(blob[6:]) <= 4 // a larger minor version may use reserved bytes
	zeros := func(b []byte) bool { return !exact || !slices.ContainsFunc(b, func(x byte) bool { return x != 0 }) }
	nt, nc, nd := uint64(u32(blob[16:])), uint64(u32(blob[20:])), uint64(u32(blob[24:]))
	end := 64 + 8*nd + 64*nt + 32*nc
	if (end+8+63)/64*64 != uint64(len(blob)) || !zeros(blob[44:64]) ||
		slices.ContainsFunc(blob[end+4:], func(x byte) bool {
			return x != 0
		}) ||
		crc32.Checksum(blob[:end], crc32.MakeTable(crc32.Castagnoli)) != u32(blob[end:]) {
		return nil, nil, forbidden()
	}
	if uint64(len(h.Tensors)) != nt+1 || h.Tensors[0].Name != "overwire.index" ||
		h.Tensors[0].Bytes != int64(len(blob)) {
		return nil, nil, forbidden()
	}
	dims, recs, crecs := blob[64:64+8*nd], blob[64+8*nd:64+8*nd+64*nt], blob[64+8*nd+64*nt:end]
	var ts []pageTensor
	for i := range nt {
		r := recs[64*i : 64*i+64]
		in := h.Tensors[i+1]
		t := pageTensor{name: in.Name, dtype: tensor.DType(r[0]), layout: r[2], parts: r[3], chunkBytes: u32(r[4:]),
			bytes: u64(r[8:]), stored: u64(r[16:]),
			first: u32(r[24:]), count: u32(r[28:]), hash: [16]byte(r[32:48]), alias: u32(r[48:]), off: in.Off}
		if uint64(len(dims)) < 8*uint64(r[1]) || r[1] > 64 || !zeros(r[52:]) || r[0] < 1 || r[0] > 22 || r[2] > 2 {
			return nil, nil, forbidden()
		}
		bits := uint64(t.dtype.Bits())
		for range r[1] {
			d := u64(dims)
			dims = dims[8:]
			t.shape = append(t.shape, d)
			if d >= 1<<62 || bits != 0 && d != 0 && bits > 1<<62/d {
				return nil, nil, forbidden()
			}
			bits *= d
		}
		if bits%8 != 0 || bits/8 != t.bytes || int64(t.stored) != in.Stored {
			return nil, nil, forbidden()
		}
		ts = append(ts, t)
	}
	if len(dims) != 0 {
		return nil, nil, forbidden()
	}
	var cs []pageChunk
	for i := range nc {
		r := crecs[32*i : 32*i+32]
		if u16(r[22:]) != 0 || !zeros(r[26:]) {
			return nil, nil, forbidden()
		}
		cs = append(cs, pageChunk{u64(r), u32(r[8:]), u32(r[12:]), u32(r[16:]), r[20], r[21], u16(r[24:])})
	}
	if err := pageRules(ts, cs, h); err != nil {
		return nil, nil, err
	}
	need := uint64(0)
	for _, t := range ts {
		for _, c := range cs[t.first:][:t.count] {
			switch {
			case c.codec == 6:
				need |= 2
			case c.codec == 1 && (t.dtype == 12 || t.dtype == 13 || t.dtype == 16 || t.dtype == 17 || t.dtype == 21 ||
				t.dtype == 22):
				need |= 1
			}
		}
	}
	if need != u64(blob[8:]) {
		return nil, nil, forbidden()
	}
	return ts, cs, nil
}

// pageRules checks the rules of section 2 about tensors and their chunks.
func pageRules(ts []pageTensor, cs []pageChunk, h *safetensors.Header) error {
	next := uint32(0)
	for i := range ts {
		t := &ts[i]
		in := h.Tensors[i+1]
		row := in.DType == tensor.U8 && len(in.Shape) == 1
		same := in.DType == t.dtype && slices.EqualFunc(in.Shape, t.shape, func(a int64, b uint64) bool {
			return uint64(a) == b
		})
		// No reader uses the first chunk of a tensor without chunks, so a smaller number is allowed.
		if t.first > next || t.count > 0 && t.first != next || (t.layout == 2) != (t.alias != 1<<32-1) ||
			t.layout == 1 && !same || t.layout != 1 && !row {
			return forbidden()
		}
		if t.layout == 2 {
			if uint64(t.alias) >= uint64(len(ts)) || t.stored != 0 || t.count != 0 || t.chunkBytes != 0 ||
				t.parts != 1 || t.bytes == 0 {
				return forbidden()
			}
			to := ts[t.alias]
			if to.layout == 2 || to.dtype != t.dtype || to.bytes != t.bytes || to.hash != t.hash {
				return forbidden()
			}
			continue
		}
		if t.bytes == 0 { // plain, without chunks
			if t.layout != 1 || t.count != 0 || t.chunkBytes != 0 || t.parts != 1 || t.stored != 0 {
				return forbidden()
			}
			continue
		}
		if err := t.setGrid(cs); err != nil {
			return err
		}
		next += t.count
	}
	if uint64(next) != uint64(len(cs)) {
		return forbidden()
	}
	return nil
}

// setGrid checks the chunks of a tensor with bytes: their number, sizes and offsets.
func (t *pageTensor) setGrid(cs []pageChunk) error {
	if t.chunkBytes == 0 || t.chunkBytes%4096 != 0 || t.chunkBytes > 16<<20 ||
		t.parts != 1 && t.parts != 2 && t.parts != 4 && t.parts != 8 || t.layout == 1 && t.parts != 1 {
		return forbidden()
	}
	rows := uint64(1)
	if len(t.shape) > 0 {
		rows = t.shape[0]
	}
	if t.parts > 1 {
		row, parts := t.bytes*8/rows, uint64(t.parts) // in bits: packed elements are smaller than a byte
		if t.bytes*8%rows != 0 || row%(parts*uint64(t.dtype.Bits())) != 0 || row/parts%8 != 0 {
			return forbidden()
		}
	}
	part := t.bytes / uint64(t.parts)
	each := (part + uint64(t.chunkBytes) - 1) / uint64(t.chunkBytes)
	if uint64(t.count) != uint64(t.parts)*each || uint64(t.first)+uint64(t.count) > uint64(len(cs)) {
		return forbidden()
	}
	at := uint64(t.off)
	if t.layout == 1 && t.stored != t.bytes {
		return forbidden()
	}
	for i := range uint64(t.count) {
		c := cs[uint64(t.first)+i]
		want := min(uint64(t.chunkBytes), part-i%each*uint64(t.chunkBytes))
		if uint64(c.logical) != want || c.stored == 0 || uint64(c.stored) > want ||
			c.codec == 0 && (uint64(c.stored) != want || c.transform != 0 || c.tiles != 0) ||
			c.codec > 1 && c.codec != 6 ||
			c.codec == 6 && (c.transform < 1 || c.transform > 7 || c.tiles != 0 || t.parts != 1) ||
			c.codec == 1 && (c.transform < 1 || c.transform > 8 || c.tiles < 1 || c.tiles > 256) {
			return forbidden()
		}
		if t.layout == 1 && (c.codec != 0 || c.off != at) || t.layout == 0 && (c.off%16 != 0 || c.off < at) {
			return forbidden()
		}
		at = c.off + uint64(c.stored)
	}
	if end := uint64(t.off) + t.stored; at > end || t.layout == 0 && t.stored%64 != 0 {
		return forbidden()
	}
	return nil
}

// A front is the parsed start of a container, up to its chunks.
type front struct {
	h    *safetensors.Header
	blob []byte
	size int64
}

func fronts(t *testing.T, r *rand.Rand) front {
	t.Helper()
	l, err := NewLayout(map[string]string{"k": "v"}, random(r), nil, false)
	if err != nil {
		t.Fatal(err)
	}
	b, size, err := write(l, r.Uint64())
	if err != nil {
		t.Fatal(err)
	}
	n, err := safetensors.Length("", b, size)
	if err != nil {
		t.Fatal(err)
	}
	h, err := safetensors.Parse("x", b[:8+n], size, safetensors.Options{})
	if err != nil {
		t.Fatal(err)
	}
	return front{&h, b[8+n:], size}
}

// equal describes how an index differs from the result of the reference reader, or returns "".
func equal(ix *tensor.Index, ts []pageTensor, cs []pageChunk) string {
	if len(ix.Tensors) != len(ts) || len(ix.Chunks) != len(cs) {
		return fmt.Sprintf("got %d tensors and %d chunks, the reference reader %d and %d",
			len(ix.Tensors), len(ix.Chunks), len(ts), len(cs))
	}
	for i, t := range ts {
		x := ix.Tensors[i]
		alias := int64(-1)
		if t.layout == 2 {
			alias = int64(t.alias)
		}
		if x.Name != t.name || x.DType != t.dtype || uint64(x.Bytes) != t.bytes || uint64(x.Stored) != t.stored ||
			x.Off != t.off || uint32(x.First) != t.first ||
			uint32(x.Count) != t.count || x.Hash != t.hash || int64(x.Alias) != alias || x.Plain != (t.layout == 1) ||
			!slices.EqualFunc(x.Shape, t.shape, func(a int64, b uint64) bool { return uint64(a) == b }) {
			return fmt.Sprintf("tensor %d: got %+v, the reference reader %+v", i, x, t)
		}
	}
	for i, c := range cs {
		if x := ix.Chunks[i]; uint64(x.Off) != c.off || x.Stored != c.stored || x.Logical != c.logical ||
			x.Sum != c.sum || uint8(x.Codec) != c.codec ||
			x.Transform != c.transform || x.SegTiles != c.tiles {
			return fmt.Sprintf("chunk %d: got %+v, the reference reader %+v", i, x, c)
		}
	}
	return ""
}

// seal corrects the checksum of a changed index, so that only its values can be invalid.
func seal(blob []byte) {
	n := 64 + 8*uint64(le.Uint32(blob[24:])) + 64*uint64(le.Uint32(blob[16:])) + 32*uint64(le.Uint32(blob[20:]))
	if n+8 <= uint64(len(blob)) {
		le.PutUint32(blob[n:], crc32.Checksum(blob[:n], crc32.MakeTable(crc32.Castagnoli)))
	}
}

// The reference reader reads what the writer writes. If random bytes of the index are changed and its checksum is
// corrected, the product refuses exactly the files that the reference reader refuses, with an error class and without
// a panic.
func TestIndexAgainstTheReferenceReader(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 3))
	accepted, refused := 0, 0
	for range 120 {
		f := fronts(t, r)
		ts, cs, err := pageIndex(f.blob, f.h)
		if err != nil {
			t.Fatalf("the reference reader refuses a written file: %v", err)
		}
		ix, err := Decode(f.blob, f.h, "x", f.size, nil)
		if err != nil {
			t.Fatal(err)
		}
		if d := equal(ix, ts, cs); d != "" {
			t.Fatal(d)
		}
		for range 150 {
			b := bytes.Clone(f.blob)
			for range 1 + r.IntN(2) {
				at := r.IntN(len(b))
				if r.IntN(2) == 0 {
					at = 64*r.IntN(len(b)/64) + []int{0, 1, 2, 3, 4, 8, 16, 24, 28, 32, 48, 52}[r.IntN(12)]
				}
				switch r.IntN(4) {
				case 0:
					b[at] ^= 1 << r.IntN(8)
				case 1:
					b[at]++
				case 2:
					b[at] = []byte{0, 1, 2, 3, 4, 8, 16, 0x80, 0xff}[r.IntN(9)]
				default:
					copy(b[at:], b[64*r.IntN(len(b)/64):][:min(8, len(b)-at)])
				}
			}
			seal(b)
			ts, cs, rule := pageIndex(b, f.h)
			ix, err := Decode(b, f.h, "x", f.size, nil)
			switch {
			case err != nil && !errs.Classed(err):
				t.Fatalf("an error without a class: %v", err)
			case err == nil && rule != nil:
				t.Fatalf("the reference reader returns %v, but Decode accepts %+v", rule, ix.Tensors)
			case err == nil:
				accepted++
				if d := equal(ix, ts, cs); d != "" {
					t.Fatal(d)
				}
			case rule == nil:
				t.Fatalf("Decode refuses a file that the reference reader accepts: %v", err)
			default:
				refused++
			}
		}
	}
	t.Logf("%d accepted, %d refused", accepted, refused)
	if accepted < 50 || refused < 1000 {
		t.Errorf("only %d files were accepted and %d refused", accepted, refused)
	}
}
