//go:build owfake

package stream

import (
	"bytes"
	"testing"

	"errors"
	"github.com/overwire/overwire/gosrc/codec/x16"
	"github.com/overwire/overwire/gosrc/errs"
)

// sameChunk compares the encoder's twin with the Go encoder. Both must make the same chunk, or both must reject the
// data. It returns the chunk.
func sameChunk(t testing.TB, data []byte, transform uint8) (stored []byte, tiles uint16) {
	t.Helper()
	var e x16.Encoder
	want, tiles, ok := e.Encode(nil, data, transform)
	for far := range 2 {
		src, dst := fenced(t, len(data), false), fenced(t, len(data), false)
		if far == 1 && len(data)%16 == 0 {
			src.free()
			src = fenced(t, len(data), true)
		}
		if room := len(want); far == 1 && ok {
			dst.free()
			dst = fenced(t, room, room%16 == 0)
		}
		copy(src.bytes, data)
		item := []twinItem{{src: src.addr(), srcLen: uint64(len(data)), dst: dst.addr(), dstCap: uint64(len(dst.bytes)),
			arg: uint32(transform)}}
		if far == 1 { // with the lanes in reverse order
			item = append([]twinItem{{status: 9}}, item...)
		}
		runTwin("x16_encode", item)
		got := item[far]
		switch {
		case ok && (got.status != 0 || got.arg != uint32(transform)|uint32(tiles)<<16):
			t.Fatalf("transform %d, %d bytes: status %d, arg %#x, want %d tiles", transform, len(data), got.status, got.arg, tiles)
		case ok && (int(got.written) != len(want) || !bytes.Equal(dst.bytes[:got.written], want)):
			t.Fatalf("transform %d, %d bytes: %d bytes, first difference at %d, want %d",
				transform, len(data), got.written, differ(dst.bytes[:got.written], want), len(want))
		case !ok && got.status != batchGain:
			t.Fatalf("transform %d, %d incompressible bytes: status %d", transform, len(data), got.status)
		}
		src.free()
		dst.free()
	}
	if !ok {
		return nil, 0
	}
	return want, tiles
}

func differ(a, b []byte) int {
	for i := range min(len(a), len(b)) {
		if a[i] != b[i] {
			return i
		}
	}
	return min(len(a), len(b))
}

// The kernel makes the same chunks as the Go encoder, and the stream kernel decodes them.
func TestTwinEncode(t *testing.T) {
	r := random(t)
	coded := 0
	for tr := uint8(x16.BF16); tr <= x16.Bytes; tr++ {
		for _, n := range []int{100, 1024, 4096 + r.IntN(40), 20_000 + r.IntN(1000), 65536, 150_000 + 16*r.IntN(1000)} {
			data := [][]byte{
				weights(r, tr, n),
				make([]byte, n),
				repeated(random8(r, 24), 24, n-24),
				random8(r, n),
			}
			wild := weights(r, tr, n) // with escaped values
			for range n / 300 {
				wild[r.IntN(n)] = byte(r.Uint32())
			}
			skewed := make([]byte, n) // steeply falling counts
			for i := range skewed {
				skewed[i] = byte(1) << min(r.IntN(8), r.IntN(8), r.IntN(8))
			}
			for _, b := range append(data, wild, skewed) {
				stored, tiles := sameChunk(t, b, tr)
				if stored == nil {
					continue
				}
				coded++
				if n > 30_000 {
					continue
				}
				got, status := twinX16(t, stored, len(b), uint32(tr)|uint32(tiles)<<16)
				if status != 0 || !bytes.Equal(got, b) {
					t.Fatalf("transform %d, %d bytes: status %d, or wrong bytes", tr, n, status)
				}
			}
		}
	}
	t.Logf("%d chunks", coded)
}

// twinX16 decodes a chunk, as the raw block of a stream, to `room` bytes. The block and
// the destination end at an inaccessible page if their alignment permits it. Otherwise they begin after one.
func twinX16(t testing.TB, stored []byte, room int, arg uint32) ([]byte, uint32) {
	t.Helper()
	head := []byte{1, byte(arg), byte(arg >> 16), byte(arg >> 24), byte(room), byte(room >> 8), byte(room >> 16),
		byte(room >> 24)}
	block := append(head, stored...)
	end := len(stored)%16 == 0 // the block begins eight bytes before a multiple of 16
	src, dst := fenced(t, len(block)+8, end), fenced(t, room, room%16 == 0)
	defer src.free()
	defer dst.free()
	copy(src.bytes[8:], block)
	status := runX16StreamTwin(src.addr()+8, len(block), dst.addr(), room, 1+len(stored)%3)
	if status != 0 {
		return nil, status
	}
	return bytes.Clone(dst.bytes[:room]), 0
}

// The kernel fits the same model as the Go encoder to histograms of every shape.
func TestTwinFit(t *testing.T) {
	r := random(t)
	for range 120 {
		kinds := 1 + r.IntN(40)
		cum := make([]float64, kinds)
		total := 0.0
		for i := range cum {
			w := r.ExpFloat64()
			for range r.IntN(4) {
				w *= r.ExpFloat64()
			}
			total += w
			cum[i] = total
		}
		names := r.Perm(256)
		data := make([]byte, 256*(1+r.IntN(12)))
		for i := range data {
			x, k := r.Float64()*total, 0
			for cum[k] < x {
				k++
			}
			data[i] = byte(names[k])
		}
		sameChunk(t, data, x16.Bytes)
		sameChunk(t, data, x16.Int8)
	}
}

// For chunks that the Go decoder rejects before decoding, and for flipped bits in small chunks, the kernel accesses
// nothing outside the buffers. Chunks that it accepts decode to the same bytes as with Decode.
func TestTwinX16Damage(t *testing.T) {
	r := random(t)
	refused, accepted, missed := 0, 0, 0
	try := func(b []byte, room int, tr uint8, tiles uint16) {
		want := make([]byte, room)
		err := x16.Decode(want, b, tr, tiles)
		got, status := twinX16(t, b, room, uint32(tr)|uint32(tiles)<<16)
		switch {
		case err != nil && !errors.Is(err, errs.ErrCorrupt):
			t.Fatal(err)
		case err != nil && status == 0:
			missed++ // escapes without a matching symbol, which the checksum detects
		case err == nil && (status != 0 || !bytes.Equal(got, want)):
			t.Fatalf("transform %d: status %d, or wrong bytes, of a valid chunk", tr, status)
		case err == nil:
			accepted++
		default:
			refused++
		}
	}
	for tr := uint8(x16.BF16); tr <= x16.Bytes; tr++ {
		data := weights(r, tr, 2100)
		data[r.IntN(len(data))] ^= 0x40
		stored, tiles := sameChunk(t, data, tr)
		if stored == nil {
			t.Fatalf("transform %d: no chunk", tr)
		}
		for i := range len(stored) {
			if i > 110 && i%17 != 0 {
				continue
			}
			b := bytes.Clone(stored)
			b[i] ^= 1 << r.IntN(8)
			try(b, len(data), tr, tiles)
			if i < 96 && i%2 == 0 {
				b[i] = byte(r.Uint32())
				try(b, len(data), tr, tiles)
			}
			if i%9 == 0 {
				try(stored[:i], len(data), tr, tiles)
			}
		}
	}
	t.Logf("%d rejected, %d still valid, %d not detected", refused, accepted, missed)
	if refused < 500 || missed > refused/50 {
		t.Error("too few chunks were rejected")
	}
}

// The kernel sets the status of invalid items.
func TestTwinX16Refused(t *testing.T) {
	b := fenced(t, 8192, false)
	defer b.free()
	at := b.addr()
	for i, it := range []twinItem{
		{src: at, srcLen: 2048, dst: at + 4096, dstCap: 4096, arg: 0},
		{src: at, srcLen: 2048, dst: at + 4096, dstCap: 4096, arg: 9 | 4<<16},
		{src: at + 2, srcLen: 2048, dst: at + 4096, dstCap: 4096, arg: 1 | 4<<16},
		{src: at, srcLen: 2048, dst: at + 4100, dstCap: 4000, arg: 1 | 4<<16},
		{src: at, srcLen: 1 << 40, dst: at + 4096, dstCap: 4096, arg: 1 | 4<<16},
	} {
		items := []twinItem{it}
		runTwin("x16_encode", items)
		if items[0].status != batchArg {
			t.Errorf("encode %d: status %d", i, items[0].status)
		}
	}
	items := []twinItem{{src: at, srcLen: 4096, dst: at + 4096, dstCap: 90, arg: 1}} // zeros, but too little space
	runTwin("x16_encode", items)
	if items[0].status != batchRoom {
		t.Errorf("too little space: status %d", items[0].status)
	}
}

// Chunks are split among several warps if there are few chunks. A long chunk among short ones also gets enough
// warps.
func TestSplit(t *testing.T) {
	native := func(size, chunk int64) Bitstream { return Bitstream{Size: size, Chunk: chunk} }
	short := make([]Bitstream, 5000)
	for i := range short {
		short[i] = native(4096, 4096)
	}
	for _, c := range []struct {
		streams []Bitstream
		want    int
	}{
		{nil, 1},
		{[]Bitstream{native(0, 1)}, 1},
		{[]Bitstream{native(4096, 1<<20)}, 1},
		{[]Bitstream{native(65536, 65536)}, 4},
		{[]Bitstream{native(1<<20, 65536)}, 4},
		{[]Bitstream{native(1<<30, 65536)}, 1},
		{[]Bitstream{native(1<<30, 1<<20)}, 4},
		{[]Bitstream{native(1<<28, 1<<20)}, 8},
		{[]Bitstream{native(1<<24, 1<<24)}, 128},
		{append(short, native(1<<24, 1<<24)), 128},
	} {
		rows := 0
		for i := range c.streams {
			rows += c.streams[i].blockCount()
		}
		if got := warpsPerChunk(c.streams, rows); got != c.want {
			t.Errorf("%d streams, %d rows: %d, want %d", len(c.streams), rows, got, c.want)
		}
	}
}
