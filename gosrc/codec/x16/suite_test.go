package x16

import (
	"bytes"
	"math/rand/v2"
	"testing"

	"github.com/overwire/overwire/gosrc/codec/codectest"
)

// twin returns the codec of one transform, decoded at one level. Its segments are short, so that small samples have
// several.
func twin(transform uint8, l Level) codectest.Codec {
	e := Encoder{segTiles: 6}
	return codectest.Codec{
		Encode: func(dst, src []byte) ([]byte, uint16, bool) { return e.Encode(dst, src, transform) },
		Decode: func(dst, src []byte, st uint16) error { return DecodeAt(l, dst, src, transform, st) },
	}
}

// For every transform, the decoder of every level passes the codec test suite.
func TestSuite(t *testing.T) {
	const seed = 2
	r := rand.New(rand.NewPCG(seed, 0))
	by := map[uint8][]codectest.Sample{}
	for _, n := range []int{1 << 14, 5000, 300} {
		for _, s := range samples(r, n) {
			by[s.transform] = append(by[s.transform], codectest.Sample{Name: s.name, Data: s.data[:len(s.data)-n%3]})
		}
	}
	for tr := uint8(BF16); tr <= Bytes; tr++ {
		by[tr] = append(by[tr], codectest.Sample{Name: "nothing"}, codectest.Sample{Name: "one byte", Data: []byte{1}})
		for _, l := range Levels() {
			t.Run(Name(tr)+"/"+l.String(), func(t *testing.T) {
				codectest.Run(t, twin(tr, l), by[tr], seed)
			})
		}
	}
}

// agree decodes p at every level. It fails the test unless all levels give the same bytes or all return an error.
func agree(t *testing.T, p []byte, size int, transform uint8, st uint16) (ok bool) {
	t.Helper()
	want, wantErr := codectest.Decode(twin(transform, Scalar), p, size, st)
	if wantErr != nil && want == nil {
		t.Fatalf("scalar: %v", wantErr)
	}
	for _, l := range Levels()[1:] {
		got, err := codectest.Decode(twin(transform, l), p, size, st)
		if err != nil && got == nil {
			t.Fatalf("%v: %v", l, err)
		}
		if (err == nil) != (wantErr == nil) {
			t.Fatalf("%v returns %v, scalar returns %v", l, err, wantErr)
		}
		if err == nil && !bytes.Equal(got, want) {
			t.Fatalf("%v and scalar give different bytes", l)
		}
	}
	return wantErr == nil
}

// The decoders of all levels agree on chunks with damage in critical parts: the table, the directory, states, words and
// escapes.
func TestTwinsAgree(t *testing.T) {
	const seed = 3
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	e := Encoder{segTiles: 6}
	rounds, accepted := 0, 0
	for _, n := range []int{1 << 14, 3000} {
		for _, s := range samples(r, n) {
			chunk, st, ok := e.Encode(nil, s.data, s.transform)
			if !ok {
				continue
			}
			for range 40 {
				p := bytes.Clone(chunk)
				hurt(r, p)
				rounds++
				if agree(t, p, len(s.data), s.transform, st) {
					accepted++
				}
			}
		}
	}
	t.Logf("%d chunks, %d accepted", rounds, accepted)
}

// hurt damages a chunk in a way that the first checks may not detect.
func hurt(r *rand.Rand, p []byte) {
	switch r.IntN(6) {
	case 0: // another valid table: a slot moves from one symbol to another
		var tb table
		copy(tb.freq[:], p[32:48])
		i, j := r.IntN(16), r.IntN(16)
		if tb.freq[i] > 0 && tb.freq[j] < 255 {
			tb.freq[i]--
			tb.freq[j]++
			tb = newTable(tb.freq)
			copy(p[32:], tb.freq[:])
			copy(p[48:], tb.divider[:])
			copy(p[64:], tb.alias[:])
		}
	case 1: // the palette
		p[16+r.IntN(16)] = byte(r.IntN(32))
	case 2: // another escape symbol
		p[3] = byte(r.IntN(17))
	case 3: // the directory
		p[min(len(p)-1, headerBytes+r.IntN(40))] ^= 1 << r.IntN(8)
	case 4: // anything
		p[r.IntN(len(p))] = byte(r.Uint32())
	case 5: // a run of equal bytes
		i := r.IntN(len(p))
		for j := i; j < min(len(p), i+r.IntN(600)); j++ {
			p[j] = p[i]
		}
	}
}

// FuzzDecode compares the decoders of all levels on arbitrary input.
func FuzzDecode(f *testing.F) {
	r := rand.New(rand.NewPCG(4, 0))
	e := Encoder{segTiles: 3}
	for _, s := range samples(r, 2500) {
		if chunk, st, ok := e.Encode(nil, s.data, s.transform); ok {
			f.Add(chunk, uint32(len(s.data)), s.transform, st)
		}
	}
	f.Fuzz(func(t *testing.T, p []byte, size uint32, transform uint8, st uint16) {
		if size > 1<<16 {
			return
		}
		agree(t, p, int(size), transform, st)
	})
}

// FuzzRoundTrip encodes arbitrary bytes, repeated to fill a few tiles.
func FuzzRoundTrip(f *testing.F) {
	f.Add([]byte{0x80, 0x3f, 1, 2}, uint16(3000), uint8(1))
	f.Add([]byte{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18}, uint16(9000), uint8(8))
	f.Fuzz(func(t *testing.T, p []byte, size uint16, transform uint8) {
		if len(p) == 0 {
			return
		}
		src := make([]byte, size)
		for i := range src {
			src[i] = p[i*(1+i/977)%len(p)]
		}
		var e Encoder
		chunk, st, ok := e.Encode(nil, src, transform)
		if !ok {
			return
		}
		for _, l := range Levels() {
			got, err := codectest.Decode(twin(transform, l), chunk, len(src), st)
			if err != nil || !bytes.Equal(got, src) {
				t.Fatalf("%v: error %v, equal %v", l, err, bytes.Equal(got, src))
			}
		}
	})
}
