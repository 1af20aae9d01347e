package cuda

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
	"unsafe"

	"github.com/overwire/overwire/gosrc/codec/x16"
	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/device/cuda/cudatest"
	"github.com/overwire/overwire/gosrc/device/cuda/driver"
	"github.com/overwire/overwire/gosrc/device/cuda/memory"
	"github.com/overwire/overwire/gosrc/device/cuda/queue"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/tensor"
)

var seedFlag = flag.Uint64("cuda.seed", 0, "seed of random tests; 0 means the clock")

func random(t testing.TB) *rand.Rand {
	seed := *seedFlag
	if seed == 0 {
		seed = uint64(time.Now().UnixNano())
	}
	t.Logf("seed %d", seed)
	return rand.New(rand.NewPCG(seed, 0))
}

// A piece is the content of a slot under construction: chunks, and the bytes that they must decode to.
type piece struct {
	bytes []byte
	jobs  []device.DecodeTask
	want  [][]byte // indexed by job; nil if an error is expected
}

func (p *piece) add(stored []byte, c tensor.Chunk, v *device.View, want []byte) {
	for c.Codec == tensor.CodecX16 && len(p.bytes)%16 != 0 {
		p.bytes = append(p.bytes, 0xee)
	}
	c.Stored = uint32(len(stored))
	p.jobs = append(p.jobs, device.DecodeTask{Chunk: c, Src: uint32(len(p.bytes)), View: v})
	p.bytes = append(p.bytes, stored...)
	p.want = append(p.want, want)
}

func (p *piece) raw(b []byte) {
	p.add(b, tensor.Chunk{Codec: tensor.CodecRaw, Logical: uint32(len(b))}, nil, b)
}

// coded adds data as an X16 chunk if it compresses, and reports whether it did.
func (p *piece) coded(data []byte, transform uint8) bool {
	var e x16.Encoder
	stored, tiles, ok := e.Encode(nil, data, transform)
	if ok {
		p.add(stored, tensor.Chunk{Codec: tensor.CodecX16, Transform: transform, SegTiles: tiles,
			Logical: uint32(len(data))}, nil, data)
	}
	return ok
}

var weights = cudatest.Weights

// size returns the number of bytes at a job's destination.
func size(j *device.DecodeTask) int64 {
	if v := j.View; v != nil {
		return (v.Row1 - v.Row0) * (v.Col1 - v.Col0)
	}
	if j.Cast.To != 0 {
		return int64(j.Chunk.Logical) * int64(j.Cast.To.Bits()) / int64(j.Cast.From.Bits())
	}
	return int64(j.Chunk.Logical)
}

// run submits a piece to a queue, with new memory as its destination, and compares the result. shift misaligns every
// destination. It returns the errors by job.
func (p *piece) run(t testing.TB, d *Device, l *queue.Queue, shift int64) []error {
	t.Helper()
	p.sum()
	return p.send(t, d, l, shift, func(s device.Slot) {
		copy(s.Memory(), p.bytes)
		s.CheckOnSubmit()
	})
}

// send is like run, but fill fills the slot with the piece's bytes.
func (p *piece) send(t testing.TB, d *Device, l *queue.Queue, shift int64, fill func(device.Slot)) []error {
	t.Helper()
	sizes := make([]int64, len(p.jobs))
	for i := range p.jobs {
		sizes[i] = size(&p.jobs[i]) + shift
	}
	mem, err := d.Alloc(sizes)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		for _, m := range mem {
			m.Release()
		}
	}()
	for i := range p.jobs {
		p.jobs[i].Dst = unsafe.Add(mem[i].Ptr, shift)
	}
	s, err := l.Get(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	fill(s)
	failures := make([]error, len(p.jobs))
	calls := make([]int, len(p.jobs))
	if err := l.Submit(s, int64(len(p.bytes)), p.jobs, func(i int, err error) {
		failures[i] = err
		calls[i]++
	}); err != nil {
		t.Fatal(err)
	}
	if err := l.Drain(context.Background()); err != nil {
		t.Fatal(err)
	}
	for i := range p.jobs {
		if calls[i] != 1 {
			t.Fatalf("job %d: done was called %d times", i, calls[i])
		}
		if p.want[i] == nil {
			continue
		}
		if failures[i] != nil {
			t.Errorf("job %d %+v: %v", i, p.jobs[i].Chunk, failures[i])
			continue
		}
		got := make([]byte, mem[i].Bytes)
		if err := d.Read(got, mem[i]); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got[shift:], p.want[i]) {
			t.Errorf("job %d %+v %+v: wrong bytes", i, p.jobs[i].Chunk, p.jobs[i].View)
		}
	}
	return failures
}

// open returns a device and a small queue, both closed when the test ends.
func open(t testing.TB, slots int, slotBytes int64) (*Device, *queue.Queue) {
	t.Helper()
	d := begun(t)
	l, err := d.Queue(slots, slotBytes)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(l.Close)
	return d, l
}

// Goldens of every version, in one piece, decode to the expected bytes.
func TestGoldens(t *testing.T) {
	const dir = "../../../tests/goldens/x16"
	index, err := os.ReadFile(filepath.Join(dir, "index.txt"))
	if err != nil {
		t.Fatal(err)
	}
	var p piece
	for _, line := range strings.Split(string(index), "\n") {
		if line == "" || line[0] == '#' {
			continue
		}
		var name, sum string
		var c tensor.Chunk
		if _, err := fmt.Sscan(line, &name, &c.Transform, &c.SegTiles, &c.Logical, &sum); err != nil {
			t.Fatal(err)
		}
		chunk, err := os.ReadFile(filepath.Join(dir, name+".chunk"))
		if err != nil {
			t.Fatal(err)
		}
		c.Codec = tensor.CodecX16
		want := make([]byte, c.Logical) // tests of the Go decoder check the checksums
		if err := x16.Decode(want, chunk, c.Transform, c.SegTiles); err != nil {
			t.Fatal(err)
		}
		p.add(chunk, c, nil, want)
	}
	d, l := open(t, 2, 1<<20)
	p.run(t, d, l, 0)
	p.run(t, d, l, 1) // all chunks are unaligned and are decoded to scratch memory
}

// Chunks of every transform, with and without tails, and raw chunks of every size between them, are loaded correctly.
func TestRoundTrips(t *testing.T) {
	r := random(t)
	d, l := open(t, 2, 2<<20)
	for _, n := range []int{70_000, 16_384, 4099, 1024} {
		var p piece
		for tr := uint8(x16.BF16); tr <= x16.Bytes; tr++ {
			p.coded(weights(r, tr, n), tr)
			p.raw(weights(r, x16.Bytes, r.IntN(200)))
		}
		p.raw(weights(r, x16.Bytes, 100_000))
		p.run(t, d, l, 0)
		p.run(t, d, l, int64(1+r.IntN(20)))
	}
	var few, many piece
	few.raw(weights(r, x16.BF16, 300_001))
	few.raw(weights(r, x16.BF16, 5))
	few.run(t, d, l, 0)
	for range 300 {
		many.raw(weights(r, x16.BF16, r.IntN(3000)))
	}
	many.raw(weights(r, x16.BF16, 90_000))
	many.run(t, d, l, 0)
	many.run(t, d, l, 3)
}

// Slices of rows and columns, of coded and raw chunks, are packed at the destination.
func TestViews(t *testing.T) {
	r := random(t)
	d, l := open(t, 2, 1<<20)
	rounds := 40
	if testing.Short() {
		rounds = 8
	}
	for range rounds {
		row := int64(2 * (1 + r.IntN(1500)))
		if r.IntN(4) == 0 {
			row = int64(2 * (9000 + r.IntN(9000))) // longer than a part
		}
		rows := 1 + r.Int64N(1+150_000/row)
		part := weights(r, x16.BF16, int(row*rows))
		col := r.Int64N(3) * row // first column of this column part in the tensor's rows
		var p piece
		for range 3 {
			at := r.Int64N(int64(len(part)))
			n := 1 + r.Int64N(int64(len(part))-at)
			r0 := r.Int64N(rows)
			c0 := col + r.Int64N(row)
			v := &device.View{At: at, Row: row, Col: col, Row0: r0, Row1: r0 + 1 + r.Int64N(rows-r0), Col0: c0,
				Col1: c0 + 1 + r.Int64N(col+row-c0)}
			data := part[at : at+n]
			kept := 0
			v.Runs(n, func(_, _, n int64) { kept += int(n) })
			want := make([]byte, (v.Row1-v.Row0)*(v.Col1-v.Col0))
			if kept != len(want) {
				want = nil // other chunks would fill the rest, so only errors are checked
			}
			v.Runs(n, func(dst, src, n int64) {
				if want != nil {
					copy(want[dst:dst+n], data[src:src+n])
				}
			})
			if p.coded(data, x16.BF16) {
				k := len(p.jobs) - 1
				p.jobs[k].View, p.want[k] = v, want
			}
			p.add(data, tensor.Chunk{Codec: tensor.CodecRaw, Logical: uint32(n)}, v, want)
		}
		for i, err := range p.run(t, d, l, r.Int64N(2)*r.Int64N(40)) {
			if err != nil {
				t.Errorf("job %d: %v", i, err)
			}
		}
	}
}

// A piece with more jobs than the tables hold is processed in rounds. One of the jobs is a tiny chunk with very many
// work items.
func TestRounds(t *testing.T) {
	r := random(t)
	d, l := open(t, 2, 1<<20)
	var p piece
	for range 25_000 {
		p.raw(weights(r, x16.Bytes, 1+r.IntN(9)))
	}
	p.coded(weights(r, x16.BF16, 10_000), x16.BF16)
	// With only one symbol, 96 bytes decode to 1 MiB, in one segment per tile.
	var e x16.Encoder
	zeros := make([]byte, 1<<20)
	stored, _, ok := e.Encode(nil, zeros, x16.E5M2)
	if !ok || len(stored) > 200 {
		t.Fatal("zeros do not compress")
	}
	for range 5 {
		p.add(stored, tensor.Chunk{Codec: tensor.CodecX16, Transform: x16.E5M2, SegTiles: 1, Logical: 1 << 20}, nil,
			zeros)
	}
	// Thousands of chunks.
	var small piece
	small.coded(weights(r, x16.BF16, 4096), x16.BF16)
	for range queue.MaxWords + 5 {
		p.add(small.bytes, small.jobs[0].Chunk, nil, small.want[0])
		if len(p.bytes) > 1<<20-8192 {
			break
		}
	}
	p.run(t, d, l, 0)
}

// A corrupt chunk fails only its own job. Valid chunks next to it and in the next piece are decoded correctly.
func TestCorrupt(t *testing.T) {
	r := random(t)
	d, l := open(t, 2, 1<<20)
	good := weights(r, x16.BF16, 30_000)
	rounds, found := 60, 0
	if testing.Short() {
		rounds = 10
	}
	for range rounds {
		var p piece
		for tr := uint8(x16.BF16); tr <= x16.Bytes; tr++ {
			data := weights(r, tr, 2000+r.IntN(12_000))
			if !p.coded(data, tr) {
				continue
			}
			j := &p.jobs[len(p.jobs)-1]
			b := p.bytes[j.Src:]
			for range 1 + r.IntN(3) {
				i := r.IntN(len(b))
				if r.IntN(2) == 0 {
					i = r.IntN(min(len(b), 256))
				}
				b[i] ^= byte(1 << r.IntN(8))
			}
			want := make([]byte, len(data))
			if x16.Decode(want, b, tr, j.Chunk.SegTiles) != nil {
				want = nil // the kernel reports an error or wrong bytes, which the checksum would detect
			}
			p.want[len(p.want)-1] = want
		}
		p.coded(good, x16.BF16)
		for _, err := range p.run(t, d, l, 0) {
			if err != nil && !errors.Is(err, errs.ErrCorrupt) {
				t.Fatal(err)
			}
			if err != nil {
				found++
			}
		}
	}
	if found == 0 {
		t.Error("no corruption was detected")
	}
	var p piece
	p.coded(good, x16.BF16)
	p.run(t, d, l, 0)
}

// Invalid jobs get separate errors.
func TestRefused(t *testing.T) {
	r := random(t)
	d, l := open(t, 1, 1<<20)
	var p piece
	b := weights(r, x16.BF16, 4096)
	p.coded(b, x16.BF16)
	p.coded(b, x16.BF16)
	p.raw(b)
	p.raw(b)
	p.raw(b)
	p.raw(b)
	p.raw(nil)
	for _, i := range []int{1, 2, 3, 4} {
		p.want[i] = nil
	}
	p.jobs[1].Src += 8 // misaligned
	p.jobs[2].Chunk.Stored = 1 << 30
	p.jobs[3].Chunk.Codec = 7
	p.jobs[4].Chunk.Logical++
	failures := p.run(t, d, l, 0)
	for i, class := range []error{nil, errs.ErrCorrupt, errs.ErrArgument, errs.ErrNotSupported, errs.ErrCorrupt, nil,
		nil} {
		if !errors.Is(failures[i], class) {
			t.Errorf("job %d: %v, want %v", i, failures[i], class)
		}
	}
}

// Tensors have memory of exactly their size, aligned and separate. Small tensors share allocations, and released memory
// is returned to the device.
func TestAlloc(t *testing.T) {
	r := random(t)
	d := begun(t)
	sizes := []int64{0, 1, 255, 256, 1<<20 - 1, 1 << 20, 1<<20 + 1, 2 << 20, 5<<20 - 3}
	for range 300 {
		sizes = append(sizes, r.Int64N(60_000))
	}
	mem, err := d.Alloc(sizes)
	if err != nil {
		t.Fatal(err)
	}
	seen := map[uintptr]int64{}
	for i, m := range mem {
		if m.Bytes != sizes[i] || uintptr(m.Ptr)%memory.Align != 0 || (m.Ptr == nil) != (sizes[i] == 0) || m.CUDA != 1 {
			t.Fatalf("size %d: %+v", sizes[i], m)
		}
		seen[uintptr(m.Ptr)] += sizes[i]
	}
	if len(seen) != len(mem) && len(seen) < 300 {
		t.Error("tensors overlap")
	}
	for _, i := range r.Perm(len(mem)) {
		mem[i].Release()
	}
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
		n := d.CountLive()
		if n == 0 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("%d blocks were never freed", n)
		}
	}
	for _, bad := range [][]int64{{-1}, {1 << 50}} {
		if _, err := d.Alloc(bad); !errors.Is(err, errs.ErrArgument) {
			t.Errorf("%v: %v", bad, err)
		}
	}
	_, total, err := d.MemoryInfo()
	if err != nil {
		t.Fatal(err)
	}
	_, err = d.Alloc([]int64{5 << 20, total + 1<<20, 7})
	if !errors.Is(err, errs.ErrMemory) || !strings.Contains(err.Error(), "are free") {
		t.Errorf("an allocation larger than the device: %v", err)
	}
}

// Open returns a device error with a clear message for an index that is out of range.
func TestOpenRefuses(t *testing.T) {
	begun(t)
	for _, i := range []int{-1, 1000} {
		if _, err := Open(i); !errors.Is(err, errs.ErrDevice) || !strings.Contains(err.Error(), "CUDA devices") {
			t.Errorf("cuda:%d: %v", i, err)
		}
	}
	info, err := driver.Info()
	if err != nil || len(info) == 0 || info[0].Name == "" || info[0].Memory == 0 {
		t.Errorf("%+v: %v", info, err)
	}
	t.Logf("%+v", info)
}
