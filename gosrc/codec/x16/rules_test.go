package x16

import (
	"bytes"
	"encoding/binary"
	"errors"
	"strings"
	"testing"

	"github.com/overwire/overwire/gosrc/errs"
)

// rules is a valid chunk and its properties.
type rules struct {
	chunk, want []byte
	st          uint16
	segs        int
}

// escaped returns a bf16 chunk of 12 tiles in two segments. Both segments have escapes.
func escaped(t *testing.T) rules {
	t.Helper()
	src := make([]byte, 2*256*12+3)
	for i := range len(src) / 2 {
		exponent := uint16(120 + i*i%3)
		if i%100 == 7 {
			exponent = uint16(50 + i/100) // there are more values than symbols
		}
		binary.LittleEndian.PutUint16(src[2*i:], exponent<<7|uint16(i*2654435761>>9)&0x807f)
	}
	e := Encoder{segTiles: 6}
	chunk, st, ok := e.Encode(nil, src, BF16)
	if !ok || chunk[3] == 0 {
		t.Fatal("the chunk has no escapes")
	}
	return rules{chunk, src, st, (12 + int(st) - 1) / int(st)}
}

// entry returns a field of the directory's entry i: 0 is the offset, 1 the number of escapes.
func (g *rules) entry(i, what int) []byte { return g.chunk[headerBytes+8*i+4*what:] }

func (g *rules) offset(i int) int { return int(binary.LittleEndian.Uint32(g.entry(i, 0))) }

// list returns the offset of a segment's list of escapes and their number.
func (g *rules) list(seg int) (at, n int) {
	n = int(binary.LittleEndian.Uint32(g.entry(seg, 1)))
	end := g.offset(seg + 1)
	for at = end - 3*n; at > end-3*n-16; at-- { // padding is at most 15 zeros
		rising := isZero(g.chunk[at+3*n : end])
		for i := range n {
			p := binary.LittleEndian.Uint16(g.chunk[at+2*i:])
			rising = rising && (i == 0 || p > binary.LittleEndian.Uint16(g.chunk[at+2*i-2:])) &&
				(int(p)+seg*int(g.st)*tileSyms)%100 == 7
		}
		if rising {
			return at, n
		}
	}
	return 0, 0
}

// Every level refuses a chunk that breaks a rule of docs/format.md. The error names the rule and has the class
// Corrupt.
func TestEveryRule(t *testing.T) {
	put := binary.LittleEndian.PutUint32
	rule := func(name, text string, breaks func(g *rules)) {
		t.Helper()
		g := escaped(t)
		breaks(&g)
		for _, l := range Levels() {
			err := DecodeAt(l, make([]byte, len(g.want)), g.chunk, BF16, g.st)
			if !errors.Is(err, errs.ErrCorrupt) || !strings.Contains(err.Error(), text) {
				t.Errorf("%v: %s: %v, want %q", l, name, err, text)
			}
		}
	}
	g := escaped(t)
	dst := make([]byte, len(g.want))
	if err := Decode(dst, g.chunk, BF16, g.st); err != nil || !bytes.Equal(dst, g.want) || g.segs != 2 {
		t.Fatalf("got %v and %d segments, want 2", err, g.segs)
	}
	at, n := g.list(1)
	if n < 2 {
		t.Fatalf("got %d escapes, want at least 2", n)
	}
	esc := int(g.chunk[3]) - 1

	rule("mode 2", "mode 2", func(g *rules) { g.chunk[0] = 2 })
	rule("a symbol in mode 0", "symbol 1 in mode 0", func(g *rules) { g.chunk[1] = 1 })
	rule("one symbol only, with a table", "", func(g *rules) { g.chunk[0] = 1; g.chunk[3] = 0 })
	rule("one symbol only, with escapes", "escape symbol", func(g *rules) { g.chunk[0] = 1 })
	rule("a constant plane that does not exist", "constant planes 0x2: the transform has 1 planes",
		func(g *rules) { g.chunk[2] = 2 })
	rule("a value of a plane that is not constant", "constant plane 0 has the invalid value 5",
		func(g *rules) { g.chunk[8] = 5 })
	rule("a value of a plane that does not exist", "constant plane 7 has the invalid value 1",
		func(g *rules) { g.chunk[15] = 1 })
	rule("a constant plane that is stored", "stored bytes", func(g *rules) { g.chunk[2] = 1 })
	rule("an escape symbol of 16", "escape symbol 16", func(g *rules) { g.chunk[3] = 17 })
	rule("an escape symbol that does not occur", "does not occur", func(g *rules) { g.chunk[32+esc] = 0 })
	rule("no tiles", "0 tiles", func(g *rules) { put(g.chunk[4:], 0) })
	rule("a tile too many", "13 tiles", func(g *rules) { put(g.chunk[4:], 13) })
	rule("a huge number of tiles", "tiles", func(g *rules) { put(g.chunk[4:], 1<<32-1) })
	rule("a value of the escape symbol", "palette", func(g *rules) { g.chunk[16+esc] = 9 })
	rule("a sum of 257", "frequencies", func(g *rules) { g.chunk[32]++ })
	rule("a divider of 17", "divider 17", func(g *rules) { g.chunk[48] = 17 })
	rule("an alias of 16", "alias 16", func(g *rules) { g.chunk[64] = 16 })
	rule("the first word that is zero", "must be zero", func(g *rules) { g.chunk[80] = 1 })
	rule("the last byte that is zero", "must be zero", func(g *rules) { g.chunk[95] = 0x80 })
	rule("a gap before the segments", "segment 0 at", func(g *rules) { put(g.entry(0, 0), uint32(g.offset(0)+16)) })
	rule("a segment that is not aligned", "segment 1 at", func(g *rules) { put(g.entry(1, 0), uint32(g.offset(1)+1)) })
	rule("a segment after the end", "segment 2 at", func(g *rules) { put(g.entry(2, 0), uint32(len(g.chunk)+15)&^15) })
	rule("segments that overlap", "segment 0 of -", func(g *rules) { put(g.entry(1, 0), 16) })
	rule("a segment too small for its states", "segment 0 of 112 bytes", func(g *rules) {
		put(g.entry(1, 0), uint32(g.offset(0)+112))
	})
	rule("more escapes than symbols", "escapes", func(g *rules) { put(g.entry(0, 1), 1<<31) })
	rule("escapes in the last entry", "segment 2 with 1 escapes", func(g *rules) { put(g.entry(2, 1), 1) })
	rule("padding of the directory", "padding", func(g *rules) { g.chunk[g.offset(0)-1] = 1 })
	rule("a state below 2^16", "begins with state 65535", func(g *rules) { put(g.chunk[g.offset(1)+4*31:], 1<<16-1) })
	rule("a wrong last state", "ends in state", func(g *rules) { g.chunk[g.offset(1)+128] ^= 1 })
	rule("an escape too few", "", func(g *rules) { put(g.entry(1, 1), uint32(n-1)) })
	rule("an escape too many", "", func(g *rules) { put(g.entry(1, 1), uint32(n+1)) })
	rule("positions out of order", "value", func(g *rules) { copy(g.chunk[at+2:], g.chunk[at:at+2]) })
	rule("a position after the segment", "at 65535", func(g *rules) { copy(g.chunk[at+2*n-2:], "\xff\xff") })
	rule("a position without the escape symbol", "no escape symbol", func(g *rules) { g.chunk[at]-- })
	rule("padding of a segment", "words and escapes end", func(g *rules) { g.chunk[g.offset(2)-1] = 1 })
	rule("a byte more", "stored bytes", func(g *rules) { g.chunk = append(g.chunk, 0) })
	rule("a byte less", "stored bytes", func(g *rules) { g.chunk = g.chunk[:len(g.chunk)-1] })
	rule("only a header", "too few for a directory", func(g *rules) { g.chunk = g.chunk[:headerBytes] })
	rule("less than a header", "95 bytes", func(g *rules) { g.chunk = g.chunk[:headerBytes-1] })
	rule("nothing", "0 bytes", func(g *rules) { g.chunk = nil })
	rule("no tiles per segment", "0 tiles per segment", func(g *rules) { g.st = 0 })
	rule("too many tiles per segment", "257 tiles per segment", func(g *rules) { g.st = 257 })
}
