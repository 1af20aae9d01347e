// Package sleep compresses tensors on the host or on a GPU into host memory, so their own memory can be freed. The
// engine's loads restore them. Sleeping only reads the tensors' memory.
//
// The host memory contains an in-memory container (docs/format.md). It has everything that a file has except the hashes
// of whole tensors, which need another pass and are computed only if a file is requested. The size is estimated from
// samples before memory is allocated. The memory is bounded, and its pages are faulted in while the first chunks
// arrive. A GPU encodes into a ring of slots and copies the stored bytes in file order, while the host computes
// checksums.
package sleep

import (
	"cmp"
	"context"
	"runtime"
	"sort"
	"time"
	"unsafe"

	"github.com/overwire/overwire/gosrc/codec"
	"github.com/overwire/overwire/gosrc/codec/blocksum"
	"github.com/overwire/overwire/gosrc/device/cuda"
	"github.com/overwire/overwire/gosrc/device/cuda/stream"
	"github.com/overwire/overwire/gosrc/device/pinned"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/format/overwire"
	"github.com/overwire/overwire/gosrc/hoststore"
	"github.com/overwire/overwire/gosrc/internal/crc32c"
	"github.com/overwire/overwire/gosrc/internal/hostmem"
	"github.com/overwire/overwire/gosrc/internal/ordered"
	"github.com/overwire/overwire/gosrc/internal/sizes"
	"github.com/overwire/overwire/gosrc/internal/spawn"
	"github.com/overwire/overwire/gosrc/job"
	"github.com/overwire/overwire/gosrc/load"
	"github.com/overwire/overwire/gosrc/save"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/source/memory"
	"github.com/overwire/overwire/gosrc/tensor"
	"github.com/zeebo/xxh3"
)

// name is the in-memory container's name in errors.
const name = "memory of sleeping tensors"

// A Tensor is a tensor to put to sleep. Data is its contiguous memory on the Spec's device.
// It must stay valid and unchanged until the job has ended.
type Tensor struct {
	Name  string
	DType tensor.DType
	Shape []int64
	Data  []byte
}

// A Spec describes how to put tensors to sleep.
type Spec struct {
	// Device is the device that holds all tensors, e.g. "cpu" or "cuda:1".
	Device string `json:"device"`
	// Budget is the maximum host memory for the stored bytes; 0 means all available memory.
	Budget int64 `json:"max_memory"`
	// Path is a local file to write in addition; "" means none.
	Path    string `json:"path"`
	Threads int    `json:"threads"` // 0 means one per core
	// Digests are the keyed digests of the tensors, in hexadecimal digits, if the host store is used.
	Digests []string `json:"digests"`
}

// A Report describes the cost of a sleep. Bytes is the size of the tensors, with shared memory counted once. Stored is
// their size in host memory, without Shared, which is in the host store. Staging is the GPU memory that the sleep
// needed while it ran.
type Report struct {
	Bytes      int64    `json:"bytes"`
	Stored     int64    `json:"stored"`
	Shared     int64    `json:"shared"`
	Staging    int64    `json:"staging"`
	Seconds    float64  `json:"seconds"`
	Tensors    int      `json:"tensors"`
	Compressed int      `json:"compressed"`
	Aliases    int      `json:"aliases"`
	Files      []string `json:"files,omitempty"`
}

type sleeper struct {
	Spec
	job     *job.Job
	mode    mode
	items   []item
	keep    bool // the container is for the host store
	lay     *overwire.Layout
	mem     *pinned.Memory
	batches []batch
	pos     int64 // end of the chunks placed so far
	size    int64 // size of the container
	report  Report
}

// A batch is a range of the layout's chunks that are compressed together.
type batch struct {
	first, end int
	rows       []stream.PackedRange // nil after the batch is finished
}

// Sleep compresses tensors. Tensors with digests that the host store has are not compressed, and need no memory of this
// process. The caller owns the returned model. Each load of the model compares all checksums, and closing it releases
// the memory. The job counts the bytes of the tensors.
func Sleep(ctx context.Context, j *job.Job, spec Spec, in []Tensor) (*load.Model, Report, error) {
	start := time.Now()
	s := &sleeper{Spec: spec, job: j}
	m, err := s.runSleep(ctx, in)
	s.report.Seconds = time.Since(start).Seconds()
	if err != nil {
		return nil, Report{}, errs.Locate("sleep", "", "", -1, err)
	}
	return m, s.report, nil
}

func (s *sleeper) runSleep(ctx context.Context, in []Tensor) (m *load.Model, err error) {
	if len(s.Digests) == 0 {
		ix, src, err := s.compressTensors(ctx, in)
		if err != nil {
			return nil, err
		}
		return load.Of(ix, []source.Source{src}, nil), nil
	}
	yes := true
	link := hoststore.NewLink(&yes)
	defer link.Done()
	_, parts, rest, err := findParts(ctx, s, link, in)
	ix, srcs := &tensor.Index{}, []source.Source(nil)
	if err == nil && len(rest) > 0 {
		var src source.Source
		if ix, src, err = s.compressTensors(ctx, rest); err == nil {
			srcs = append(srcs, src)
		}
	}
	for i := range parts {
		srcs = append(srcs, parts[i].Source)
	}
	if err == nil {
		err = addParts(ix, parts)
	}
	if err != nil {
		for _, src := range srcs {
			_ = src.Close()
		}
		return nil, err
	}
	return load.Of(ix, srcs, link), nil
}

// compressTensors compresses tensors into an in-memory container. The caller closes the source.
func (s *sleeper) compressTensors(ctx context.Context, in []Tensor) (ix *tensor.Index, src *memory.Memory, err error) {
	gpu, err := gpuOf(s.Device)
	if err != nil {
		return nil, nil, err
	}
	if gpu == nil {
		s.mode = hostMode(s.countWorkers())
	} else {
		p, err := gpu.NewPacker(s.isWhole())
		if err != nil {
			return nil, nil, err
		}
		s.mode = gpuMode(p, s.isWhole())
	}
	defer func() {
		s.mode.close() // no copies after this
		if err != nil && s.mem != nil {
			s.mem.Keep()
		}
	}()
	s.report.Staging = s.mode.staging
	if s.items, err = classifyTensors(in, s.mode.samples, &s.report); err != nil {
		return nil, nil, err
	}
	if err := s.layOut(); err != nil {
		return nil, nil, err
	}
	s.divideChunks()
	if err := s.reserveMemory(gpu); err != nil {
		return nil, nil, err
	}
	return s.makeContainer(ctx)
}

// isWhole reports whether the container has everything that a file has.
func (s *sleeper) isWhole() bool { return s.Path != "" || s.keep }

// countWorkers returns the number of workers for tensors in host memory.
func (s *sleeper) countWorkers() int { return cmp.Or(s.Threads, runtime.GOMAXPROCS(0)) }

// makeContainer fills the memory.
func (s *sleeper) makeContainer(ctx context.Context) (*tensor.Index, *memory.Memory, error) {
	if err := s.fillMemory(ctx); err != nil {
		return nil, nil, err
	}
	if s.isWhole() {
		if err := s.completeFile(ctx); err != nil {
			return nil, nil, err
		}
	}
	if s.Path != "" {
		if err := save.WriteWhole(ctx, s.Path, s.mem.Bytes(0, s.size)); err != nil {
			return nil, nil, err
		}
		s.report.Files = []string{s.Path}
	}
	ix := &tensor.Index{
		Sources: []tensor.Source{{URI: name, Size: s.size, Data: s.lay.Header(), Format: tensor.FormatOverwire}},
		Tensors: s.lay.Tensors, Chunks: s.lay.Chunks,
	}
	if err := ix.Validate(codec.Known); err != nil {
		return nil, nil, errs.New(errs.ErrEngine, "the in-memory container of sleeping tensors is invalid: %v", err)
	}
	src := memory.New(name, s.mem.Bytes(0, s.size), s.mem.Keep)
	src.Compare = true
	return ix, src, nil
}

func (s *sleeper) layOut() error {
	items := make([]overwire.Item, len(s.items))
	for i := range s.items {
		t := &s.items[i]
		items[i] = overwire.Item{Name: t.Name, DType: t.DType, Shape: t.Shape, Plain: t.transform == 0 && t.alias == 0,
			Alias: t.alias, ChunkBytes: chunkBytes}
	}
	var metadata map[string]string
	if s.isWhole() {
		metadata = map[string]string{"format": "pt"}
	}
	lay, err := overwire.NewLayout(metadata, items, nil, false)
	if err != nil {
		return err
	}
	s.lay, s.pos = lay, lay.Start()
	return nil
}

func (s *sleeper) divideChunks() {
	first, offset := 0, int64(0)
	for c := range s.lay.Chunks {
		n := sizes.RoundUp(int64(s.lay.Chunks[c].Logical), 16)
		if c > first && (offset+n > s.mode.bytes || c-first == batchRows) {
			s.batches = append(s.batches, batch{first: first, end: c})
			first, offset = c, 0
		}
		offset += n
	}
	if len(s.lay.Chunks) > 0 {
		s.batches = append(s.batches, batch{first: first, end: len(s.lay.Chunks)})
	}
}

// estimateRoom returns the maximum size of the container and the size estimated from samples.
func (s *sleeper) estimateRoom() (most, need int64) {
	most, estimate := s.lay.Start()+tensor.BlobAlign, float64(s.lay.Start())
	for i := range s.lay.Tensors {
		t := &s.lay.Tensors[i]
		if t.Count > 0 {
			pad := int64(t.Count)*tensor.StoredAlign + tensor.BlobAlign
			most += t.Bytes + pad
			estimate += float64(t.Bytes)*s.items[s.lay.Items[i]].expect + float64(pad)
		}
	}
	return most, int64(estimate)
}

// refuseRoom returns an error if the budget or the available host memory is less than need.
func (s *Spec) refuseRoom(need int64, gpu *cuda.Device) error {
	no := func(left int64, why string) error {
		return &errs.Memory{Where: "host", Asked: need, Free: left, Total: left, For: "sleeping tensors", Err: why}
	}
	if s.Budget > 0 && need > s.Budget {
		return no(s.Budget, "max_memory")
	}
	if available := hostmem.Available() + pinned.Ready(gpu); need > available {
		return no(available, "available")
	}
	return nil
}

// aheadOf returns how much memory to prepare for an estimate from samples, which may be too low.
func aheadOf(need int64) int64 { return need + need/100 }

// reserveMemory reserves host memory for the container.
func (s *sleeper) reserveMemory(gpu *cuda.Device) error {
	most, need := s.estimateRoom()
	if err := s.refuseRoom(need, gpu); err != nil {
		return err
	}
	limit := most
	if s.Budget > 0 {
		limit = min(limit, s.Budget)
	}
	var err error
	if s.mem, err = pinned.Take(most, limit, gpu); err == nil {
		s.mem.Want(aheadOf(need))
	}
	return err
}

func (s *sleeper) fillMemory(ctx context.Context) error {
	s.job.TotalBytes.Store(s.report.Bytes)
	s.job.TotalTensors.Store(int64(s.report.Tensors))
	window := s.mode.window
	o := ordered.Tasks{
		N: len(s.batches), Window: window, Workers: s.mode.workers,
		Work:  func(_, k int) error { return s.encode(k, k%window) },
		Turn:  func(k int) error { return s.placeBatch(ctx, k, k%window) },
		Flush: func(k int) error { return s.finishBatch(k, k%window) },
	}
	if err := o.Run(ctx, "sleep"); err != nil {
		return err
	}
	s.size = s.lay.Start()
	for i := range s.lay.Tensors {
		s.size = max(s.size, s.lay.Tensors[i].Off+s.lay.Tensors[i].Stored)
	}
	if err := s.mem.Await(ctx, s.size); err != nil {
		return err
	}
	clear(s.mem.Bytes(s.pos, s.size-s.pos))
	s.report.Stored = s.size
	s.job.Tensors.Store(int64(s.report.Tensors))
	return nil
}

// encode compresses batch k in a slot.
func (s *sleeper) encode(k, slot int) error {
	b := &s.batches[k]
	b.rows = make([]stream.PackedRange, 0, b.end-b.first)
	t := s.tensorOf(b.first)
	for c := b.first; c < b.end; c++ {
		for c >= int(s.lay.Tensors[t].First+s.lay.Tensors[t].Count) {
			t++
		}
		it := &s.items[s.lay.Items[t]]
		at := (int64(c) - int64(s.lay.Tensors[t].First)) * chunkBytes
		row := stream.PackedRange{Src: it.addressOf() + uint64(at), N: int64(s.lay.Chunks[c].Logical),
			Transform: it.transform}
		if row.Hash = s.hashesOnGPU(it); row.Hash && c == int(s.lay.Tensors[t].First+s.lay.Tensors[t].Count)-1 {
			row.Tail = blocksum.Tail(s.lay.Tensors[t].Bytes)
		}
		b.rows = append(b.rows, row)
	}
	if err := s.mode.encode(slot, b.rows); err != nil {
		return err
	}
	for i := range b.rows {
		if c := &s.lay.Chunks[b.first+i]; b.rows[i].Tiles > 0 {
			c.Codec, c.Transform, c.SegTiles = tensor.CodecX16, b.rows[i].Transform, b.rows[i].Tiles
		}
	}
	return nil
}

// tensorOf returns the position in s.lay.Tensors of the tensor that contains chunk c.
func (s *sleeper) tensorOf(c int) int {
	return sort.Search(len(s.lay.Tensors), func(t int) bool { return int(s.lay.Tensors[t].First) > c }) - 1
}

// placeBatch assigns offsets in the container to the chunks of batch k and starts to copy them
// there. It clears the gaps between them, because the memory may have been used before.
func (s *sleeper) placeBatch(ctx context.Context, k, slot int) error {
	b := &s.batches[k]
	if err := s.addSums(b); err != nil {
		return err
	}
	from := s.pos
	for i := range b.rows {
		if _, err := s.lay.Place(b.first+i, uint32(b.rows[i].Stored)); err != nil {
			return err
		}
	}
	last := &s.lay.Chunks[b.end-1]
	s.pos = last.Off + int64(last.Stored)
	if err := s.mem.Await(ctx, s.pos); err != nil {
		return err
	}
	for i := range b.rows {
		c := &s.lay.Chunks[b.first+i]
		clear(s.mem.Bytes(from, c.Off-from))
		from = c.Off + int64(c.Stored)
		b.rows[i].To = unsafe.Pointer(unsafe.SliceData(s.mem.Bytes(c.Off, 1)))
	}
	return s.mode.fetch(slot, b.rows)
}

// finishBatch waits for the copies of batch k and computes its checksums.
func (s *sleeper) finishBatch(k, slot int) error {
	b := &s.batches[k]
	if err := s.mode.wait(slot, b.rows); err != nil {
		return err
	}
	for c := b.first; c < b.end; c++ {
		x := &s.lay.Chunks[c]
		x.Sum = crc32c.Sum(s.mem.Bytes(x.Off, int64(x.Stored)))
		s.job.Bytes.Add(int64(x.Logical))
	}
	b.rows = nil
	return nil
}

// hashesOnGPU reports whether a GPU computes the sums for a tensor's hash. It does so for tensors that it encodes.
func (s *sleeper) hashesOnGPU(t *item) bool {
	return s.mode.gpu && s.isWhole() && t.transform != 0
}

// addSums adds the sums that a GPU has computed for a batch to the hashes of its tensors.
func (s *sleeper) addSums(b *batch) error {
	at := s.tensorOf(b.first)
	for i := range b.rows {
		if !b.rows[i].Hash {
			continue
		}
		c := int32(b.first + i)
		for c >= s.lay.Tensors[at].First+s.lay.Tensors[at].Count {
			at++
		}
		t := &s.lay.Tensors[at]
		it := &s.items[s.lay.Items[at]]
		if c == t.First {
			it.sums = blocksum.New(t.Bytes)
		}
		sums, tail := b.rows[i].SumsAndTail()
		it.sums.Add(sums)
		if c < t.First+t.Count-1 {
			continue
		}
		high, low, ok := it.sums.Finish(tail)
		if !ok {
			return errs.New(errs.ErrEngine, "tensor %q: the GPU computed too few sums for its hash", t.Name)
		}
		t.Hash = codec.HashOf(xxh3.Uint128{Hi: high, Lo: low})
	}
	return nil
}

// completeFile hashes the tensors that no GPU has hashed, and adds the header. It hashes host tensors in their own
// memory. The remaining GPU tensors were stored uncompressed, so it hashes them in the container. Afterwards the host
// memory has the same bytes as a file.
func (s *sleeper) completeFile(ctx context.Context) error {
	all := s.lay.Tensors
	err := spawn.Each(ctx, "sleep hash", runtime.GOMAXPROCS(0), len(all), func(i int) error {
		t := &all[i]
		it := &s.items[s.lay.Items[i]]
		switch {
		case t.Alias >= 0 || s.hashesOnGPU(it):
			return nil
		case s.mode.gpu:
			t.Hash = codec.HashOf(xxh3.Hash128(s.mem.Bytes(t.Off, t.Bytes)))
		default:
			t.Hash = codec.HashOf(xxh3.Hash128(it.Data))
		}
		return nil
	})
	if err != nil {
		return err
	}
	front, size, err := s.lay.Seal(codec.Known)
	if err != nil {
		return err
	}
	if size != s.size {
		return errs.New(errs.ErrEngine, "the in-memory container has %d bytes, expected %d", s.size, size)
	}
	copy(s.mem.Bytes(0, int64(len(front))), front)
	return nil
}
