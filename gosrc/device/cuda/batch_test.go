package cuda_test

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"sync"
	"testing"
	"time"
	"unsafe"

	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/device/cuda"
	"github.com/overwire/overwire/gosrc/device/cuda/stream"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/load/loadtest"
	"github.com/overwire/overwire/gosrc/nvcomp"
)

// contents returns contents of every special length, both compressible and incompressible with X16.
func contents(r *rand.Rand) [][]byte {
	var all [][]byte
	for _, n := range []int{0, 1, 7, 511, 4096, 65535, 65536, 65537, 150_000} {
		b := make([]byte, n)
		for i := range b {
			b[i] = byte(r.Uint32())
			if i%2 == 1 && n != 4096 {
				b[i] = byte(60 + int(r.NormFloat64()))
			}
		}
		all = append(all, b)
	}
	return all
}

// encoded returns contents encoded by package nvcomp.
func encoded(t *testing.T, spec nvcomp.Spec, in [][]byte) [][]byte {
	t.Helper()
	spec.Op = nvcomp.OpEncode
	var buffers []nvcomp.Buffer
	for _, b := range in {
		buffers = append(buffers, nvcomp.Buffer{Src: b})
	}
	results, err := nvcomp.Run(t.Context(), spec, buffers)
	if err != nil {
		t.Fatal(err)
	}
	defer nvcomp.Release(results)
	var out [][]byte
	for _, r := range results {
		if r.Err != nil {
			t.Fatal(r.Err)
		}
		out = append(out, bytes.Clone(r.Mem.Slice()))
	}
	return out
}

// A gpu is a device with memory that drop frees.
type gpu struct {
	t *testing.T
	*cuda.Device
	held []device.Memory
}

func newGPU(t *testing.T) *gpu {
	loadtest.UseEngine(t)
	d, err := cuda.Open(0)
	if err != nil {
		t.Fatal(err)
	}
	g := &gpu{t: t, Device: d}
	t.Cleanup(g.drop)
	return g
}

func (g *gpu) drop() {
	for _, m := range g.held {
		m.Release()
	}
	g.held = nil
}

// room returns device memory that begins off bytes after a multiple of 256.
func (g *gpu) room(n, off int) uint64 {
	m, err := g.Alloc([]int64{int64(n + off)})
	if err != nil {
		g.t.Fatal(err)
	}
	if m[0].Block != nil {
		g.held = append(g.held, m[0])
	}
	return uint64(uintptr(m[0].Ptr)) + uint64(off)
}

func (g *gpu) put(b []byte, off int) uint64 {
	at := g.room(len(b), off)
	if len(b) > 0 {
		if err := g.Copy(stream.Order{}, at, uint64(uintptr(unsafe.Pointer(&b[0]))), int64(len(b)), true); err != nil {
			g.t.Fatal(err)
		}
	}
	return at
}

func (g *gpu) get(at uint64, n int64) []byte {
	b := make([]byte, n)
	if n > 0 {
		if err := g.Copy(stream.Order{}, uint64(uintptr(unsafe.Pointer(&b[0]))), at, n, true); err != nil {
			g.t.Fatal(err)
		}
	}
	return b
}

// streams copies encoded contents to the device and allocates space for their decoded contents.
func (g *gpu) streams(spec nvcomp.Spec, in, stored [][]byte) []stream.Bitstream {
	var all []stream.Bitstream
	off := 0
	if spec.Kind == nvcomp.Raw {
		off = 8 // puts the bytes after the head at a multiple of 16
	}
	for i := range in {
		s := stream.Bitstream{Kind: stream.Kind(spec.Kind), Stored: int64(len(stored[i])), Size: int64(len(in[i])),
			Chunk: spec.Chunk}
		if spec.Kind != nvcomp.Native {
			s.Chunk = max(1, s.Size)
		}
		s.Src, s.Dst = g.put(stored[i], off), g.room(max(1, len(in[i])), 0)
		all = append(all, s)
	}
	return all
}

// X16 streams of every kind and length decode on the device in one batch, and Peek returns their lengths.
func TestBatchX16(t *testing.T) {
	g := newGPU(t)
	in := contents(rand.New(rand.NewPCG(5, 5)))
	for _, spec := range []nvcomp.Spec{
		{Chunk: 64 << 10}, {Chunk: 16 << 10, Sums: true}, {Chunk: 1 << 20, DType: "BF16"}, {Chunk: 4096},
		{Kind: nvcomp.Raw}, {Kind: nvcomp.WithSize},
	} {
		spec.Algorithm = "X16"
		stored := encoded(t, spec, in)
		streams := g.streams(spec, in, stored)
		peeked, err := g.Peek(stream.Order{}, stream.Kind(spec.Kind), stream.FormatX16, streams)
		if err != nil {
			t.Fatal(err)
		}
		for i, p := range peeked {
			if p.Err != nil || p.Size != streams[i].Size || p.Format != stream.FormatX16 ||
				p.Size > 0 && p.Chunk != spec.Chunk && spec.Kind == nvcomp.Native {
				t.Errorf("%+v: stream %d: %+v", spec, i, p)
			}
		}
		b, err := g.Decode(stream.Order{}, stream.FormatX16, streams)
		if err != nil {
			t.Fatal(err)
		}
		failures, err := b.Wait()
		if err != nil || !b.Done() {
			t.Fatal(err)
		}
		for i, s := range streams {
			if failures[i] != nil || !bytes.Equal(g.get(s.Dst, s.Size), in[i]) {
				t.Errorf("%+v: stream %d of %d bytes: %v, or wrong bytes", spec, i, s.Size, failures[i])
			}
		}
		g.drop()
	}
}

// Streams of the algorithms with a kernel of items also decode in one batch.
func TestBatchItems(t *testing.T) {
	g := newGPU(t)
	in := contents(rand.New(rand.NewPCG(5, 11)))
	for name, format := range map[string]uint32{"LZ4": 0, "Snappy": 1, "Cascaded": 4} {
		for _, spec := range []nvcomp.Spec{
			{Chunk: 64 << 10}, {Chunk: 1000, Sums: true}, {Kind: nvcomp.Raw}, {Kind: nvcomp.WithSize},
		} {
			spec.Algorithm = name
			stored := encoded(t, spec, in)
			streams := g.streams(spec, in, stored)
			bad := streams[5]
			bad.Dst, bad.Src = g.room(int(bad.Size), 0), g.put(stored[5], 8)
			bad.Stored -= 9
			b, err := g.Decode(stream.Order{}, format, append(streams, bad))
			if err != nil {
				t.Fatal(err)
			}
			failures, err := b.Wait()
			if err != nil {
				t.Fatal(err)
			}
			for i, s := range streams {
				if failures[i] != nil || !bytes.Equal(g.get(s.Dst, s.Size), in[i]) {
					t.Errorf("%+v: stream %d of %d bytes: %v, or wrong bytes", spec, i, s.Size, failures[i])
				}
			}
			if !errors.Is(failures[len(streams)], errs.ErrCorrupt) {
				t.Errorf("%+v: a truncated stream: %v", spec, failures[len(streams)])
			}
			g.drop()
		}
	}
}

// X16 streams encoded on the device equal those of the host if the host chooses the same transform.
func TestBatchEncode(t *testing.T) {
	g := newGPU(t)
	in := contents(rand.New(rand.NewPCG(5, 12)))
	for _, spec := range []nvcomp.Spec{
		{Chunk: 64 << 10}, {Chunk: 16 << 10}, {Chunk: 4096}, {Kind: nvcomp.Raw}, {Kind: nvcomp.WithSize},
	} {
		spec.Algorithm, spec.DType = "X16", "BF16"
		want := encoded(t, spec, in)
		var streams []stream.Bitstream
		for i := range in {
			room := len(want[i]) + 40
			chunk := spec.Chunk
			if spec.Kind != nvcomp.Native {
				chunk = max(1, int64(len(in[i])))
			}
			streams = append(streams, stream.Bitstream{
				Src: g.put(in[i], 0), Size: int64(len(in[i])), Dst: g.room(room, 0), Stored: int64(room), Chunk: chunk,
				Kind: stream.Kind(spec.Kind), Arg: 1,
			})
		}
		tight := streams[5]
		tight.Stored, tight.Dst = int64(len(want[5]))-1, g.room(len(want[5])-1, 0)
		streams = append(streams, tight)
		b, err := g.Encode(stream.Order{}, streams, g.room(int(stream.EncodeScratchSize(streams)), 0))
		if err != nil {
			t.Fatal(err)
		}
		failures, err := b.Wait()
		if err != nil {
			t.Fatal(err)
		}
		for i, n := range b.EncodedSizes()[:len(in)] {
			got := g.get(streams[i].Dst, n)
			if failures[i] != nil || !bytes.Equal(got, want[i]) {
				at := 0
				for at < min(len(got), len(want[i])) && got[at] == want[i][at] {
					at++
				}
				t.Errorf("%+v: content of %d bytes: %v, %d bytes, want %d, first difference at %d",
					spec, len(in[i]), failures[i], n, len(want[i]), at)
			}
		}
		if failures[len(in)] == nil {
			t.Errorf("%+v: Encode accepted a destination that is too small", spec)
		}
		g.drop()
	}
}

// Only the invalid streams of a batch are reported, and nothing is written outside their destinations. The fake
// driver's guard zones check this. On a real device, compute-sanitizer can check it.
func TestBatchHostile(t *testing.T) {
	g := newGPU(t)
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 1))
	content := contents(r)[5][:40_000]
	count := 300
	if testing.Short() {
		count = 60
	}
	for _, spec := range []nvcomp.Spec{{Algorithm: "X16", Chunk: 16 << 10}, {Algorithm: "X16", Kind: nvcomp.WithSize}} {
		good := encoded(t, spec, [][]byte{content})[0]
		in, stored := [][]byte{content}, [][]byte{good}
		for range count {
			bad := bytes.Clone(good)
			at := r.IntN(len(bad))
			if r.IntN(2) == 0 {
				at = r.IntN(160) // in the header, the tables, or the head of the first block
			}
			bad[at] ^= 1 << r.IntN(8)
			if r.IntN(4) == 0 {
				bad = bad[:r.IntN(len(bad))]
			}
			in, stored = append(in, content), append(stored, bad)
		}
		streams := g.streams(spec, in, stored)
		streams = append(streams, streams[0]) // with a wrong length and chunk size
		last := &streams[len(streams)-1]
		last.Size, last.Dst = 100, g.room(100, 0)
		b, err := g.Decode(stream.Order{}, stream.FormatX16, streams)
		if err != nil {
			t.Fatal(err)
		}
		failures, err := b.Wait()
		if err != nil {
			t.Fatal(err)
		}
		refused := 0
		for i, err := range failures {
			if err != nil {
				refused++
				if !errors.Is(err, errs.ErrCorrupt) && !errors.Is(err, errs.ErrNotSupported) {
					t.Errorf("stream %d: %v", i, err)
				}
			}
		}
		if failures[0] != nil || !bytes.Equal(g.get(streams[0].Dst, streams[0].Size), content) {
			t.Errorf("the valid stream: %v", failures[0])
		}
		if failures[len(failures)-1] == nil || refused < count/8 {
			t.Errorf("%d of %d were rejected; wrong length: %v", refused, count, failures[len(failures)-1])
		}
		g.drop()
	}
}

// Blocks with an offset that is not a multiple of 16 are rejected for that reason.
func TestBatchMisplaced(t *testing.T) {
	g := newGPU(t)
	in := contents(rand.New(rand.NewPCG(5, 6)))[5:6]
	spec := nvcomp.Spec{Algorithm: "X16", Kind: nvcomp.WithSize}
	stored := encoded(t, spec, in)
	streams := g.streams(spec, in, stored)
	streams[0].Src = g.put(stored[0], 4)
	b, err := g.Decode(stream.Order{}, stream.FormatX16, streams)
	if err != nil {
		t.Fatal(err)
	}
	if failures, err := b.Wait(); err != nil || !errors.Is(failures[0], errs.ErrNotSupported) {
		t.Error(failures, err)
	}
	if _, err := g.Decode(stream.Order{}, 99, streams); !errors.Is(err, errs.ErrNotSupported) {
		t.Errorf("an unknown algorithm: %v", err)
	}
}

// More batches than there are pads can run concurrently, on several streams and from several goroutines. Each gets its
// own results.
func TestBatchMany(t *testing.T) {
	g := newGPU(t)
	in := contents(rand.New(rand.NewPCG(5, 7)))[3:5]
	spec := nvcomp.Spec{Algorithm: "X16", Chunk: 4096}
	stored := encoded(t, spec, in)
	bad := bytes.Clone(stored[1])
	bad[17] ^= 1 // in the length
	good, hurt := g.streams(spec, in, stored), g.streams(spec, in, [][]byte{stored[0], bad})
	var wg sync.WaitGroup
	for range 3 {
		q, err := g.NewStream()
		if err != nil {
			t.Fatal(err)
		}
		if err := g.CheckStream(q); err != nil {
			t.Error(err)
		}
		wg.Add(1)
		go func() {
			defer wg.Done()
			var all []*stream.Batch
			for i := range 50 {
				streams := good
				if i%7 == 0 {
					streams = hurt
				}
				b, err := g.Decode(stream.Order{Stream: q, After: []uintptr{1}}, stream.FormatX16, streams)
				if err != nil {
					t.Error(err)
					return
				}
				all = append(all, b)
			}
			for i, b := range all {
				failures, err := b.Wait()
				if err != nil || failures[0] != nil || (failures[1] != nil) != (i%7 == 0) {
					t.Errorf("batch %d: %v, %v", i, failures, err)
				}
			}
			if err := errors.Join(g.SyncStream(q), g.FreeStream(q)); err != nil {
				t.Error(err)
			}
		}()
	}
	wg.Wait()
}

// A batch of very many chunks gets separate memory, which Trim frees.
func TestBatchLarge(t *testing.T) {
	g := newGPU(t)
	content := bytes.Repeat([]byte{1, 2, 3, 0}, 100_000)
	spec := nvcomp.Spec{Algorithm: "X16", Chunk: 64}
	for range 6 {
		stored := encoded(t, spec, [][]byte{content})
		streams := g.streams(spec, [][]byte{content}, stored)
		b, err := g.Decode(stream.Order{}, stream.FormatX16, streams)
		if err != nil {
			t.Fatal(err)
		}
		if failures, err := b.Wait(); err != nil || failures[0] != nil ||
			!bytes.Equal(g.get(streams[0].Dst, streams[0].Size), content) {
			t.Errorf("%v, %v, or wrong bytes", failures, err)
		}
		g.drop()
	}
	if err := g.Trim(); err != nil {
		t.Error(err)
	}
}
