package sleep

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"
	"unsafe"

	"github.com/overwire/overwire/gosrc/codec/digest"
	"github.com/overwire/overwire/gosrc/device/pinned"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/spawn/spawntest"
	"github.com/overwire/overwire/gosrc/job"
	"github.com/overwire/overwire/gosrc/load"
	"github.com/overwire/overwire/gosrc/save"
	"github.com/overwire/overwire/gosrc/tensor"
	"github.com/overwire/overwire/gosrc/verify"
)

func random(t testing.TB) *rand.Rand {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	return rand.New(rand.NewPCG(seed, 7))
}

// smaller reduces the chunk size, so tests have tensors with many chunks.
func smaller(t testing.TB) {
	before := chunkBytes
	chunkBytes = 16 << 10
	t.Cleanup(func() { chunkBytes = before })
}

// like returns n bytes that resemble weights of a dtype.
func like(r *rand.Rand, d tensor.DType, n int) []byte {
	b := make([]byte, n)
	switch d {
	case tensor.F16:
		for i := 0; i+2 <= n; i += 2 {
			binary.LittleEndian.PutUint16(b[i:], uint16(r.Uint32()&0x87ff|0x2c00))
		}
	case tensor.BF16, tensor.F32:
		size := d.Bits() / 8
		for i := 0; i+size <= n; i += size {
			v := math.Float32bits(float32(r.NormFloat64() * 0.02))
			copy(b[i:i+size], binary.LittleEndian.AppendUint32(nil, v)[4-size:])
		}
	case tensor.U8, tensor.I8:
		for i := range b {
			b[i] = byte(r.IntN(5) + 126)
		}
	default:
		for i := range b {
			b[i] = byte(r.Uint32())
		}
	}
	return b
}

// several returns tensors of all kinds that a sleep treats differently.
func several(r *rand.Rand, most int) (in []Tensor) {
	add := func(name string, d tensor.DType, n int) {
		n -= n % max(1, d.Bits()/8)
		in = append(in, Tensor{Name: name, DType: d, Shape: []int64{int64(n * 8 / d.Bits())}, Data: like(r, d, n)})
	}
	add("weights", tensor.BF16, most)
	add("odd", tensor.BF16, 50_000+2*r.IntN(1000))
	add("small", tensor.BF16, 300)
	add("floats", tensor.F32, 20_000)
	add("bytes", tensor.U8, 70_001)
	add("noise", tensor.F64, 40_000)
	add("e", tensor.BF16, 0)
	noise := Tensor{Name: "flat", DType: tensor.BF16, Shape: []int64{20_000}, Data: like(r, tensor.F64, 40_000)}
	in = append(in, noise, Tensor{Name: "tied", DType: tensor.BF16, Shape: []int64{2, int64(most / 4)}, Data: in[0].Data})
	r.Shuffle(len(in), func(i, j int) { in[i], in[j] = in[j], in[i] })
	return in
}

// same loads a model to a device and compares it with the tensors.
func same(t testing.TB, m *load.Model, device string, in []Tensor) {
	t.Helper()
	ix := m.Index()
	if len(ix.Tensors) != len(in) {
		t.Fatalf("got %d of %d tensors", len(ix.Tensors), len(in))
	}
	l, err := m.Start(nil, load.Options{Device: device})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if _, err := l.Job().Wait(-1); err != nil {
		t.Fatal(err)
	}
	for i := range ix.Tensors {
		k := slices.IndexFunc(in, func(x Tensor) bool { return x.Name == ix.Tensors[i].Name })
		mem, shape, d, ok := l.Take(i)
		if len(in[k].Data) == 0 {
			continue
		}
		if !ok || d != in[k].DType || !slices.Equal(shape, in[k].Shape) || !bytes.Equal(mem.Slice(), in[k].Data) {
			t.Errorf("%q differs", in[k].Name)
		}
		mem.Release()
	}
}

func nothingRuns(t testing.TB) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); len(spawntest.Left()) > 0; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("still running: %v", spawntest.Left())
		}
	}
}

// Tensors of all kinds are restored unchanged from memory and from the written file. Tensors that share memory are
// stored once.
func TestSleep(t *testing.T) {
	smaller(t)
	r := random(t)
	in := several(r, 200_000)
	path := filepath.Join(t.TempDir(), "m.safetensors")
	j := job.New("sleep")
	m, rep, err := Sleep(t.Context(), j, Spec{Path: path}, in)
	if err != nil {
		t.Fatal(err)
	}
	if rep.Aliases != 1 || rep.Tensors != len(in) || rep.Stored >= rep.Bytes || j.Bytes.Load() != rep.Bytes {
		t.Errorf("%+v, %d bytes of progress", rep, j.Bytes.Load())
	}
	same(t, m, "", in)
	same(t, m, "", in)
	st, err := os.Stat(path)
	if err != nil || st.Size() != rep.Stored {
		t.Errorf("a file of %d bytes, %d stored: %v", st.Size(), rep.Stored, err)
	}
	m.Close()
	f, err := load.Open(t.Context(), load.Spec{URIs: []string{path}})
	if err != nil {
		t.Fatal(err)
	}
	same(t, f, "", in)
	f.Close()
	if v, err := verify.Verify(t.Context(), job.New("verify"), []string{path}, save.Spec{}.Storage, false); err != nil ||
		!v.OK {
		t.Errorf("%+v, %v", v, err)
	}
	nothingRuns(t)
}

// If every tensor shrinks, the file is the same as one written by a save.
func TestSleepWritesWhatSaveWrites(t *testing.T) {
	r := random(t)
	var in []Tensor
	var out []save.Input
	for i, d := range []tensor.DType{tensor.BF16, tensor.F32, tensor.BF16, tensor.F16, tensor.I64} {
		n := 300_000 + 8*r.IntN(1000)
		x := Tensor{Name: string(rune('a' + i)), DType: d, Shape: []int64{int64(n * 8 / d.Bits())}, Data: like(r, d, n)}
		in = append(in, x)
		out = append(out, save.Input{Name: x.Name, DType: d, Shape: x.Shape, Data: x.Data})
	}
	dir := t.TempDir()
	m, _, err := Sleep(t.Context(), job.New("sleep"), Spec{Path: dir + "/a.safetensors"}, in)
	if err != nil {
		t.Fatal(err)
	}
	m.Close()
	spec := save.Spec{Path: dir + "/b.safetensors", Compress: true, Metadata: map[string]string{"format": "pt"}}
	if _, err := save.Write(t.Context(), job.New("save"), spec, out); err != nil {
		t.Fatal(err)
	}
	a, _ := os.ReadFile(dir + "/a.safetensors")
	b, _ := os.ReadFile(dir + "/b.safetensors")
	if len(a) == 0 || !bytes.Equal(a, b) {
		t.Errorf("files of %d and %d bytes differ", len(a), len(b))
	}
}

// An empty list of tensors can be put to sleep.
func TestSleepNothing(t *testing.T) {
	m, rep, err := Sleep(t.Context(), job.New("sleep"), Spec{}, nil)
	if err != nil || rep.Bytes != 0 {
		t.Fatal(rep, err)
	}
	m.Close()
}

// The next load detects changed stored bytes.
func TestSleepFindsDamage(t *testing.T) {
	smaller(t)
	in := several(random(t), 100_000)
	s := &sleeper{job: job.New("sleep")}
	m, err := s.runSleep(t.Context(), in)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	c := m.Index().Chunks[len(m.Index().Chunks)/2]
	flip := func() { s.mem.Bytes(c.Off+int64(c.Stored)/2, 1)[0] ^= 1 }
	flip()
	l, err := m.Start(nil, load.Options{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := l.Job().Wait(-1); !errors.Is(err, errs.ErrCorrupt) {
		t.Errorf("damage: %v", err)
	}
	l.Close()
	flip()
	same(t, m, "", in)
}

// If the estimate exceeds the budget, the sleep is refused in advance, and the error contains the number of bytes. If
// the actual size exceeds it, the sleep also fails. No memory is leaked.
func TestSleepBudget(t *testing.T) {
	smaller(t)
	r := random(t)
	in := several(r, 200_000)
	_, err := asleep(t, Spec{Budget: 100_000}, in)
	var mem *errs.Memory
	if !errors.As(err, &mem) || mem.Asked < 200_000 || mem.Free != 100_000 {
		t.Errorf("refused by %v", err)
	}
	// Zeros at the sampled positions and noise elsewhere mislead the estimate.
	x := like(r, tensor.F64, 1<<20)
	for k := range int64(sampleRuns) {
		off := (int64(len(x)) - sampleBytes) / (sampleRuns - 1) * k &^ 255
		clear(x[off : off+sampleBytes])
	}
	trick := []Tensor{{Name: "t", DType: tensor.BF16, Shape: []int64{1 << 19}, Data: x}}
	if _, err := asleep(t, Spec{Budget: 600_000}, trick); !errors.Is(err, errs.ErrMemory) {
		t.Errorf("more than its sample: %v", err)
	}
	m, err := asleep(t, Spec{}, trick)
	if err != nil {
		t.Fatal(err)
	}
	same(t, m, "", trick)
	m.Close()
	nothingRuns(t)
}

func asleep(t testing.TB, spec Spec, in []Tensor) (*load.Model, error) {
	m, _, err := Sleep(t.Context(), job.New("sleep"), spec, in)
	return m, err
}

// A cancelled sleep ends with a typed error and leaks nothing.
func TestSleepCancelled(t *testing.T) {
	smaller(t)
	r := random(t)
	in := several(r, 3<<20)
	for range 5 {
		ctx, cancel := context.WithCancelCause(t.Context())
		j := job.New("sleep")
		after := r.Int64N(2 << 20)
		go func() {
			for j.Bytes.Load() < after && ctx.Err() == nil {
				time.Sleep(10 * time.Microsecond)
			}
			cancel(errs.New(errs.ErrCancelled, "by the test"))
		}()
		m, _, err := Sleep(ctx, j, Spec{}, in)
		if err == nil { // it may have been faster
			m.Close()
		} else if !errors.Is(err, errs.ErrCancelled) {
			t.Errorf("cancelled: %v", err)
		}
		cancel(nil)
	}
	pinned.Trim()
	nothingRuns(t)
}

// Concurrent sleeps have separate memory.
func TestSleepsAtOnce(t *testing.T) {
	smaller(t)
	r := random(t)
	var all [4][]Tensor
	for i := range all {
		all[i] = several(r, 100_000)
	}
	t.Run("group", func(t *testing.T) {
		for _, in := range all {
			t.Run("one", func(t *testing.T) {
				t.Parallel()
				for range 3 {
					m, err := asleep(t, Spec{}, in)
					if err != nil {
						t.Fatal(err)
					}
					same(t, m, "", in)
					m.Close()
				}
			})
		}
	})
}

// An invalid tensor or device is refused with a typed error.
func TestSleepRefuses(t *testing.T) {
	b := make([]byte, 16)
	for _, x := range [][]Tensor{
		{{Name: "a", DType: tensor.BF16, Shape: []int64{9}, Data: b}},
		{{Name: "a", DType: tensor.U8, Shape: []int64{16}, Data: b},
			{Name: "a", DType: tensor.U8, Shape: []int64{16}, Data: make([]byte, 16)}},
	} {
		if _, err := asleep(t, Spec{}, x); !errors.Is(err, errs.ErrArgument) {
			t.Errorf("%v: %v", x[0].Shape, err)
		}
	}
	if _, err := asleep(t, Spec{Device: "tpu"}, nil); !errors.Is(err, errs.ErrNotSupported) {
		t.Error(err)
	}
}

// If a tensor changes while it is compressed for the host store, the compressed bytes are refused, even if the tensor
// has its first bytes again afterwards.
func TestChangedBackIsRefused(t *testing.T) {
	smaller(t)
	in := several(random(t), 90_000)
	views := make([]digest.View, len(in))
	for i := range in {
		data := in[i].Data
		views[i] = digest.Contiguous(uint64(uintptr(unsafe.Pointer(unsafe.SliceData(data)))), int64(len(data)))
	}
	all, err := digest.All(t.Context(), views, 2, digest.ProcessKey())
	if err != nil {
		t.Fatal(err)
	}
	sums := map[string]digest.Sum{}
	for i := range in {
		sums[in[i].Name] = all[i]
	}
	for i := range in {
		x := &in[i]
		for _, at := range []int{-1, 0, len(x.Data) - 1} {
			if len(x.Data) <= at || len(x.Data) == 0 {
				continue
			}
			if at >= 0 {
				x.Data[at] ^= 1
			}
			s := &sleeper{job: job.New("sleep"), keep: true}
			_, _, err := s.compressTensors(t.Context(), in)
			if err != nil {
				t.Fatal(err)
			}
			if at >= 0 {
				x.Data[at] ^= 1
			}
			err = compareDigests(t.Context(), s, sums)
			if at < 0 && err != nil || at >= 0 && !errors.Is(err, errs.ErrArgument) {
				t.Errorf("byte %d of %s: %v", at, x.Name, err)
			}
			s.mem.Free()
		}
	}
}
