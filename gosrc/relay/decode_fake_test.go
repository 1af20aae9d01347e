//go:build owfake

package relay

import (
	"errors"
	"testing"
	"time"

	"github.com/overwire/overwire/gosrc/device/cuda"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/spawn"
	"github.com/overwire/overwire/gosrc/plan"
)

// A call of DecodePiece that waits for a slot ends when the job does: nothing finishes slots then, and
// the job waits for the call.
func TestDecodePieceEndsWithJob(t *testing.T) {
	end := cuda.Fake(64 << 20)
	m := plain(t, []int64{4 << 20})
	gpu, err := cuda.Open(0)
	if err != nil {
		t.Fatal(err)
	}
	memory, err := gpu.Alloc([]int64{2 << 20, 4 << 20})
	if err != nil {
		t.Fatal(err)
	}
	address := func(i int) uintptr { return uintptr(memory[i].Ptr) }
	spec := &Spec{Tensors: []int64{0}, Ring: []uint64{uint64(address(0))}, Size: 2 << 20, Ranks: 1}
	spec.Device = "cuda:0"
	r, err := Start(m, spec)
	if err != nil {
		t.Fatal(err)
	}
	if err := r.Aim([]plan.Request{{Dest: address(1), Hi0: plan.Whole, Hi1: plan.Whole}}); err != nil {
		t.Fatal(err)
	}
	if landed, err := r.AwaitOwnShare(0, time.Minute); !landed || err != nil {
		t.Fatal(landed, err)
	}
	var slots []*cuda.Slot
	for s := r.queue.TryGet(); s != nil; s = r.queue.TryGet() {
		slots = append(slots, s)
	}
	decoded := make(chan error, 1)
	go func() { decoded <- r.DecodePiece(0, 0) }()
	select {
	case err := <-decoded:
		t.Fatalf("decoded without a slot: %v", err)
	case <-time.After(50 * time.Millisecond): // it waits by now, most likely
	}
	r.job.Cancel()
	select {
	case err := <-decoded:
		if !errors.Is(err, errs.ErrCancelled) {
			t.Error(err)
		}
	case <-time.After(time.Minute):
		t.Error("DecodePiece waits for a slot of a job that is cancelled")
	}
	for _, s := range slots {
		r.queue.Put(s)
	}
	if _, err := r.job.Wait(time.Minute); !errors.Is(err, errs.ErrCancelled) {
		t.Error(err)
	}
	for i := range memory {
		memory[i].Release()
	}
	if left := end(); left != "" {
		t.Errorf("left: %s", left)
	}
	if left := spawn.Left(); len(left) != 0 {
		t.Errorf("still running: %v", left)
	}
}
