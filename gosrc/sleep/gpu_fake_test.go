//go:build owfake

package sleep

import (
	"errors"
	"testing"

	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/device/cuda"
	"github.com/overwire/overwire/gosrc/device/cuda/cudatest"
	"github.com/overwire/overwire/gosrc/device/pinned"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/job"
	"github.com/overwire/overwire/gosrc/load"
	"github.com/overwire/overwire/gosrc/save"
	"github.com/overwire/overwire/gosrc/verify"
)

// onGPU copies tensors to GPU memory.
func onGPU(t testing.TB, d *cuda.Device, in []Tensor) (out []Tensor, free func()) {
	t.Helper()
	var sizes []int64
	for _, x := range in {
		sizes = append(sizes, int64(len(x.Data)))
	}
	mem, err := d.Alloc(sizes)
	if err != nil {
		t.Fatal(err)
	}
	at := map[*byte][]byte{}
	for i, x := range in {
		if len(x.Data) > 0 {
			if shared := at[&x.Data[0]]; shared != nil {
				x.Data = shared
			} else {
				copy(mem[i].Slice(), x.Data) // the fake's memory is host memory
				at[&x.Data[0]] = mem[i].Slice()
				x.Data = mem[i].Slice()
			}
		}
		out = append(out, x)
	}
	return out, func() {
		for _, m := range mem {
			m.Release()
		}
	}
}

// ended returns a function that ends a test on the fake driver and checks for leaks.
func ended(t testing.TB, end func() string) func() {
	return func() {
		pinned.Trim()
		if left := end(); left != "" {
			t.Errorf("not freed: %s", left)
		}
		nothingRuns(t)
	}
}

// Tensors on a GPU are restored unchanged, even from memory that earlier sleeps have used. The written file is valid.
func TestSleepFake(t *testing.T) {
	smaller(t)
	defer ended(t, cuda.Fake(64<<20))()
	d, err := cuda.Open(0)
	if err != nil {
		t.Fatal(err)
	}
	r := random(t)
	dir := t.TempDir()
	for range 3 {
		roundTrip(t, d, several(r, 90_000), dir+"/m.safetensors")
	}
	if pinned.Ready(d) == 0 {
		t.Error("no host memory is cached")
	}
}

func roundTrip(t testing.TB, d *cuda.Device, host []Tensor, path string) {
	in, free := onGPU(t, d, host)
	defer free()
	j := job.New("sleep")
	m, rep, err := Sleep(t.Context(), j, Spec{Device: "cuda:0", Path: path}, in)
	if err != nil {
		t.Fatal(err)
	}
	if rep.Aliases != 1 || rep.Compressed < 4 || rep.Stored >= rep.Bytes || rep.Staging == 0 ||
		j.Bytes.Load() != rep.Bytes {
		t.Errorf("%+v, %d bytes of progress", rep, j.Bytes.Load())
	}
	same(t, m, "cuda:0", in)
	m.Close()
	f, err := load.Open(t.Context(), load.Spec{URIs: []string{path}})
	if err != nil {
		t.Fatal(err)
	}
	same(t, f, "", in)
	f.Close()
	if v, err := verify.Verify(t.Context(), j, []string{path}, save.Spec{}.Storage, false); err != nil || !v.OK {
		t.Errorf("%+v, %v", v, err)
	}
}

// If any driver call fails, the sleep or the load after it ends with a typed error, and nothing leaks.
func TestSleepEveryCallFailsFake(t *testing.T) {
	smaller(t)
	r := random(t)
	host := several(r, 20_000)
	for _, c := range []struct {
		code   int
		sticky bool
		class  error
		first  int64 // first call to fail; then every 19th
	}{{999, false, errs.ErrDevice, 1 + r.Int64N(19)}, {999, true, errs.ErrDevice, 1 + r.Int64N(19)},
		{2, false, errs.ErrMemory, 1 + r.Int64N(19)}} {
		failed := 0
		for nth := c.first; ; nth += 19 {
			end := cuda.Fake(64 << 20)
			d, err := cuda.Open(0)
			if err != nil {
				t.Fatal(err)
			}
			in, free := onGPU(t, d, host)
			begun := cudatest.CountCalls()
			cudatest.FailCall(nth, c.code, c.sticky)
			m, err := asleep(t, Spec{Device: "cuda:0"}, in)
			var l *load.Loading
			if err == nil {
				if l, err = m.Start(nil, load.Options{Device: "cuda:0"}); err == nil {
					_, err = l.Job().Wait(-1)
					l.Close()
				}
				m.Close()
			}
			cudatest.FailCall(0, 0, false)
			calls := cudatest.CountCalls() - begun
			free()
			ended(t, end)()
			if err != nil {
				failed++
				if !errors.Is(err, c.class) {
					t.Fatalf("call %d fails with %d: %v", nth, c.code, err)
				}
			}
			if t.Failed() {
				t.FailNow()
			}
			if calls < nth {
				break
			}
		}
		if failed == 0 {
			t.Errorf("%+v: no call failed", c)
		}
	}
}

// If a GPU has little free memory, it uses less to encode. If it has none, the sleep fails and the tensors are
// unchanged.
func TestSleepFakeLittleMemory(t *testing.T) {
	smaller(t)
	defer ended(t, cuda.Fake(4<<20))()
	d, err := cuda.Open(0)
	if err != nil {
		t.Fatal(err)
	}
	in, free := onGPU(t, d, several(random(t), 20_000))
	defer free()
	most, err := asleep(t, Spec{Device: "cuda:0"}, in)
	if err != nil {
		t.Fatal(err)
	}
	defer most.Close()
	unused, _, err := d.MemoryInfo()
	if err != nil {
		t.Fatal(err)
	}
	for _, leave := range []int64{600 << 10, 100 << 10} {
		var rest []device.Memory
		if rest, err = d.Alloc([]int64{unused - leave}); err != nil {
			t.Fatal(err)
		}
		m, rep, err := Sleep(t.Context(), job.New("sleep"), Spec{Device: "cuda:0"}, in)
		switch {
		case leave < 200<<10:
			if !errors.Is(err, errs.ErrMemory) {
				t.Errorf("%d bytes of GPU memory: %v", leave, err)
			}
		case err != nil:
			t.Error(err)
		case rep.Staging > leave:
			t.Errorf("%d bytes of GPU memory, %d taken", leave, rep.Staging)
		}
		if err == nil {
			m.Close()
		}
		rest[0].Release()
		if err := d.Trim(); err != nil {
			t.Fatal(err)
		}
	}
}

// A sleep does not invalidate or join a graph capture, by another thread or on the default stream, and does not wait
// for other work.
func TestSleepFakeDuringCapture(t *testing.T) {
	smaller(t)
	defer ended(t, cuda.Fake(64<<20))()
	d, err := cuda.Open(0)
	if err != nil {
		t.Fatal(err)
	}
	in, free := onGPU(t, d, several(random(t), 20_000))
	defer free()
	for _, blocking := range []bool{false, true} {
		end := cudatest.CaptureStream(0, blocking)
		m, err := asleep(t, Spec{Device: "cuda:0"}, in)
		if err != nil {
			t.Fatal(err)
		}
		same(t, m, "cuda:0", in)
		m.Close()
		end()
	}
}
