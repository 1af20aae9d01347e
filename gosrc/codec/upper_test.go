package codec

import (
	"math/rand/v2"
	"testing"
	"time"
	"unsafe"

	"github.com/overwire/overwire/gosrc/codec/delta"
	"github.com/overwire/overwire/gosrc/codec/digest"
	"github.com/overwire/overwire/gosrc/codec/planes"
	"github.com/overwire/overwire/gosrc/codec/x16"
	"github.com/overwire/overwire/gosrc/internal/avx/avxtest"
	"github.com/overwire/overwire/gosrc/internal/crc32c"
	"github.com/overwire/overwire/gosrc/tensor"
)

// All codecs, the digest and the checksum clear the upper halves of the vector registers. codec/x16 tests this for each
// of its steps.
func TestUpperHalvesAreClear(t *testing.T) {
	avxtest.Need(t)
	now := uint64(time.Now().UnixNano())
	t.Logf("seed %d", now)
	r := rand.New(rand.NewPCG(now, 0))
	data, base := make([]byte, 1<<18), make([]byte, 1<<18)
	for i := range data {
		data[i] = byte(r.NormFloat64() * 4)
		base[i] = data[i] ^ byte(r.Uint32()&r.Uint32()&r.Uint32())
	}
	out := make([]byte, len(data))
	for _, n := range []int{100, 1024, 5000, len(data)} {
		avxtest.Clear(t, "crc32c.Sum", func() { crc32c.Sum(data[:n]) })
		avxtest.Clear(t, "digest.Of", func() { digest.Of(data[:n]) })
		avxtest.Clear(t, "digest.All", func() {
			if _, err := digest.All(t.Context(), []digest.View{digest.Contiguous(address(data), int64(n))},
				1, nil); err != nil {
				t.Fatal(err)
			}
		})
	}
	for _, ways := range []Ways{{X16: x16.BF16}, {X16: x16.Bytes}, {Planes: planes.Bytes}} {
		var e Encoder
		c := tensor.Chunk{Logical: uint32(len(data))}
		var stored []byte
		avxtest.Clear(t, "Encode", func() { stored = e.Encode(nil, data, ways, &c) })
		c.Stored = uint32(len(stored))
		avxtest.Clear(t, "Decode", func() {
			if err := Decode(out, stored, c); err != nil {
				t.Fatal(err)
			}
		})
		avxtest.Clear(t, "Decode of bad bytes", func() {
			short := c
			short.Stored = c.Stored / 2
			if c.Codec != tensor.CodecRaw && Decode(out, stored[:short.Stored], short) == nil {
				t.Fatal("half a chunk was decoded")
			}
		})
	}
	var stored []byte
	avxtest.Clear(t, "delta.Encode", func() {
		var err error
		if stored, err = delta.Encode(nil, data, base, 2); err != nil {
			t.Fatal(err)
		}
	})
	avxtest.Clear(t, "delta.Apply", func() {
		copy(out, base)
		if err := delta.Apply(out, stored, 2); err != nil {
			t.Fatal(err)
		}
	})
	avxtest.Clear(t, "delta.Changed", func() {
		if n, err := delta.Changed(data, base, 2); err != nil || n == 0 {
			t.Fatal(n, err)
		}
	})
}

func address(p []byte) uint64 { return uint64(uintptr(unsafe.Pointer(&p[0]))) }
