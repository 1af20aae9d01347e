package pipeline

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"
	"unsafe"

	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/device/cpu"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/crc32c"
	"github.com/overwire/overwire/gosrc/internal/spawn/spawntest"
	"github.com/overwire/overwire/gosrc/plan"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/source/sourcetest"
	"github.com/overwire/overwire/gosrc/tensor"
)

// model is a random index with its bytes. It has plain tensors and raw chunks, some with column parts, in several
// sources, and some aliases.
type model struct {
	ix      *tensor.Index
	srcs    []source.Source
	logical [][]byte // indexed by tensor
	trace   *Trace   // for the next run
	steps   int64    // Task.Range for the next run
	slots   int      // of a separate queue; 0 leaves the queue to the pipeline
	stages  Stages   // of the last run
}

func build(r *rand.Rand) *model {
	m := &model{ix: &tensor.Index{}}
	noise := rand.NewChaCha8([32]byte{byte(r.Uint32())})
	nsrc := 1 + r.IntN(2)
	for s := range nsrc {
		var file []byte
		overwire := r.IntN(2) == 0
		n := 1 + r.IntN(6)
		first := len(m.ix.Tensors)
		for range n {
			t := tensor.Tensor{Name: "t", Source: int32(s), Alias: -1, DType: tensor.U8, Parts: 1, Off: int64(len(file))}
			rank := r.IntN(4)
			t.Bytes = 1
			for range rank {
				d := int64(r.IntN(40))
				if r.IntN(8) > 0 {
					d = 1 + 8*int64(r.IntN(12))
				}
				t.Shape = append(t.Shape, d)
				t.Bytes *= d
			}
			if overwire && r.IntN(5) == 0 && len(m.ix.Tensors) > first {
				k := first + r.IntN(len(m.ix.Tensors)-first)
				for m.ix.Tensors[k].Alias >= 0 {
					k = int(m.ix.Tensors[k].Alias)
				}
				t.Shape, t.Bytes, t.Alias = m.ix.Tensors[k].Shape, m.ix.Tensors[k].Bytes, int32(k)
				m.ix.Tensors = append(m.ix.Tensors, t)
				m.logical = append(m.logical, m.logical[k])
				continue
			}
			data := make([]byte, t.Bytes)
			_, _ = noise.Read(data)
			if overwire && t.Bytes > 0 {
				rows := int64(1)
				if rank > 0 {
					rows = t.Shape[0]
				}
				if row := t.Bytes / rows; rank > 1 && row%4 == 0 {
					t.Parts = []uint8{1, 2, 4}[r.IntN(3)]
				}
				t.ChunkBytes = uint32(1 + r.IntN(700))
				t.First = int32(len(m.ix.Chunks))
				row := t.Bytes / rows / int64(t.Parts)
				for p := range int64(t.Parts) {
					var part []byte
					for q := range rows {
						at := q*(t.Bytes/rows) + p*row
						part = append(part, data[at:at+row]...)
					}
					for len(part) > 0 {
						n := min(len(part), int(t.ChunkBytes))
						m.ix.Chunks = append(m.ix.Chunks, tensor.Chunk{Off: int64(len(file)), Stored: uint32(n),
							Logical: uint32(n), Sum: crc32c.Sum(part[:n])})
						file = append(file, part[:n]...)
						part = part[n:]
						for r.IntN(3) == 0 {
							file = append(file, 0)
						}
						t.Count++
					}
				}
			} else {
				file = append(file, data...)
			}
			m.ix.Tensors = append(m.ix.Tensors, t)
			m.logical = append(m.logical, data)
		}
		format := tensor.FormatSafetensors
		if overwire {
			format = tensor.FormatOverwire
		}
		m.ix.Sources = append(m.ix.Sources, tensor.Source{URI: "mem", Size: int64(len(file)), Format: format})
		m.srcs = append(m.srcs, &sourcetest.Mem{Name: "mem", Data: file})
	}
	return m
}

// slice is the slow twin of a request and copies element by element.
func (m *model) slice(q plan.Request) []byte {
	t := m.ix.Tensors[q.Tensor]
	d := []int64{1, 1, 1}
	copy(d, t.Shape)
	if len(t.Shape) > 2 {
		d[2] = t.Shape[2]
	}
	if q.Hi0 < 0 {
		q.Hi0 = d[0]
	}
	if q.Hi1 < 0 {
		q.Hi1 = d[1]
	}
	var out []byte
	for a := q.Lo0; a < q.Hi0; a++ {
		for b := q.Lo1; b < q.Hi1; b++ {
			at := (a*d[1] + b) * d[2]
			out = append(out, m.logical[q.Tensor][at:at+d[2]]...)
		}
	}
	return out
}

func (m *model) requests(r *rand.Rand) []plan.Request {
	var reqs []plan.Request
	for range 1 + r.IntN(2*len(m.ix.Tensors)) {
		q := plan.Request{Tensor: int64(r.IntN(len(m.ix.Tensors))), Hi0: plan.Whole, Hi1: plan.Whole}
		t := m.ix.Tensors[q.Tensor]
		if len(t.Shape) > 0 && r.IntN(2) == 0 {
			q.Lo0 = r.Int64N(t.Shape[0] + 1)
			q.Hi0 = q.Lo0 + r.Int64N(t.Shape[0]-q.Lo0+1)
		}
		if len(t.Shape) > 1 && r.IntN(2) == 0 {
			q.Lo1 = r.Int64N(t.Shape[1] + 1)
			q.Hi1 = q.Lo1 + r.Int64N(t.Shape[1]-q.Lo1+1)
		}
		reqs = append(reqs, q)
	}
	return reqs
}

func (m *model) run(ctx context.Context, reqs []plan.Request, lim plan.Limits, workers int) ([][]byte, []int, error) {
	wants, err := plan.Check(m.ix, reqs)
	if err != nil {
		return nil, nil, err
	}
	sizes := make([]int64, len(wants))
	for i := range wants {
		sizes[i] = wants[i].Bytes
	}
	mem, err := cpu.Alloc(sizes)
	if err != nil {
		return nil, nil, err
	}
	defer cpu.Release(mem)
	landed := make(chan int32, len(wants))
	task := &Task{Trace: m.trace, Index: m.ix, Sources: m.srcs, Wants: wants,
		Plan: plan.Make(m.ix, wants, pointers(mem), lim), Workers: workers, Landed: func(i int32) { landed <- i }}
	if m.steps > 0 {
		task.Range = func() int64 { return m.steps }
	}
	if m.slots > 0 {
		if task.Queue, err = cpu.NewQueue(m.slots, task.Plan.Slot); err != nil {
			return nil, nil, err
		}
		defer task.Queue.Close()
	}
	m.stages, err = Run(ctx, task)
	close(landed)
	var got [][]byte
	for i := range mem {
		got = append(got, bytes.Clone(mem[i].Slice()))
	}
	var order []int
	for i := range landed {
		order = append(order, int(i))
	}
	return got, order, err
}

func pointers(mem []device.Memory) []unsafe.Pointer {
	dest := make([]unsafe.Pointer, len(mem))
	for i := range mem {
		dest[i] = mem[i].Ptr
	}
	return dest
}

// Every request for every layout returns the same bytes as slicing element by element, for every size of piece and
// share and every number of workers.
func TestRunMatchesSlicing(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	for range 500 {
		m := build(r)
		reqs := m.requests(r)
		lim := plan.Limits{Piece: int64(1 + r.IntN(3000)), Gap: int64(r.IntN(200)),
			Share:   int64(r.IntN(2) * r.IntN(900)),
			InPlace: r.IntN(2) == 0, Align: []int64{0, 1, 16, 256, 4096}[r.IntN(5)]}
		if r.IntN(2) == 0 { // in ranges of several pieces or parts
			m.steps, m.slots = int64(r.IntN(9000)), r.IntN(3)
			for i, s := range m.srcs {
				m.srcs[i] = &sourcetest.Steps{Source: s}
			}
		}
		got, landed, err := m.run(context.Background(), reqs, lim, 1+r.IntN(4))
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range m.srcs {
			if s, ok := s.(*sourcetest.Steps); ok {
				if _, open := s.Ranges(); open != 0 {
					t.Fatalf("%d ranges were not closed", open)
				}
			}
		}
		full := 0
		for i, q := range reqs {
			want := m.slice(q)
			if !bytes.Equal(got[i], want) {
				t.Fatalf("request %+v of %+v: wrong bytes (%d, want %d)", q, m.ix.Tensors[q.Tensor], len(got[i]), len(want))
			}
			if len(want) > 0 {
				full++
			}
		}
		if len(landed) != full {
			t.Fatalf("%d wants landed, want %d", len(landed), full)
		}
	}
}

// A read error ends the run with that error and its position, and no worker keeps running.
func TestRunEndsWithTheFirstError(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 5))
	m := build(r)
	for len(m.ix.Chunks) < 8 {
		m = build(r)
	}
	var reqs []plan.Request
	for i := range m.ix.Tensors {
		reqs = append(reqs, plan.Request{Tensor: int64(i), Hi0: plan.Whole, Hi1: plan.Whole})
	}
	good := m.srcs
	for n := int64(1); ; n += 1 + n/8 {
		var f []*sourcetest.Faulty
		m.srcs = nil
		for _, s := range good {
			f = append(f, &sourcetest.Faulty{Source: s, N: n, Err: errs.New(errs.ErrIO, "planted")})
			m.srcs = append(m.srcs, f[len(f)-1])
			if m.steps = n % 2 * 2000; m.steps > 0 {
				m.srcs[len(m.srcs)-1] = &sourcetest.Steps{Source: f[len(f)-1]}
			}
		}
		_, _, err := m.run(context.Background(), reqs, plan.Limits{Piece: 500, Share: 100}, 3)
		hit := false
		for i := range f {
			hit = hit || f[i].Reads() >= n
		}
		if !hit {
			if err != nil {
				t.Fatal(err)
			}
			break
		}
		var at *errs.At
		if !errors.Is(err, errs.ErrIO) || !errors.As(err, &at) || at.Source == "" || at.Offset < 0 {
			t.Fatalf("read %d fails: %v", n, err)
		}
	}
	if n := spawntest.Left(); len(n) != 0 {
		t.Errorf("left running: %v", n)
	}
}

// Contiguous and nearly contiguous pieces form one range, up to the requested size. Other pieces do not.
func TestRanges(t *testing.T) {
	data := make([]byte, 3<<20)
	_, _ = rand.NewChaCha8([32]byte{1}).Read(data)
	add := func(ix *tensor.Index, off, n int64) {
		ix.Tensors = append(ix.Tensors, tensor.Tensor{Name: "t", Alias: -1, DType: tensor.U8, Parts: 1,
			Shape: []int64{n}, Off: off, Bytes: n})
	}
	for _, c := range []struct {
		gap, steps, ranges int64
		skipped            int64
	}{
		{0, 1 << 20, 2, 0}, {0, 300_000, 10, 0}, {1000, 1 << 20, 2, 9*1000 - 1000}, {gap, 8 << 20, 1, 9 * gap},
		{gap + 1, 8 << 20, 10, 0}, {0, 0, 0, 0},
	} {
		src := &sourcetest.Steps{Source: &sourcetest.Mem{Name: "m", Data: data}}
		m := &model{ix: &tensor.Index{Sources: []tensor.Source{{URI: "m", Size: int64(len(data))}}},
			srcs: []source.Source{src}, steps: c.steps}
		var reqs []plan.Request
		n := min(200_000, (int64(len(data))-9*c.gap)/10)
		for i := range int64(10) {
			add(m.ix, i*(n+c.gap), n)
			reqs = append(reqs, plan.Request{Tensor: i, Hi0: plan.Whole, Hi1: plan.Whole})
		}
		got, _, err := m.run(context.Background(), reqs, plan.Limits{Piece: n, InPlace: true}, 2)
		if err != nil {
			t.Fatal(err)
		}
		for i := range got {
			if off := int64(i) * (n + c.gap); !bytes.Equal(got[i], data[off:off+n]) {
				t.Errorf("gap %d: tensor %d has wrong bytes", c.gap, i)
			}
		}
		if all, open := src.Ranges(); all != c.ranges || open != 0 || m.stages.ReadBytes != 10*n+c.skipped {
			t.Errorf("gap %d, range %d: %d ranges, %d open, %d bytes of gaps", c.gap, c.steps, all, open,
				m.stages.ReadBytes-10*n)
		}
	}
}

// With few slots, a range continues with the next piece if it has space for more than one, and never ends within a
// piece. One permit or one slot is enough for four workers.
func TestRangesWithFewSlots(t *testing.T) {
	for _, c := range []struct {
		slots  int
		steps  int64
		ranges int
	}{
		{1, 100 << 10, 8}, // a piece is 128 KiB
		{3, 300 << 10, 4}, // two pieces; the third does not fit
		{9, 8 << 20, 1},
	} {
		for _, permits := range []int{1, 2, 4} {
			t.Run(fmt.Sprintf("%d slots, ranges of %d KiB, %d permits", c.slots, c.steps>>10, permits),
				func(t *testing.T) { rangesWithFewSlots(t, c.slots, permits, c.steps, c.ranges) })
		}
	}
}

func rangesWithFewSlots(t *testing.T, slots, permits int, steps int64, ranges int) {
	data := make([]byte, 1<<20)
	_, _ = rand.NewChaCha8([32]byte{2}).Read(data)
	src := &narrow{Steps: &sourcetest.Steps{Source: &sourcetest.Mem{Name: "m", Data: data}},
		permit: make(chan struct{}, permits)}
	m := &model{ix: &tensor.Index{Sources: []tensor.Source{{URI: "m", Size: int64(len(data))}}},
		srcs: []source.Source{src}, steps: steps, slots: slots, trace: NewTrace()}
	m.ix.Tensors = []tensor.Tensor{{Name: "t", Alias: -1, DType: tensor.U8, Parts: 1, Shape: []int64{int64(len(data))},
		Bytes: int64(len(data))}}
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	got, _, err := m.run(ctx, []plan.Request{{Hi0: plan.Whole, Hi1: plan.Whole}},
		plan.Limits{Piece: 128 << 10, Share: 16 << 10}, 4)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got[0], data) {
		t.Error("wrong bytes")
	}
	if all, open := src.Steps.Ranges(); int(all) != ranges || open != 0 {
		t.Errorf("%d ranges, %d open", all, open)
	}
	if n := int64(ranges); m.stages.PermitNS != n*3 || m.stages.AnswerNS != n*5 {
		t.Errorf("waited %d and %d ns", m.stages.PermitNS, m.stages.AnswerNS)
	}
	sums := map[string]int{}
	for _, g := range m.trace.Summary().Stages {
		sums[g.Verb] = g.Spans
	}
	if sums["permit"] != ranges || sums["answer"] != ranges || sums["read"] != 64 {
		t.Errorf("spans: %v", sums)
	}
}

// narrow is a source with few permits.
type narrow struct {
	*sourcetest.Steps
	permit chan struct{}
}

func (s *narrow) Facts() source.Facts {
	f := s.Steps.Facts()
	f.Ranges = s
	return f
}

func (s *narrow) OpenRange(ctx context.Context) (source.Range, error) {
	select {
	case s.permit <- struct{}{}:
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	r, err := s.Steps.OpenRange(ctx)
	return &permitted{Range: r, s: s}, err
}

type permitted struct {
	source.Range
	s        *narrow
	reported bool
}

func (r *permitted) Waited() (permit, answer time.Duration) {
	if r.reported {
		return 0, 0
	}
	r.reported = true
	return 3, 5
}

func (r *permitted) Close() error {
	<-r.s.permit
	return r.Range.Close()
}

// A changed byte in any chunk is detected before the chunk is decoded, and the error names the chunk.
func TestRunChecksEveryChunk(t *testing.T) {
	r := rand.New(rand.NewPCG(9, 9))
	m := build(r)
	for len(m.ix.Chunks) < 8 {
		m = build(r)
	}
	for i := range m.ix.Tensors {
		tn := m.ix.Tensors[i]
		for k := range tn.Count {
			c := m.ix.Chunks[tn.First+k]
			data := m.srcs[tn.Source].(*sourcetest.Mem).Data
			data[c.Off] ^= 4
			_, _, err := m.run(context.Background(), []plan.Request{{Tensor: int64(i), Hi0: -1, Hi1: -1}},
				plan.Limits{Piece: 1000, Share: 200}, 2)
			var at *errs.At
			if !errors.Is(err, errs.ErrCorrupt) || !errors.As(err, &at) || at.Chunk != int64(k) || at.Offset != c.Off ||
				at.Tensor != tn.Name {
				t.Fatalf("chunk %d: %v", k, err)
			}
			data[c.Off] ^= 4
		}
	}
}

// A cancelled run ends immediately with the cause, even while a read blocks.
func TestRunCancel(t *testing.T) {
	r := rand.New(rand.NewPCG(6, 6))
	m := build(r)
	for len(m.ix.Chunks) < 4 {
		m = build(r)
	}
	for i, s := range m.srcs {
		m.srcs[i] = &sourcetest.Faulty{Source: s, N: 1}
	}
	var reqs []plan.Request
	for i := range m.ix.Tensors {
		reqs = append(reqs, plan.Request{Tensor: int64(i), Hi0: plan.Whole, Hi1: plan.Whole})
	}
	ctx, cancel := context.WithCancelCause(context.Background())
	time.AfterFunc(20*time.Millisecond, func() { cancel(errs.ErrCancelled) })
	_, _, err := m.run(ctx, reqs, plan.Limits{Piece: 500, Share: 100}, 2)
	if !errors.Is(err, errs.ErrCancelled) {
		t.Fatal(err)
	}
}

// A failed read names the tensor that contains the unreadable byte, even if one read covers several tensors.
func TestRunNamesTheUnreadableTensor(t *testing.T) {
	const each, tensors = 1000, 20
	for bad := range tensors {
		src := &sourcetest.Mem{Name: "m", Data: make([]byte, each*tensors)}
		m := &model{ix: &tensor.Index{Sources: []tensor.Source{{URI: "m", Size: each * tensors}}}, slots: 2}
		m.srcs = []source.Source{&failing{src, int64(each*bad + 500)}}
		var reqs []plan.Request
		for i := range tensors {
			m.ix.Tensors = append(m.ix.Tensors, tensor.Tensor{Name: fmt.Sprint("t", i), Alias: -1, DType: tensor.U8,
				Parts: 1, Shape: []int64{each}, Off: int64(i * each), Bytes: each})
			reqs = append(reqs, plan.Request{Tensor: int64(i), Hi0: plan.Whole, Hi1: plan.Whole})
		}
		for _, share := range []int64{each * 7, 2500, 300} {
			_, _, err := m.run(t.Context(), reqs, plan.Limits{Piece: 10 * each, Share: share}, 1)
			var at *errs.At
			if !errors.As(err, &at) || at.Tensor != fmt.Sprint("t", bad) || at.Offset != int64(each*bad+500) {
				t.Errorf("tensor %d, shares of %d: %v", bad, share, err)
			}
		}
	}
}

// failing is a source that cannot read one byte.
type failing struct {
	*sourcetest.Mem
	bad int64
}

func (s *failing) ReadAt(ctx context.Context, b []byte, off int64) error {
	if off <= s.bad && s.bad < off+int64(len(b)) {
		return &errs.At{Verb: "read", Source: "m", Chunk: -1, Offset: s.bad, Err: errs.New(errs.ErrIO, "no")}
	}
	return s.Mem.ReadAt(ctx, b, off)
}
