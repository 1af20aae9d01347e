// Package codectest is the test suite that every codec must pass. Decoding must return the encoded bytes and must not
// write outside the destination. Invalid bytes must give an error of class Corrupt, never a panic.
package codectest

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/overwire/overwire/gosrc/errs"
)

// guard is the number of bytes before and after a destination that Decode must not change.
const guard = 128

// A Codec is a codec, or one of its implementations, with fixed parameters.
type Codec struct {
	// Encode appends the chunk of src to dst. ok is false if the chunk would not be smaller. note is the value from
	// the index that Decode needs.
	Encode func(dst, src []byte) (out []byte, note uint16, ok bool)
	Decode func(dst, src []byte, note uint16) error
}

// A Sample is a named input.
type Sample struct {
	Name string
	Data []byte
}

// Run runs the suite on the samples. Random choices come from seed, which is logged.
func Run(t *testing.T, c Codec, samples []Sample, seed uint64) {
	t.Helper()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	for _, s := range samples {
		t.Run(s.Name, func(t *testing.T) {
			before := bytes.Clone(s.Data)
			head := []byte("head")
			out, note, ok := c.Encode(head, s.Data)
			if !bytes.Equal(before, s.Data) {
				t.Fatal("Encode changed its input")
			}
			if !bytes.HasPrefix(out, head) || !ok && len(out) != len(head) {
				t.Fatal("Encode changed the bytes before the chunk")
			}
			if !ok {
				return
			}
			chunk := bytes.Clone(out[len(head):])
			again, note2, _ := c.Encode(nil, s.Data)
			if !bytes.Equal(again, chunk) || note != note2 {
				t.Fatal("Encode is not deterministic")
			}
			got, err := Decode(c, chunk, len(s.Data), note)
			if err != nil || !bytes.Equal(got, s.Data) {
				t.Fatalf("round trip of %d bytes through a chunk of %d: error %v, equal %v",
					len(s.Data), len(chunk), err, bytes.Equal(got, s.Data))
			}
			mutateChunk(t, c, r, chunk, len(s.Data), note)
		})
	}
}

// Decode runs c.Decode with guard bytes around dst. It returns an error for any write outside dst, any change to src,
// and any error class other than Corrupt.
func Decode(c Codec, chunk []byte, size int, note uint16) ([]byte, error) {
	room := bytes.Repeat([]byte{0xa5}, size+2*guard)
	dst := room[guard : guard+size : guard+size]
	// src ends at the end of its array, so that sanitizers detect reads beyond it.
	src := append(make([]byte, 0, len(chunk)), chunk...)
	err := c.Decode(dst, src, note)
	for i, b := range room {
		if (i < guard || i >= guard+size) && b != 0xa5 {
			return nil, fmt.Errorf("byte %d, outside a destination of %d bytes, was written", i-guard, size)
		}
	}
	if !bytes.Equal(src, chunk) {
		return nil, errors.New("Decode changed its source")
	}
	if err != nil && !errors.Is(err, errs.ErrCorrupt) {
		return nil, fmt.Errorf("the error is not of class Corrupt: %w", err)
	}
	return dst, err
}

// mutateChunk changes a chunk in many ways. Decoding a changed chunk must return bytes or an error of class Corrupt,
// without side effects.
func mutateChunk(t *testing.T, c Codec, r *rand.Rand, chunk []byte, size int, note uint16) {
	t.Helper()
	check := func(what string, p []byte, size int, note uint16, mayPass bool) {
		t.Helper()
		_, err := Decode(c, p, size, note)
		if err != nil && !errors.Is(err, errs.ErrCorrupt) {
			t.Fatalf("%s: %v", what, err)
		}
		if err == nil && !mayPass {
			t.Fatalf("%s: accepted", what)
		}
	}
	for range 60 {
		p := bytes.Clone(chunk)
		for range 1 + r.IntN(3) {
			i := r.IntN(len(p))
			if r.IntN(2) == 0 { // the header is at the front
				i = r.IntN(min(len(p), 256))
			}
			p[i] ^= byte(1 << r.IntN(8))
		}
		check("flipped bits", p, size, note, true)
	}
	for range 20 {
		check("truncated", chunk[:r.IntN(len(chunk))], size, note, false)
	}
	check("an extra byte", append(bytes.Clone(chunk), 0), size, note, false)
	check("a destination that is a byte too short", chunk, size-1, note, false)
	check("a destination that is a byte too long", chunk, size+1, note, false)
	check("an empty destination", chunk, 0, note, false)
	check("other parameters", chunk, size, note^1, true)
	noise := make([]byte, len(chunk))
	for i := range noise {
		noise[i] = byte(r.Uint32())
	}
	check("noise", noise, size, note, true)
	copy(noise, chunk[:min(len(chunk), 96+r.IntN(64))])
	check("noise after a header", noise, size, note, true)
}
