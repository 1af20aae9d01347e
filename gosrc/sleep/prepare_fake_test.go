//go:build owfake

package sleep

import (
	"errors"
	"testing"

	"github.com/overwire/overwire/gosrc/device/cuda"
	"github.com/overwire/overwire/gosrc/device/cuda/cudatest"
	"github.com/overwire/overwire/gosrc/device/pinned"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/job"
)

// The next sleep uses prepared memory, whether the caller waits for it or not. Preparing the same amount again does
// nothing. Return frees the memory.
func TestPrepareFake(t *testing.T) {
	smaller(t)
	defer ended(t, cuda.Fake(64<<20))()
	d, err := cuda.Open(0)
	if err != nil {
		t.Fatal(err)
	}
	r := random(t)
	in, free := onGPU(t, d, several(r, 90_000))
	defer free()
	spec := Spec{Device: "cuda:0"}
	for round := range 6 {
		if round == 3 {
			if err := Return("cuda:0"); err != nil || pinned.Ready(d) != 0 {
				t.Fatal(err, pinned.Ready(d))
			}
		}
		unused, _, _ := d.MemoryInfo()
		p, err := Prepare(spec, 0, in)
		if err != nil || p.Bytes <= 0 {
			t.Fatal(p, err)
		}
		if left, _, _ := d.MemoryInfo(); left != unused {
			t.Errorf("it took %d bytes of the GPU", unused-left)
		}
		wait := round%2 == 0
		if wait {
			ready, err := p.Wait(t.Context())
			if err != nil || ready < p.Bytes || ready != pinned.Ready(d) {
				t.Fatalf("round %d: %d of %d bytes are ready, %d kept: %v", round, ready, p.Bytes, pinned.Ready(d), err)
			}
			again, err := Prepare(spec, p.Bytes, nil)
			if err != nil {
				t.Fatal(err)
			}
			if same, err := again.Wait(t.Context()); err != nil || same != ready || pinned.Ready(d) != ready {
				t.Errorf("again: %d, %d kept: %v", same, pinned.Ready(d), err)
			}
		}
		m, rep, err := Sleep(t.Context(), job.New("sleep"), spec, in)
		if err != nil || rep.Stored <= 0 {
			t.Fatal(rep, err)
		}
		if n := pinned.Ready(d); n != 0 {
			t.Errorf("round %d: the sleep left %d bytes that were ready", round, n)
		}
		same(t, m, "cuda:0", in)
		m.Close()
		if _, err := p.Wait(t.Context()); err != nil {
			t.Error(err)
		}
	}
	if p, err := Prepare(Spec{}, 0, in); err != nil || p.Bytes != 0 {
		t.Error("the host has nothing to prepare:", err)
	} else if n, err := p.Wait(t.Context()); n != 0 || err != nil {
		t.Error(n, err)
	}
}

// Prepare refuses more memory than the budget or the host allows, and invalid sizes. After a preparation within a small
// budget, the sleep also stays within the budget.
func TestPrepareBoundsFake(t *testing.T) {
	smaller(t)
	defer ended(t, cuda.Fake(64<<20))()
	d, err := cuda.Open(0)
	if err != nil {
		t.Fatal(err)
	}
	in, free := onGPU(t, d, several(random(t), 90_000))
	defer free()
	for _, bad := range []struct {
		spec  Spec
		bytes int64
		class error
	}{
		{Spec{Device: "cuda:0", Budget: 1000}, 2000, errs.ErrMemory}, {Spec{Device: "cuda:0"}, 1 << 42, errs.ErrMemory},
		{Spec{Device: "cuda:0"}, 0, errs.ErrArgument}, {Spec{Device: "cuda:0"}, -5, errs.ErrArgument},
		{Spec{Device: "cuda:0"}, 1 << 62, errs.ErrArgument}, {Spec{Device: "tpu"}, 5, errs.ErrNotSupported},
	} {
		if _, err := Prepare(bad.spec, bad.bytes, nil); !errors.Is(err, bad.class) {
			t.Errorf("%+v: %v", bad, err)
		}
	}
	small := Spec{Device: "cuda:0", Budget: 2 << 20}
	p, err := Prepare(small, 0, in)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := p.Wait(t.Context()); err != nil || pinned.Ready(d) > small.Budget {
		t.Errorf("%d bytes are ready: %v", pinned.Ready(d), err)
	}
	m, rep, err := Sleep(t.Context(), job.New("sleep"), small, in)
	if err != nil || rep.Stored > small.Budget {
		t.Fatal(rep, err)
	}
	m.Close()
}

// If any driver call fails, the preparation ends with a typed error, the sleep after it succeeds, and nothing leaks.
func TestPrepareEveryCallFailsFake(t *testing.T) {
	smaller(t)
	host := several(random(t), 20_000)
	failed := 0
	for nth := int64(1); ; nth += 3 {
		end := cuda.Fake(64 << 20)
		d, err := cuda.Open(0)
		if err != nil {
			t.Fatal(err)
		}
		in, free := onGPU(t, d, host)
		begun := cudatest.CountCalls()
		cudatest.FailCall(nth, 2, false)
		p, err := Prepare(Spec{Device: "cuda:0"}, 0, in)
		if err == nil {
			_, err = p.Wait(t.Context())
		}
		calls := cudatest.CountCalls() - begun
		cudatest.FailCall(0, 0, false)
		m, again := asleep(t, Spec{Device: "cuda:0"}, in)
		if again != nil {
			t.Fatalf("call %d failed, and no sleep after it succeeds: %v", nth, again)
		}
		m.Close()
		free()
		ended(t, end)()
		if err != nil {
			failed++
			if !errors.Is(err, errs.ErrMemory) {
				t.Fatalf("call %d: %v", nth, err)
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
		t.Error("no call failed")
	}
}

// A preparation ends when the process cancels its jobs at exit.
func TestPrepareEndsWithTheProcessFake(t *testing.T) {
	smaller(t)
	defer ended(t, cuda.Fake(64<<20))()
	p, err := Prepare(Spec{Device: "cuda:0"}, 24<<20, nil)
	if err != nil {
		t.Fatal(err)
	}
	if !job.CancelAll(20e9) {
		t.Fatal("the preparation has not ended")
	}
	if _, err := p.Wait(t.Context()); err != nil && !errors.Is(err, errs.ErrCancelled) {
		t.Error(err)
	}
}
