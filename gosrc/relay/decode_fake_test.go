//go:build owfake

package relay

import (
	"errors"
	"testing"
	"time"

	"github.com/overwire/overwire/gosrc/device/cuda"
	"github.com/overwire/overwire/gosrc/device/cuda/queue"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/spawn/spawntest"
	"github.com/overwire/overwire/gosrc/plan"
)

// startOnFake starts a group load of one rank on the fake driver, with a tensor of size bytes, and waits until its
// first piece has been read. end waits for the job to end with an error of a class, and checks that nothing leaks.
func startOnFake(t *testing.T, size int64) (r *Relay, end func(class error)) {
	t.Helper()
	endFake := cuda.Fake(64 << 20)
	m := plain(t, []int64{size})
	gpu, err := cuda.Open(0)
	if err != nil {
		t.Fatal(err)
	}
	memory, err := gpu.Alloc([]int64{2 << 20, size})
	if err != nil {
		t.Fatal(err)
	}
	address := func(i int) uintptr { return uintptr(memory[i].Ptr) }
	spec := &Spec{Tensors: []int64{0}, Ring: []uint64{uint64(address(0))}, Size: 2 << 20, Ranks: 1}
	spec.Device = "cuda:0"
	if r, err = Start(m, spec); err != nil {
		t.Fatal(err)
	}
	if err := r.Aim([]plan.Request{{Dest: address(1), Hi0: plan.Whole, Hi1: plan.Whole}}); err != nil {
		t.Fatal(err)
	}
	if landed, err := r.AwaitOwnShare(0, time.Minute); !landed || err != nil {
		t.Fatal(landed, err)
	}
	return r, func(class error) {
		if done, err := r.job.Wait(time.Minute); !done || !errors.Is(err, class) {
			t.Fatal(done, err)
		}
		for i := range memory {
			memory[i].Release()
		}
		if left := endFake(); left != "" {
			t.Errorf("leaked: %s", left)
		}
		if left := spawntest.Left(); len(left) != 0 {
			t.Errorf("still running: %v", left)
		}
	}
}

// A DecodePiece call that waits for a slot returns when the job is cancelled. Otherwise the call and the job would
// wait forever: cancelled jobs finish no slots, and the job waits for the call.
func TestDecodePieceEndsWithJob(t *testing.T) {
	r, end := startOnFake(t, 4<<20)
	var slots []*queue.Slot
	if err := r.dec.queue.Drain(t.Context()); err != nil { // slots that compare checksums may still be in use
		t.Fatal(err)
	}
	for s := r.dec.queue.TryGet(); s != nil; s = r.dec.queue.TryGet() {
		slots = append(slots, s)
	}
	decoded := make(chan error, 1)
	go func() { decoded <- r.DecodePiece(0, 0) }()
	select {
	case err := <-decoded:
		t.Fatalf("decoded without a slot: %v", err)
	case <-time.After(50 * time.Millisecond): // the call is most likely waiting by now
	}
	r.job.Cancel()
	select {
	case err := <-decoded:
		if !errors.Is(err, errs.ErrCancelled) {
			t.Error(err)
		}
	case <-time.After(time.Minute):
		t.Error("DecodePiece still waits for a slot after the job was cancelled")
	}
	for _, s := range slots {
		r.dec.queue.Put(s)
	}
	end(errs.ErrCancelled)
}

// While the goroutine of movePieces is blocked, readers that wait for slots do its work. A piece that is decoded
// during that time is counted.
func TestReadersMovePieces(t *testing.T) {
	r, end := startOnFake(t, 40<<20)
	var slot *queue.Slot
	for slot == nil {
		slot = r.move.feed.TryGet()
	}
	stands, goesOn := make(chan struct{}), make(chan struct{})
	n := int64(r.lay.fetch.Tasks[0].Src) + int64(r.lay.fetch.Tasks[0].Chunk.Stored)
	err := r.move.feed.Submit(slot, n, r.lay.fetch.Tasks[:1], func(int, error) { close(stands); <-goesOn })
	if err != nil {
		t.Fatal(err)
	}
	<-stands
	if err := r.DecodePiece(0, 0); err != nil {
		t.Fatal(err)
	}
	for until := time.Now().Add(time.Minute); r.job.Bytes.Load() == 0; time.Sleep(time.Millisecond) {
		if time.Now().After(until) {
			t.Error("no reader counted the piece")
			break
		}
	}
	r.job.Cancel()
	close(goesOn)
	end(errs.ErrCancelled)
}

// After the job has failed, a reader that calls moveOnce runs no further step.
func TestNoStepAfterFailure(t *testing.T) {
	r, end := startOnFake(t, 4<<20)
	r.prog.mu.Lock()
	r.busy.Add(1) // keeps the queues open
	r.prog.mu.Unlock()
	r.job.Cancel()
	r.move.running.Wait()
	r.sums.arrivals <- 0
	if r.move.moveOnce() || len(r.sums.arrivals) != 1 {
		t.Error("a share was summed after the job failed")
	}
	r.busy.Done()
	end(errs.ErrCancelled)
}

// After a panic in a step of moveOnce, the job waits for every slot and ends, and nothing leaks.
func TestPanicsWhileMoving(t *testing.T) {
	for _, panics := range map[string]func(r *Relay, slot *queue.Slot, done func(int, error)) error{
		"a sum": func(r *Relay, slot *queue.Slot, _ func(int, error)) error {
			r.move.feed.Put(slot)
			r.sums.arrivals <- -1
			return nil
		},
		"more than the slot": func(r *Relay, slot *queue.Slot, done func(int, error)) error {
			return r.move.feed.Submit(slot, 1<<40, r.lay.fetch.Tasks[:1], done)
		},
		"done": func(r *Relay, slot *queue.Slot, _ func(int, error)) error {
			n := int64(r.lay.fetch.Tasks[0].Src) + int64(r.lay.fetch.Tasks[0].Chunk.Stored)
			return r.move.feed.Submit(slot, n, r.lay.fetch.Tasks[:1], func(int, error) { panic("planted") })
		},
	} {
		r, end := startOnFake(t, 4<<20)
		slot := r.move.feed.TryGet()
		if slot == nil {
			t.Fatal("expected a free slot")
		}
		if err := panics(r, slot, func(int, error) {}); err != nil {
			t.Fatal(err)
		}
		end(errs.ErrEngine)
		spawntest.Heal()
	}
}

// AwaitOwnShare returns after its timeout while the queues are being made. A job that is cancelled
// in this state ends when the queues have been made.
func TestAwaitWhileQueuesAreMade(t *testing.T) {
	end := cuda.Fake(64 << 20)
	m := plain(t, []int64{1 << 20})
	gpu, err := cuda.Open(0)
	if err != nil {
		t.Fatal(err)
	}
	ring, err := gpu.Alloc([]int64{2 << 20})
	if err != nil {
		t.Fatal(err)
	}
	spec := &Spec{Tensors: []int64{0}, Ring: []uint64{uint64(uintptr(ring[0].Ptr))}, Size: 2 << 20, Ranks: 1}
	spec.Device = "cuda:0"
	makeNoMore := queue.FakeMaking(gpu.Pool)
	r, err := Start(m, spec)
	if err != nil {
		t.Fatal(err)
	}
	if landed, err := r.AwaitOwnShare(0, 20*time.Millisecond); landed || err != nil {
		t.Error(landed, err)
	}
	r.job.Cancel()
	makeNoMore()
	if _, err := r.job.Wait(time.Minute); !errors.Is(err, errs.ErrCancelled) {
		t.Error(err)
	}
	if _, err := r.AwaitOwnShare(0, time.Minute); !errors.Is(err, errs.ErrCancelled) {
		t.Error(err)
	}
	ring[0].Release()
	if left := end(); left != "" {
		t.Errorf("leaked: %s", left)
	}
}
