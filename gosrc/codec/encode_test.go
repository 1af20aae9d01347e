package codec

// The tests in this file check which encoding an encoder chooses, and how to call it.

import (
	"bytes"
	"math/rand/v2"
	"testing"

	"github.com/overwire/overwire/gosrc/codec/planes"
	"github.com/overwire/overwire/gosrc/codec/x16"
	"github.com/overwire/overwire/gosrc/tensor"
)

// shapes returns data for which different encodings are best.
func shapes(r *rand.Rand) map[string][]byte {
	fill := func(n int, f func(i int) byte) []byte {
		p := make([]byte, n)
		for i := range p {
			p[i] = f(i)
		}
		return p
	}
	noise := func(int) byte { return byte(r.Uint32()) }
	return map[string][]byte{
		"nothing": nil, "a byte": {7}, "noise": fill(1<<14, noise), "zeros": make([]byte, 1<<14),
		"an odd length": make([]byte, 4097),
		"floats": fill(1<<15, func(
			i int) byte {
			return []byte{byte(r.Uint32()), byte(0x3f - r.IntN(3))}[i%2]
		}),
		"packed nibbles": fill(1<<14, func(int) byte { return byte(r.IntN(4) | r.IntN(4)<<4) }),
		"small integers": fill(1<<14, func(i int) byte { return []byte{byte(r.Uint32()), 0, 0, 0}[i%4] }),
		"rows":           bytes.Repeat(fill(999, noise), 20),
		"a rare value":   fill(1<<14, func(i int) byte { return byte(max(0, i%2000-1990)) }),
		"many values":    fill(1<<15, func(int) byte { return byte(int(128 + 30*r.NormFloat64())) }),
		"floats of noise": fill(1<<14, func(
			i int) byte {
			return []byte{byte(r.Uint32()), byte(r.Uint32() & 0x7f)}[i%2]
		}),
	}
}

// A chunk is stored in its shortest encoding, and with codec 6 only if this saves 1/1024 of the bytes. It can be
// decoded with its record, whatever the encoder encoded before.
func TestEncodeChoosesTheShortest(t *testing.T) {
	r := rand.New(rand.NewPCG(41, 1))
	var kept Encoder
	var buf []byte
	seen := map[tensor.Codec]int{}
	for range 2 {
		for name, data := range shapes(r) {
			for _, ways := range []Ways{{}, {X16: x16.BF16}, {X16: x16.Nibbles}, {X16: x16.Bytes},
				{Planes: planes.Bytes}, {X16: x16.BF16, Planes: 5}, {X16: x16.Bytes, Planes: 2},
				{X16: x16.Int8, Planes: 3}, {X16: x16.FP32, Planes: 6}, {Planes: 7}} {
				before := bytes.Clone(data)
				var c, again tensor.Chunk
				out := bytes.Clone(new(Encoder).Encode(nil, data, ways, &c))
				// The record's old values and the buffer's old contents are overwritten.
				again.Codec, again.Transform, again.SegTiles = 5, 9, 99
				got := kept.Encode(buf, data, ways, &again)
				if !bytes.Equal(got, out) || c != again || !bytes.Equal(data, before) {
					t.Fatalf("%s, %+v: %d bytes as %s with a new encoder, %d as %s with a used one",
						name, ways, len(out), Name(c), len(got), Name(again))
				}
				if raw := c.Codec == tensor.CodecRaw; raw != (len(out) >= len(data)) ||
					raw && len(data) > 0 && &got[0] != &data[0] {
					t.Errorf("%s, %+v: %d bytes of %d as %s", name, ways, len(out), len(data), Name(c))
				}
				if c.Codec != tensor.CodecRaw {
					buf = got
				}
				least := len(data)
				if p, _, ok := new(x16.Encoder).Encode(nil, data, ways.X16); ok && ways.X16 != 0 {
					least = min(least, len(p))
				}
				if p, ok := new(planes.Encoder).Encode(nil, data, ways.Planes); ok && len(p) < least-len(data)/worth {
					least = len(p)
				}
				if len(out) > least || c.Codec != tensor.CodecPlanes && len(out) != least {
					t.Errorf("%s, %+v: %d bytes as %s, but another encoding has %d",
						name, ways, len(out), Name(c), least)
				}
				seen[c.Codec]++
				c.Stored, c.Logical = uint32(len(out)), uint32(len(data))
				back := make([]byte, len(data))
				if err := Decode(back, out, c); err != nil || !bytes.Equal(back, data) {
					t.Errorf("%s, %+v, %s: %v", name, ways, Name(c), err)
				}
			}
		}
	}
	if seen[tensor.CodecRaw] < 10 || seen[tensor.CodecX16] < 10 || seen[tensor.CodecPlanes] < 10 {
		t.Errorf("too few chunks of some codec: %v", seen)
	}
}

// If data has a period that is not a multiple of the element size, encoding it as bytes may be shorter.
func TestEncodeTriesBytes(t *testing.T) {
	row := make([]byte, 1001) // not a multiple of an element
	for i := range row {
		row[i] = byte(i * i >> 3)
	}
	var e Encoder
	var c tensor.Chunk
	data := bytes.Repeat(row, 64)[:64_000]
	if e.Encode(nil, data, Ways{Planes: 6}, &c); c.Codec != tensor.CodecPlanes || c.Transform != planes.Bytes {
		t.Errorf("float data with a period of 1001 bytes was encoded as %s", Name(c))
	}
	for i := range data {
		data[i] = []byte{byte(i), 0, 0, 0}[i%4]
	}
	if e.Encode(nil, data, Ways{Planes: 3}, &c); c.Codec != tensor.CodecPlanes {
		t.Errorf("small integers were encoded as %s", Name(c))
	}
}

// Name and Names return readable names. Names lists each encoding once, with raw last.
func TestNames(t *testing.T) {
	raw, x, y, p := tensor.Chunk{}, tensor.Chunk{Codec: 1, Transform: 1}, tensor.Chunk{Codec: 1, Transform: 8},
		tensor.Chunk{Codec: 6, Transform: 5}
	for _, c := range []struct {
		chunks []tensor.Chunk
		want   string
	}{
		{nil, "plain"}, {[]tensor.Chunk{raw, raw}, "plain"}, {[]tensor.Chunk{x, x}, "X16/bf16"},
		{[]tensor.Chunk{raw, x, raw}, "X16/bf16+raw"},
		{[]tensor.Chunk{y, x, y}, "X16/bytes+X16/bf16"}, {[]tensor.Chunk{p, raw, x}, "planes/float16+X16/bf16+raw"},
	} {
		if got := Names(c.chunks); got != c.want {
			t.Errorf("%q, want %q", got, c.want)
		}
	}
	for want, c := range map[string]tensor.Chunk{"raw": {Transform: 1}, "X16/transform 99": {Codec: 1, Transform: 99},
		"planes/transform 0": {Codec: 6}, "unknown": {Codec: 99}} {
		if got := Name(c); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}
