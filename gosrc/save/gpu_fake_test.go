//go:build owfake

package save_test

import (
	"context"
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"
	"time"
	"unsafe"

	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/device/cuda"
	"github.com/overwire/overwire/gosrc/device/cuda/cudatest"
	"github.com/overwire/overwire/gosrc/device/pinned"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/format"
	"github.com/overwire/overwire/gosrc/save"
	"github.com/overwire/overwire/gosrc/tensor"
	"github.com/overwire/overwire/gosrc/verify"
)

// encodeAll makes GPUs encode tensors of any size.
func encodeAll(t testing.TB) {
	before := *save.LeastOnGPU
	*save.LeastOnGPU = 1
	t.Cleanup(func() { *save.LeastOnGPU = before })
}

// trained returns difficult tensors: odd sizes, one element, no elements, tied and equal tensors, incompressible
// tensors, and a tensor with both compressible and incompressible chunks.
func trained(r *rand.Rand) (in []save.Input) {
	add := func(name string, d tensor.DType, shape ...int64) []byte {
		n, _ := tensor.Size(d, shape)
		b := make([]byte, n)
		for i := range b {
			if b[i] = byte(r.Uint32()); i%2 == 1 && d == tensor.BF16 {
				b[i] = b[i]&0x81 | 0x3c
			}
		}
		in = append(in, save.Input{Name: name, DType: d, Shape: shape, Data: b})
		return b
	}
	weights := add("weights", tensor.BF16, 300, int64(100+r.IntN(100)))
	in = append(in, save.Input{Name: "tied", DType: tensor.BF16, Shape: []int64{int64(len(weights) / 2)}, Data: weights})
	add("odd", tensor.BF16, int64(20_001+r.IntN(9000)))
	mixed := add("mixed", tensor.BF16, 64<<10)
	for i := 40 << 10; i < 90<<10; i++ {
		mixed[i] = byte(r.Uint32())
	}
	add("norm", tensor.BF16, 150)
	add("equal", tensor.BF16, 2000)
	copy(add("equal too", tensor.BF16, 40, 50), in[len(in)-1].Data)
	add("noise", tensor.F64, 5001)
	add("bytes", tensor.U8, 77_777)
	add("one", tensor.F32)
	add("nothing", tensor.F16, 0, 3)
	add("boundary", tensor.U8, 16<<10)
	add("stripe", tensor.U8, 16<<10+7)
	floats := add("floats", tensor.F32, 9001)
	for i := 0; i+4 <= len(floats); i += 4 {
		binary.LittleEndian.PutUint32(floats[i:], binary.LittleEndian.Uint32(floats[i:])&0x83ffffff|0x3c000000)
	}
	r.Shuffle(len(in), func(i, j int) { in[i], in[j] = in[j], in[i] })
	return in
}

// onGPU copies tensors to GPU memory, except every host-th one.
func onGPU(t testing.TB, d *cuda.Device, in []save.Input, host int) (out []save.Input, free func()) {
	t.Helper()
	at := map[*byte]device.Memory{}
	var all []device.Memory
	out = append(out, in...)
	for i, x := range in {
		if len(x.Data) == 0 || host > 0 && i%host == 0 {
			continue
		}
		m, shared := at[&x.Data[0]]
		if !shared {
			mem, err := d.Alloc([]int64{int64(len(x.Data))})
			if err != nil {
				t.Fatal(err)
			}
			m = mem[0]
			copy(m.Slice(), x.Data) // the fake's memory is host memory
			at[&x.Data[0]], all = m, append(all, m)
		}
		out[i].Data = nil
		out[i].Device = &save.DeviceMemory{Addr: uintptr(m.Ptr), Bytes: int64(len(x.Data)), GPU: d,
			Read: func(dst []byte, off int64) error {
				return d.Read(dst, device.Memory{Ptr: unsafe.Add(m.Ptr, off), Bytes: int64(len(dst))})
			}}
	}
	return out, func() {
		for _, m := range all {
			m.Release()
		}
	}
}

func random(t testing.TB) *rand.Rand {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	return rand.New(rand.NewPCG(seed, 1))
}

func ended(t testing.TB, end func() string) {
	pinned.Trim()
	if left := end(); left != "" {
		t.Errorf("not freed: %s", left)
	}
}

// If a GPU encodes tensors, the files are byte for byte the same as if the host encodes them: compressed and plain, one
// file and several, staged or not, and with some tensors on the host.
func TestGPUWritesTheSameFilesFake(t *testing.T) {
	encodeAll(t)
	end := cuda.Fake(64 << 20)
	defer func() { ended(t, end) }()
	d, err := cuda.Open(0)
	if err != nil {
		t.Fatal(err)
	}
	r := random(t)
	in := trained(r)
	for i, c := range []struct {
		spec   save.Spec
		host   int
		staged bool
		gpu    bool // the GPU encodes some tensors
	}{
		{save.Spec{Compress: true}, 0, false, true},
		{save.Spec{Compress: true}, 0, true, true},
		{save.Spec{Compress: true}, 3, false, true},
		{save.Spec{Compress: true}, 3, true, true},
		{save.Spec{}, 0, false, true},
		{save.Spec{}, 2, true, true},
		{save.Spec{Compress: true, Shard: 60_000}, 0, false, true},
		{save.Spec{Compress: true, Shard: 60_000}, 4, true, true},
		{save.Spec{Compress: true, Shard: 60_000, Threads: 1}, 4, false, true},
		{save.Spec{Compress: true, Parts: 4}, 0, true, false},
		{save.Spec{Compress: true, Digests: true}, 0, true, true},
		{save.Spec{Compress: true, Digests: true}, 3, false, true},
		{save.Spec{Compress: true, Level: "smaller"}, 0, false, false},
		{save.Spec{Compress: true}, 1, true, false},
	} {
		host, there := t.TempDir(), t.TempDir()
		spec := c.spec
		spec.ChunkBytes = 16 << 10
		spec.Path = host + "/m.safetensors"
		want := write(t, spec, in)
		out, free := onGPU(t, d, in, c.host)
		spec.Path = there + "/m.safetensors"
		calls := 0
		if c.staged {
			spec.Staging = &save.Staging{Done: func() { // the tensors change before the files are written
				calls++
				free()
				free = func() {}
			}}
		}
		got := write(t, spec, out)
		free()
		if c.staged != (calls == 1) || c.staged != (got.Staged > 0) {
			t.Errorf("case %d: staged %d times, after %v s", i, calls, got.Staged)
		}
		if c.gpu != (got.OnGPU > 0) || got.BytesOut != want.BytesOut || got.Aliases != want.Aliases ||
			got.Compressed != want.Compressed {
			t.Errorf("case %d: %+v, the host gave %+v", i, got, want)
		}
		for k, path := range want.Files {
			a, errA := os.ReadFile(path)
			b, errB := os.ReadFile(filepath.Join(there, filepath.Base(path)))
			if errA != nil || errB != nil || string(a) != string(b) {
				t.Fatalf("case %d, file %d: %d bytes and %d differ (%v, %v)", i, k, len(a), len(b), errA, errB)
			}
		}
		noTemps(t, there)
	}
	if t.Failed() {
		return
	}
	dir := t.TempDir()
	out, free := onGPU(t, d, in, 0)
	defer free()
	write(t, save.Spec{Path: dir + "/m.safetensors", Compress: true, ChunkBytes: 16 << 10}, out)
	if v, err := verify.Verify(bg, nil, []string{dir + "/m.safetensors"}, format.Access{}, false); err != nil || !v.OK {
		t.Fatalf("%+v, %v", v, err)
	}
	same(t, in, read(t, dir+"/m.safetensors"))
}

// If any driver call fails, the save ends with a typed error, leaves no file, memory or goroutine, and keeps the old
// file.
func TestGPUEveryCallFailsFake(t *testing.T) {
	encodeAll(t)
	r := random(t)
	in := trained(r)
	dir := t.TempDir()
	path := dir + "/m.safetensors"
	write(t, save.Spec{Path: path}, in[:1])
	before := sha256Of(t, path)
	failed := 0
	for nth := 1 + r.Int64N(7); ; nth += 23 {
		end := cuda.Fake(64 << 20)
		d, err := cuda.Open(0)
		if err != nil {
			t.Fatal(err)
		}
		out, free := onGPU(t, d, in, 4)
		begun := cudatest.CountCalls()
		cudatest.FailCall(nth, 999, nth%2 == 0)
		spec := save.Spec{Path: path, Compress: true, ChunkBytes: 16 << 10, Beside: true}
		if nth%3 == 0 {
			spec.Staging = &save.Staging{}
		}
		_, err = save.Write(bg, nil, spec, out)
		cudatest.FailCall(0, 0, false)
		calls := cudatest.CountCalls() - begun
		free()
		ended(t, end)
		noTemps(t, dir)
		if err != nil {
			failed++
			if !errors.Is(err, errs.ErrDevice) {
				t.Fatalf("call %d fails: %v", nth, err)
			}
			if sha256Of(t, path) != before {
				t.Fatalf("call %d fails, and the old file changed", nth)
			}
		} else {
			write(t, save.Spec{Path: path}, in[:1])
		}
		if t.Failed() || calls < nth {
			break
		}
	}
	if failed == 0 {
		t.Error("no call failed")
	}
}

// If the GPU has no memory for slots, the host encodes. A cancelled staged save ends.
func TestGPULittleMemoryAndCancelFake(t *testing.T) {
	encodeAll(t)
	end := cuda.Fake(4 << 20)
	defer func() { ended(t, end) }()
	d, err := cuda.Open(0)
	if err != nil {
		t.Fatal(err)
	}
	in := trained(random(t))
	out, free := onGPU(t, d, in, 0)
	defer free()
	dir := t.TempDir()
	spec := save.Spec{Path: dir + "/m.safetensors", Compress: true, ChunkBytes: 16 << 10}
	ctx, cancel := context.WithCancel(bg)
	staged := spec
	staged.Staging = &save.Staging{Done: cancel}
	if _, err := save.Write(ctx, nil, staged, out); !errors.Is(err, errs.ErrCancelled) {
		t.Errorf("cancelled: %v", err)
	}
	noTemps(t, dir)
	unused, _, err := d.MemoryInfo()
	if err != nil {
		t.Fatal(err)
	}
	rest, err := d.Alloc([]int64{unused - 64<<10})
	if err != nil {
		t.Fatal(err)
	}
	defer rest[0].Release()
	if rep := write(t, spec, out); rep.OnGPU != 0 {
		t.Errorf("%+v", rep)
	}
	same(t, in, read(t, spec.Path))
}
