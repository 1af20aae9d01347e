package x16

import (
	"bytes"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/overwire/overwire/gosrc/tensor"
)

// sizeOf returns the logical size of whole tiles and a tail in bytes.
func sizeOf(transform uint8, tiles, tail int) int { return tiles*256*page[transform].width/8 + tail }

// The decoder of every level decodes chunks that docs/format.md allows but our encoder never writes: different alias
// tables, symbols in any order, escapes for values that have a symbol, stored constant planes, and segments of any
// number of tiles.
func TestForeignChunks(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	w := pageWriter{rand.New(rand.NewPCG(seed, 0))}
	for tr := uint8(BF16); tr <= Bytes; tr++ {
		for round := range 30 {
			tiles := 1 + w.r.IntN(12)
			st := 1 + w.r.IntN(tiles+2)
			if round%10 == 0 {
				st = maxSegTiles
			}
			size := sizeOf(tr, tiles, w.r.IntN(page[tr].width*32))
			chunk, logical := w.chunk(tr, size, st)
			got, err := pageDecode(chunk, size, tr, uint16(st))
			if err != nil || !bytes.Equal(got, logical) {
				t.Fatalf("%s: the reference reader: %v", Name(tr), err)
			}
			if !agree(t, chunk, size, tr, uint16(st)) {
				t.Fatalf("%s: %d tiles in segments of %d were refused", Name(tr), tiles, st)
			}
			dst := make([]byte, size)
			if err := Decode(dst, chunk, tr, uint16(st)); err != nil || !bytes.Equal(dst, logical) {
				t.Fatalf("%s: %v, equal %v", Name(tr), err, bytes.Equal(dst, logical))
			}
			c := tensor.Chunk{Codec: tensor.CodecX16, Transform: tr, SegTiles: uint16(st), Logical: uint32(size),
				Stored: uint32(len(chunk))}
			if err := Check(chunk, c); err != nil {
				t.Fatalf("%s: Check refuses it: %v", Name(tr), err)
			}
		}
	}
}

// For any change to a chunk, Decode accepts it exactly if docs/format.md allows it, and then gives the same bytes as
// the reference reader.
func TestDecodeAcceptsTheFormat(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	w := pageWriter{rand.New(rand.NewPCG(seed, 0))}
	accepted, tried, rounds := 0, 0, 3
	if testing.Short() {
		rounds = 1
	}
	same := func(p []byte, size int, tr uint8, st uint16) {
		t.Helper()
		want, refused := pageDecode(p, size, tr, st)
		dst := make([]byte, size)
		err := Decode(dst, p, tr, st)
		if (err == nil) != (refused == nil) || err == nil && !bytes.Equal(dst, want) {
			t.Fatalf("%s, %d bytes from %d in segments of %d: the reference reader returns %v, Decode %v",
				Name(tr), size, len(p), st, refused, err)
		}
		tried++
		if err == nil {
			accepted++
		}
	}
	for tr := uint8(BF16); tr <= Bytes; tr++ {
		for range rounds {
			tiles := 1 + w.r.IntN(3)
			st := 1 + w.r.IntN(tiles)
			size := sizeOf(tr, tiles, w.r.IntN(9))
			chunk, _ := w.chunk(tr, size, st)
			same(chunk, size, tr, uint16(st))
			for at := range 96 { // set every byte of the header to values near the allowed ones
				for _, v := range []byte{0, 1, 16, 17, 32, 255, chunk[at] + 1} {
					p := bytes.Clone(chunk)
					p[at] = v
					same(p, size, tr, uint16(st))
				}
			}
			for range 60 {
				p := bytes.Clone(chunk)
				hurt(w.r, p)
				same(p, size, tr, uint16(st))
			}
			for range 20 {
				p := bytes.Clone(chunk)
				p[w.r.IntN(len(p))] ^= 1 << w.r.IntN(8)
				same(p, size, tr, uint16(st))
			}
			for _, other := range []uint16{0, 1, uint16(st) + 1, 256, 257, 65535} {
				same(chunk, size, tr, other)
			}
			for _, other := range []int{0, 1, size - 1, size + 1, size + 256*page[tr].width/8, sizeOf(tr, 1, 0)} {
				same(chunk, other, tr, uint16(st))
			}
			for other := range uint8(12) {
				same(chunk, size, other, uint16(st))
			}
			for range 10 {
				same(chunk[:w.r.IntN(len(chunk))], size, tr, uint16(st))
			}
			same(append(bytes.Clone(chunk), 0), size, tr, uint16(st))
		}
	}
	t.Logf("%d of %d accepted", accepted, tried)
	if accepted < tried/100 || accepted == tried {
		t.Errorf("%d of %d were accepted, want some but not all", accepted, tried)
	}
}

// The reference reader, written from docs/format.md, decodes our encoder's chunks to the same bytes, in every size
// around whole tiles and for every sample.
func TestTheReferenceReaderReadsOurChunks(t *testing.T) {
	const seed = 21
	t.Logf("seed %d", seed)
	var e Encoder
	packed := 0
	for _, n := range []int{4096, 1500, 513} {
		for _, s := range samples(rand.New(rand.NewPCG(seed, uint64(n))), n) {
			for _, cut := range []int{0, 1, 2, 37, 512} {
				src := s.data[:max(0, len(s.data)-cut)]
				chunk, st, ok := e.Encode(nil, src, s.transform)
				if !ok {
					continue
				}
				packed++
				if got, err := pageDecode(chunk, len(src), s.transform, st); err != nil || !bytes.Equal(got, src) {
					t.Fatalf("%s, %d bytes: %v", s.name, len(src), err)
				}
			}
		}
	}
	for _, g := range readGoldens(t) {
		want := make([]byte, g.logical)
		if err := Decode(want, g.chunk, g.transform, g.segTiles); err != nil {
			t.Fatal(err)
		}
		if got, err := pageDecode(g.chunk, g.logical, g.transform, g.segTiles); err != nil || !bytes.Equal(got, want) {
			t.Errorf("golden %s: %v", g.name, err)
		}
	}
	if packed < 100 {
		t.Errorf("only %d chunks were compressed", packed)
	}
}
