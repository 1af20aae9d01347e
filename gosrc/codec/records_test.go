package codec

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"

	"github.com/overwire/overwire/gosrc/codec/x16"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/crc32c"
	"github.com/overwire/overwire/gosrc/tensor"
)

// The encoder supports exactly the transforms that the format allows for a dtype. Each of them encodes data that can
// be decoded with its chunk record.
func TestEveryKnownPair(t *testing.T) {
	const seed = 71
	r := rand.New(rand.NewPCG(seed, 0))
	src := make([]byte, 1<<14)
	for i := range src {
		src[i] = byte(r.IntN(3)) // low entropy, for every transform
	}
	pairs := 0
	for d := tensor.Bool; d.Valid(); d++ {
		for tr := range uint8(255) {
			listed := bytes.Contains(x16.TransformsFor(d), []byte{tr})
			if Known(tensor.CodecX16, tr, d) != listed {
				t.Errorf("%v, transform %d: listed %v, but Known disagrees", d, tr, listed)
			}
			if !listed {
				continue
			}
			pairs++
			var e x16.Encoder
			out, st, ok := e.Encode(nil, src, tr)
			if !ok {
				t.Errorf("%v, %s: the data was not compressed", d, x16.Name(tr))
				continue
			}
			c := tensor.Chunk{Codec: tensor.CodecX16, Transform: tr, SegTiles: st, Stored: uint32(len(out)),
				Logical: uint32(len(src)), Sum: crc32c.Sum(out)}
			dst := make([]byte, len(src))
			if err := Decode(dst, out, c); err != nil || !bytes.Equal(dst, src) {
				t.Errorf("%v, %s: %v", d, x16.Name(tr), err)
			}
		}
	}
	if pairs != 35 {
		t.Errorf("got %d pairs of dtype and transform, want 35", pairs)
	}
}

// With every codec, a record with other sizes than its buffers gives an argument error, and nothing is written. An
// unknown codec is reported as not supported.
func TestRecordsWithWrongSizes(t *testing.T) {
	for codec := range 256 {
		for _, sizes := range [][4]uint32{{4, 4, 5, 4}, {4, 4, 4, 5}, {4, 4, 0, 4}, {4, 4, 4, 0}, {0, 0, 1, 0},
			{4, 4, 1<<32 - 1, 4}, {4, 4, 4, 1<<32 - 1}} {
			dst, src := bytes.Repeat([]byte{9}, int(sizes[0])), make([]byte, sizes[1])
			c := tensor.Chunk{Codec: tensor.Codec(codec), Logical: sizes[2], Stored: sizes[3]}
			if err := Decode(dst, src, c); !errors.Is(err, errs.ErrArgument) ||
				!bytes.Equal(dst, bytes.Repeat([]byte{9}, len(dst))) {
				t.Fatalf("codec %d, sizes %v: got %v, %v", codec, sizes, err, dst)
			}
		}
		err := Decode(make([]byte, 4), make([]byte, 4), tensor.Chunk{Codec: tensor.Codec(codec), Logical: 4, Stored: 4})
		want := map[tensor.Codec]error{tensor.CodecRaw: nil, tensor.CodecX16: errs.ErrCorrupt,
			tensor.CodecPlanes: errs.ErrCorrupt}
		class, ours := want[tensor.Codec(codec)]
		if !ours {
			class = errs.ErrNotSupported
		}
		if !errors.Is(err, class) {
			t.Errorf("codec %d: %v", codec, err)
		}
	}
}

// Use accepts the names of the setting. Any other name selects the machine's best decoder.
func TestUse(t *testing.T) {
	defer Use("")
	for name, want := range map[string]x16.Level{"scalar": x16.Scalar, "neon": x16.NEON, "avx2": x16.AVX2,
		"avx512": x16.AVX512, "": x16.Best(), "none": x16.Best(), "AVX2": x16.Best()} {
		if !slices.Contains(x16.Levels(), want) {
			want = x16.Best()
		}
		Use("scalar")
		if Use(name); x16.Using() != want {
			t.Errorf("%q: %v, want %v", name, x16.Using(), want)
		}
	}
}

// Many goroutines can decode chunks of several codecs into one tensor concurrently.
func TestConcurrentChunks(t *testing.T) {
	const seed, each = 81, 6000
	r := rand.New(rand.NewPCG(seed, 0))
	var e x16.Encoder
	var chunks []tensor.Chunk
	var stored [][]byte
	var want []byte
	for i := range 64 {
		part := make([]byte, each+i%7)
		for k := range part {
			part[k] = byte(r.IntN(1 + 60*(i%3)))
		}
		want = append(want, part...)
		c := tensor.Chunk{Logical: uint32(len(part)), Stored: uint32(len(part))}
		p := part
		if out, st, ok := e.Encode(nil, part, x16.Bytes); ok && i%4 > 0 {
			p, c.Codec, c.Transform, c.SegTiles, c.Stored = out, tensor.CodecX16, x16.Bytes, st, uint32(len(out))
		}
		chunks, stored = append(chunks, c), append(stored, p)
	}
	got := make([]byte, len(want))
	var wg sync.WaitGroup
	at := 0
	for i, c := range chunks {
		dst := got[at : at+int(c.Logical) : at+int(c.Logical)]
		at += len(dst)
		wg.Go(func() {
			if err := Decode(dst, stored[i], c); err != nil {
				t.Errorf("chunk %d: %v", i, err)
			}
		})
	}
	if wg.Wait(); !bytes.Equal(got, want) {
		t.Error("the decoded bytes differ")
	}
}
