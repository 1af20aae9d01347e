package planes

// The tests in this file create chunks according to docs/format.md 3.6, and break one rule in each.

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/klauspost/compress/zstd"

	"github.com/overwire/overwire/gosrc/codec/codectest"
	"github.com/overwire/overwire/gosrc/errs"
)

// chunk concatenates fields. An int is one byte; other integers have the size of their type.
func chunk(fields ...any) (out []byte) {
	for _, f := range fields {
		switch f := f.(type) {
		case int:
			out = append(out, byte(f))
		case []byte:
			out = append(out, f...)
		default:
			out, _ = binary.Append(out, binary.LittleEndian, f)
		}
	}
	return out
}

// coin returns a table of the two values 0 and 1, and its encoding.
func coin(zeros int) (t table, stored []byte) {
	t.freq[0], t.freq[1] = uint16(zeros), uint16(scale-zeros)
	return t, t.appendTable(nil)
}

// refused fails the test unless Decode refuses a chunk as corrupt for the given reason, without writing outside dst.
func refused(t *testing.T, name string, size int, src []byte, transform uint8, why string) {
	t.Helper()
	_, err := codectest.Decode(codectest.Codec{Decode: func(dst, src []byte, _ uint16) error {
		return Decode(dst, src, transform)
	}}, src, size, 0)
	if !errors.Is(err, errs.ErrCorrupt) || !strings.Contains(err.Error(), why) {
		t.Errorf("%s: %v, want %q", name, err, why)
	}
}

// A chunk with one invalid field is refused; the error names the field.
func TestEveryField(t *testing.T) {
	const n = 400
	text := bytes.Repeat([]byte{0, 1, 1, 0, 1, 0, 0, 0}, n/8)
	tab, stored := coin(2048)
	coded := new(Encoder).encodeBlock(nil, text, &tab)
	states, words := coded[:16], coded[18:]
	with := func(p []byte, at int, v byte) []byte { p = bytes.Clone(p); p[at] = v; return p }
	own := func(coded ...any) []byte {
		return chunk(append([]any{uint32(n), formBlocks, kindOwn, stored}, coded...)...)
	}
	frame := appendFrame(nil, text)
	for name, c := range map[string][]byte{
		"raw": chunk(uint32(n), formRaw, text), "Zstandard": chunk(uint32(n), formZstd, uint32(len(frame)), frame),
		"raw block": chunk(uint32(n), formBlocks, kindRaw, text), "own table": own(coded),
	} {
		if got := make([]byte, n); Decode(got, c, Bytes) != nil || !bytes.Equal(got, text) {
			t.Fatalf("%s: the valid chunk was refused", name)
		}
	}
	for _, c := range []struct {
		name  string
		chunk []byte
		why   string
	}{
		{"no size", nil, "needs 4 bytes, but only 0"},
		{"half a size", chunk(uint16(n)), "needs 4 bytes, but only 2"},
		{"size 0", chunk(uint32(0), formRaw, text), "states 0 bytes, expected 400"},
		{"size 399", chunk(uint32(n-1), formRaw, text), "states 399 bytes, expected 400"},
		{"size 401", chunk(uint32(n+1), formRaw, text), "states 401 bytes, expected 400"},
		{"size 2^31", chunk(uint32(1<<31), formRaw, text), "states 2147483648 bytes, expected 400"},
		{"size 2^32 - 1", chunk(^uint32(0), formRaw, text), "states 4294967295 bytes, expected 400"},
		{"no plane", chunk(uint32(n)), "needs 1 bytes, but only 0"},
		{"form 3", chunk(uint32(n), 3, text), "form 3"},
		{"form 255", chunk(uint32(n), 255, text), "form 255"},
		{"raw, too short", chunk(uint32(n), formRaw, text[1:]), "needs 400 bytes, but only 399"},
		{"raw, too long", chunk(uint32(n), formRaw, text, 0), "1 bytes follow the last plane"},
		{"no length of a frame", chunk(uint32(n), formZstd, uint16(0)), "needs 4 bytes, but only 2"},
		{"frame of no bytes", chunk(uint32(n), formZstd, uint32(0), frame), "Zstandard frame"},
		{"frame too short", chunk(uint32(n), formZstd, uint32(len(frame)-1), frame), "Zstandard frame"},
		{"frame too long", chunk(uint32(n), formZstd, uint32(len(frame)+1), frame), "a frame has"},
		{"frame of 2^31", chunk(uint32(n), formZstd, uint32(1<<31), frame), "a frame has 2147483648 bytes"},
		{"frame of 2^32 - 1", chunk(uint32(n), formZstd, ^uint32(0), frame), "a frame has 4294967295 bytes"},
		{"no kind", chunk(uint32(n), formBlocks), "needs 1 bytes, but only 0"},
		{"kind 4", chunk(uint32(n), formBlocks, 4, text), "block 0 has unknown kind 4"},
		{"kind 255", chunk(uint32(n), formBlocks, 255, text), "block 0 has unknown kind 255"},
		{"raw block, too short", chunk(uint32(n), formBlocks, kindRaw, text[1:]), "needs 400 bytes, but only 399"},
		{"constant block without a value", chunk(uint32(n), formBlocks, kindConstant), "needs 1 bytes, but only 0"},
		{"constant block and more", chunk(uint32(n), formBlocks, kindConstant, 7, 7), "1 bytes follow the last plane"},
		{"a shared table of one block", chunk(uint32(n), formBlocks, kindShared, stored, coded),
			"used by only one block"},
		{"state 0", own(make([]byte, 4), coded[4:]), "invalid state 0: 0x0"},
		{"state 65535", own(coded[:12], uint32(start-1), coded[16:]), "invalid state 3: 0xffff"},
		{"no words", own(states, uint16(0), words), "words extend past"},
		{"a word too few", own(states, uint16(len(words)/2-1), words[:len(words)-2]), "words extend past"},
		{"a word too many", own(states, uint16(len(words)/2+1), words, uint16(0)), "2 bytes of words are left"},
		{"words past the chunk", own(states, ^uint16(0), words), "needs 131070 bytes"},
		{"half a head", own(states), "needs 18 bytes, but only 16"},
		{"a byte after the end", own(coded, 0), "1 bytes follow the last plane"},
	} {
		refused(t, c.name, n, c.chunk, Bytes, c.why)
	}
	one := new(Encoder).encodeBlock(nil, text[:1], &tab) // only state 0 decodes a value
	refused(t, "another state", 1, chunk(uint32(1), formBlocks, kindOwn, stored, with(one, 4, 1)), Bytes,
		"state 1 ends as 0x10001")
}

// A table has only one valid encoding: its frequencies are 1 to 4095, as short as possible, and sum to 4096.
func TestTables(t *testing.T) {
	of := func(values byte, freqs ...byte) []byte {
		return chunk(int(values), make([]byte, 31), freqs)
	}
	var all table
	for v := range all.freq {
		all.freq[v] = scale / 256
	}
	for name, p := range map[string][]byte{
		"even":     of(3, 128|8, 0, 128|8, 0),
		"1 + 4095": of(3, 1, 128|15, 255),
		"127":      of(3, 127, 128|15, 129),
		"128":      of(3, 128, 128, 128|15, 128),
		"all":      all.appendTable(nil),
	} {
		var got table
		n, err := got.readTable(append(bytes.Clone(p), 99))
		if err != nil || n != len(p) || n != got.encodedSize() || !bytes.Equal(got.appendTable(nil), p) {
			t.Errorf("%s: %d bytes of %d, %v", name, n, len(p), err)
		}
		for k := range p {
			if _, err := got.readTable(p[:k]); !errors.Is(err, errs.ErrCorrupt) {
				t.Errorf("%s, cut to %d bytes: %v", name, k, err)
			}
		}
	}
	for _, c := range []struct {
		name  string
		table []byte
		why   string
	}{
		{"no value", of(0), "frequencies sum to 0"},
		{"sum 4095", of(3, 1, 128|15, 254), "frequencies sum to 4095"},
		{"sum 4097", of(3, 2, 128|15, 255), "frequencies sum to 4097"},
		{"sum 8192", of(15, 128|8, 0, 128|8, 0, 128|8, 0, 128|8, 0), "frequencies sum to 8192"},
		{"0 in one byte", of(7, 0, 1, 128|15, 255), "frequency 0 of value 0"},
		{"0 in two bytes", of(7, 128, 0, 1, 128|15, 255), "frequency 0 is stored in two bytes"},
		{"127 in two bytes", of(3, 128, 127, 128|15, 129), "frequency 127 is stored in two bytes"},
		{"one value with all slots", of(1, 128|16, 0), "frequency 4096 of value 0"},
		{"the largest number", of(1, 255, 255), "frequency 32767 of value 0"},
	} {
		var got table
		if _, err := got.readTable(c.table); !errors.Is(err, errs.ErrCorrupt) || !strings.Contains(err.Error(), c.why) {
			t.Errorf("%s: %v, want %q", c.name, err, c.why)
		}
	}
}

// The slots of a table are assigned to the values in order. The ranks of each value start at 0.
func TestSlots(t *testing.T) {
	var tab table
	tab.freq[3], tab.freq[200], tab.freq[255] = 1, 4000, 95
	var s slots
	tab.expandSlots(&s)
	for i, e := range s {
		v, f, r := 3, 1, i
		switch {
		case i > 4000:
			v, f, r = 255, 95, i-4001
		case i > 0:
			v, f, r = 200, 4000, i-1
		}
		if want := uint32(v | f<<8 | r<<20); e != want {
			t.Fatalf("slot %d is %#x, want %#x", i, e, want)
		}
	}
}

// A plane must be a single frame that states the plane's size and has no dictionary. Nothing may come before or after
// the frame.
func TestFrames(t *testing.T) {
	text := bytes.Repeat([]byte("a few words, again and again; "), 9)
	encoder := func(o ...zstd.EOption) *zstd.Encoder {
		w, err := zstd.NewWriter(nil, append(o, zstd.WithEncoderConcurrency(1))...)
		if err != nil {
			t.Fatal(err)
		}
		return w
	}
	all := func(p []byte, o ...zstd.EOption) []byte { return encoder(o...).EncodeAll(p, nil) }
	noise := make([]byte, len(text)) // the frame of noise has one raw block
	for i := range noise {
		noise[i] = byte(rand.Uint32())
	}
	good := all(text, zstd.WithEncoderCRC(false))
	skippable := chunk(uint32(0x184d2a50), uint32(3), []byte("abc"))
	var stream bytes.Buffer
	w := encoder()
	w.Reset(&stream)
	for _, p := range [][]byte{text[:9], text[9:]} { // flushing makes a frame without a size
		if _, err := w.Write(p); err != nil || w.Flush() != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	dictionary := all(text, zstd.WithEncoderDictRaw(7, text[:60]))
	of := func(frame []byte) []byte { return chunk(uint32(len(text)), formZstd, uint32(len(frame)), frame) }
	for name, c := range map[string]struct{ frame, want []byte }{
		"plain": {good, text}, "with a checksum": {all(text), text}, "one raw block": {all(noise), noise},
		"one value":     {all(make([]byte, len(text))), make([]byte, len(text))},
		"with a window": {all(text, zstd.WithSingleSegment(false)), text},
	} {
		if got := make([]byte, len(text)); Decode(got, of(c.frame), Bytes) != nil || !bytes.Equal(got, c.want) {
			t.Errorf("%s: %v", name, Decode(got, of(c.frame), Bytes))
		}
		for k := range c.frame {
			refused(t, fmt.Sprintf("%s, %d bytes", name, k), len(text), of(c.frame[:k]), Bytes, "Zstandard frame")
		}
		for bit := range 8 * len(c.frame) { // the chunk's checksum detects these; here they must not crash
			p := bytes.Clone(c.frame)
			p[bit/8] ^= 1 << (bit % 8)
			_, err := codectest.Decode(codectest.Codec{Decode: func(dst, src []byte, _ uint16) error {
				return Decode(dst, src, Bytes)
			}}, of(p), len(text), 0)
			if err != nil && !errors.Is(err, errs.ErrCorrupt) {
				t.Errorf("%s, bit %d: %v", name, bit, err)
			}
		}
	}
	for name, frame := range map[string][]byte{
		"two frames":                  append(all(text[:100]), all(text[100:])...),
		"a frame and an empty one":    append(bytes.Clone(good), all(nil, zstd.WithZeroFrames(true))...),
		"a frame, then a skipped one": append(bytes.Clone(good), skippable...),
		"a skipped frame first":       append(bytes.Clone(skippable), good...),
		"a skipped frame":             skippable,
		"a byte after the end":        append(bytes.Clone(good), 0),
		"three bytes after the end":   append(bytes.Clone(good), 0x28, 0xb5, 0x2f),
		"an unannounced checksum":     append(bytes.Clone(good), all(text)[len(all(text))-4:]...),
		"a frame without its size":    stream.Bytes(),
		"with a dictionary":           dictionary,
		"a frame of fewer bytes":      all(text[1:]),
		"a frame of more bytes":       all(append([]byte{1}, text...)),
		"a frame of no bytes":         all(nil, zstd.WithZeroFrames(true)),
		"a wrong checksum":            append(all(text)[:len(all(text))-1], ^all(text)[len(all(text))-1]),
	} {
		refused(t, name, len(text), of(frame), Bytes, "Zstandard frame")
	}
}

// Unknown transforms, empty data and partial elements are refused by Encode and Decode. Encode then does not change
// its destination.
func TestShapes(t *testing.T) {
	for _, transform := range []uint8{0, 8, 255} {
		refused(t, "transform", 8, chunk(uint32(8), formRaw, make([]byte, 8)), transform, "transform")
		if out, ok := new(Encoder).Encode([]byte("x"), make([]byte, 4096), transform); ok || string(out) != "x" {
			t.Errorf("transform %d was accepted", transform)
		}
	}
	for transform := uint8(1); isKnown(transform); transform++ {
		w := transforms[transform].width
		refused(t, "nothing", 0, chunk(uint32(0), formRaw), transform, "0 bytes with elements")
		for n := range 4 * w {
			src := make([]byte, 4096+n)
			out, ok := new(Encoder).Encode([]byte("x"), src, transform)
			if whole := n%w == 0; ok != whole || !whole && string(out) != "x" {
				t.Errorf("%s: %d bytes: %v", Name(transform), len(src), ok)
			}
			if n%w != 0 {
				refused(t, "half an element", n, chunk(uint32(n), formRaw, make([]byte, n)), transform,
					"bytes with elements")
			}
		}
		for planes := range w { // each missing plane is detected
			refused(t, "a plane is missing", 8*w, chunk(uint32(8*w),
				bytes.Repeat(chunk(formBlocks, kindConstant, 5), planes)), transform,
				fmt.Sprintf("plane %d: ", planes))
		}
	}
}

// A chunk of several blocks stores their shared table once. A truncated chunk is refused.
func TestSharedTable(t *testing.T) {
	tab, stored := coin(1000)
	e, r := new(Encoder), rand.New(rand.NewPCG(9, 9))
	text := make([]byte, 3*blockBytes+5)
	for i := range text[:2*blockBytes] {
		text[i] = byte(min(r.IntN(4), 1))
	}
	copy(text[3*blockBytes:], []byte{1, 0, 1, 1, 1})
	body := chunk(uint32(len(text)), formBlocks, kindShared, kindShared, kindConstant, kindShared, stored)
	heads := []int{len(body)}
	for i := range 4 {
		if i == 2 {
			body = append(body, 0)
		} else {
			body = e.encodeBlock(body, blockOf(text, i), &tab)
		}
		heads = append(heads, len(body))
	}
	got := make([]byte, len(text))
	if err := Decode(got, body, Bytes); err != nil || !bytes.Equal(got, text) {
		t.Fatal(err)
	}
	agree(t, len(text), body, Bytes)
	cuts := []int{4, 5, 6, 7, 8, 9, 10, 40, 41, 42, 43}
	for _, h := range heads {
		cuts = append(cuts, h-1, h, h+1, h+17, h+18, h+20)
	}
	for _, k := range cuts {
		if k < len(body) {
			refused(t, fmt.Sprintf("cut to %d", k), len(text), body[:k], Bytes, "plane 0: ")
		}
	}
	for i, kinds := range [][]byte{{3, 0, 1, 0}, {3, 3, 4, 3}, {3, 3, 3, 3}, {2, 3, 1, 3}, {3, 3, 1, 1}} {
		p := bytes.Clone(body)
		copy(p[5:], kinds)
		if slices.Equal(p, body) || Decode(got, p, Bytes) == nil {
			t.Errorf("%d: kinds %v were accepted", i, kinds)
		}
		agree(t, len(text), p, Bytes)
	}
}
