package cuda

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"testing"

	"github.com/overwire/overwire/gosrc/codec/delta"
	"github.com/overwire/overwire/gosrc/device/cuda/stream"
	"github.com/overwire/overwire/gosrc/errs"
)

// A deltaCase is a chunk of base and new bytes on the device.
type deltaCase struct {
	width, bytes, at int
}

// deltaCases fills one buffer with chunks of every width and length, and changes a share of the elements of each chunk.
// A negative share -x changes almost all elements in the first x of a chunk, and no others.
func deltaCases(r *rand.Rand, base []byte) (now []byte, cases []deltaCase) {
	now = bytes.Clone(base)
	at := 0
	for _, width := range []int{1, 2, 4, 8} {
		for _, n := range []int{8, 24, 504, 512, 520, 4096 + 8, 70_000} {
			for _, share := range []float64{0, 0.0005, 0.02, 0.6, -0.06} {
				for _, anyhow := range []bool{false, true} {
					for i := at; i < at+n; i += width {
						if x := r.Float64(); x < share || x < 0.9 && float64(i-at) < -share*float64(n) {
							now[i] ^= byte(1 << r.IntN(2))
							for k := range width {
								if anyhow {
									now[i+k] = byte(r.Uint32())
								}
							}
						}
					}
					cases = append(cases, deltaCase{width, n, at})
					at += n + 8*r.IntN(2) // not always a multiple of 16
				}
			}
		}
	}
	return now, cases
}

// The GPU's deltas equal the CPU's byte for byte. Applied on the GPU, they change each chunk into the new bytes and
// back, and no byte around it.
func TestDelta(t *testing.T) {
	t.Run("one batch", func(t *testing.T) { testDelta(t, 0) })
	t.Run("many batches", func(t *testing.T) { testDelta(t, 16<<10) })
}

func testDelta(t *testing.T, batch int) {
	d, l := open(t, 2, 1<<20)
	d.Deltas.Batch = batch
	r := random(t)
	base := make([]byte, 4<<20)
	for i := range base {
		base[i] = byte(r.Uint32())
	}
	now, cases := deltaCases(r, base)
	a, b := upload(t, d, l, now), upload(t, d, l, base)
	chunks := make([]stream.DeltaChunk, len(cases))
	for i, c := range cases {
		chunks[i] = stream.DeltaChunk{Now: uint64(uintptr(a.Ptr)) + uint64(c.at),
			Base:  uint64(uintptr(b.Ptr)) + uint64(c.at),
			Bytes: c.bytes, Width: c.width}
	}
	if err := d.EncodeDelta(t.Context(), stream.Order{Stream: 1}, chunks, func(int64) {}); err != nil {
		t.Fatal(err)
	}
	for i, c := range cases {
		want, err := delta.Encode(nil, now[c.at:c.at+c.bytes], base[c.at:c.at+c.bytes], c.width)
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(chunks[i].Stored, want) {
			t.Fatalf("%+v: the GPU's delta has %d bytes, the CPU's %d, or they differ", c,
				len(chunks[i].Stored), len(want))
		}
		chunks[i].Now = chunks[i].Base // the bytes to change
	}
	got := make([]byte, len(base))
	for _, want := range [][]byte{now, base} {
		if err := d.ReserveApply(chunks); err != nil {
			t.Fatal(err)
		}
		if err := d.ApplyDelta(stream.Order{Stream: 1}, chunks); err != nil {
			t.Fatal(err)
		}
		if err := d.Read(got, b); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got, want) {
			t.Fatal("wrong bytes")
		}
	}
}

// A chunk with any contents writes nothing outside its tensor.
func TestHostileDelta(t *testing.T) {
	d, l := open(t, 2, 1<<20)
	r := random(t)
	const n, guard = 8192, 4096
	mem := upload(t, d, l, make([]byte, n+2*guard))
	var chunks []stream.DeltaChunk
	for range 200 {
		width := 1 << r.IntN(4)
		base := make([]byte, n)
		now := bytes.Clone(base)
		for range 1 + r.IntN(300) {
			now[r.IntN(n)] ^= byte(1 + r.IntN(255))
		}
		p, err := delta.Encode(nil, now, base, width)
		if err != nil {
			t.Fatal(err)
		}
		for range 1 + r.IntN(8) {
			p[r.IntN(len(p))] ^= byte(1 << r.IntN(8))
		}
		if p[0] == 1 && len(p) != delta.Room(n) {
			continue // the host rejects a wrong length
		}
		chunks = append(chunks, stream.DeltaChunk{Now: uint64(uintptr(mem.Ptr)) + guard, Bytes: n, Width: width,
			Stored: p})
	}
	if err := d.ApplyDelta(stream.Order{Stream: 1}, chunks); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, n+2*guard)
	if err := d.Read(got, mem); err != nil {
		t.Fatal(err)
	}
	if len(bytes.Trim(got[:guard], "\x00")) != 0 || len(bytes.Trim(got[n+guard:], "\x00")) != 0 {
		t.Error("bytes next to the tensor were changed")
	}
	bad := []stream.DeltaChunk{{Now: chunks[0].Now + 1, Bytes: 8, Width: 4}, {Now: chunks[0].Now, Bytes: 7, Width: 2},
		{Now: chunks[0].Now, Bytes: 8, Width: 3}}
	for i := range bad {
		if err := d.ApplyDelta(stream.Order{Stream: 1}, bad[i:i+1]); !errors.Is(err, errs.ErrArgument) {
			t.Errorf("%+v: %v", bad[i], err)
		}
	}
}
