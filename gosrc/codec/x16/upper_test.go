package x16

import (
	"testing"

	"github.com/overwire/overwire/gosrc/internal/avx/avxtest"
)

// Every vector step of encoding and decoding leaves the upper register halves clear. Each step is tested separately,
// because a later step may hide an error of an earlier one. The exported functions are also tested, with a valid and
// an invalid chunk.
func TestUpperHalvesAreClear(t *testing.T) {
	avxtest.Need(t)
	for tr := uint8(BF16); tr <= Bytes; tr++ {
		src := benchSample(tr, 1<<15)
		for _, l := range Levels() {
			t.Run(Name(tr)+"/"+l.String(), func(t *testing.T) {
				chunk, st := encodesClear(t, l, src, tr)
				decodesClear(t, l, chunk, st, make([]byte, len(src)), tr)
			})
		}
		avxtest.Clear(t, "Estimate", func() { Estimate(src, tr) })
	}
}

func encodesClear(t *testing.T, l Level, src []byte, tr uint8) (chunk []byte, st uint16) {
	e := Encoder{level: l, forced: true}
	n := len(src) * 8 / forms[tr].bits / tileSyms * tileSyms
	body := src[:n/8*forms[tr].bits]
	avxtest.Clear(t, "split", func() { e.splitElements(tr, body, n) })
	hist := e.histogram()
	m := fitModel(&hist, n, forms[tr].identity)
	avxtest.Clear(t, "prepare", func() {
		e.table = newTable(m.freq)
		e.prepareTables(&m)
	})
	avxtest.Clear(t, "symbols", func() {
		e.splitElements(tr, body, n) // turnIntoSymbols overwrites the values
		e.turnIntoSymbols(&m)
	})
	avxtest.Clear(t, "groupFast", func() {
		e.words[0] = withLength(e.words[0], n+64)[:n]
		e.groupFast([][]byte{e.vals})
	})
	avxtest.Clear(t, "Encode", func() {
		ok := false
		if chunk, st, ok = e.Encode(nil, src, tr); !ok {
			t.Fatal("the data was not compressed")
		}
	})
	return chunk, st
}

func decodesClear(t *testing.T, l Level, chunk []byte, st uint16, dst []byte, tr uint8) {
	d := decoder{lanes: new(laneMemory), level: l}
	if err := d.chunk.parse(dst, chunk, tr, st); err != nil {
		t.Fatal(err)
	}
	d.slots.build(&d.chunk.symbols)
	d.fast.build(l, &d.chunk.symbols)
	run := d.run[:min(len(d.run), d.chunk.segs)]
	avxtest.Clear(t, "kernel", func() {
		for i := range run {
			run[i].vals = &d.vals[i]
			if err := d.chunk.beginSegment(&run[i], i); err != nil {
				t.Fatal(err)
			}
			run[i].want, run[i].got = min(batch, run[i].tiles), 0
		}
		d.decodeFast(run)
	})
	if l > Scalar && run[0].got == 0 {
		t.Error("the kernel decoded nothing")
	}
	avxtest.Clear(t, "merge", func() { d.mergeTiles(run[0].vals[:run[0].want*tileSyms], 0) })
	avxtest.Clear(t, "Decode", func() {
		if err := DecodeAt(l, dst, chunk, tr, st); err != nil {
			t.Fatal(err)
		}
	})
	avxtest.Clear(t, "Decode of bad words", func() {
		if DecodeAt(l, dst, chunk[:len(chunk)-1], tr, st) == nil {
			t.Fatal("a truncated chunk was decoded")
		}
	})
}
