package relay

import (
	"errors"
	"testing"
	"time"
	"unsafe"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/spawn/spawntest"
	"github.com/overwire/overwire/gosrc/job"
	"github.com/overwire/overwire/gosrc/peers"
	"github.com/overwire/overwire/gosrc/plan"
)

// callAll makes all calls that wait for the layout, and returns their errors.
func callAll(r *Relay) []error {
	_, shares := r.ShareSizes()
	_, await := r.AwaitOwnShare(0, time.Minute)
	return []error{r.Aim(nil), shares, await, r.DecodePiece(0, 0)}
}

// If the layout fails or panics, all calls that wait for it return that error, even very early ones, and nothing leaks.
func TestLayoutFails(t *testing.T) {
	ring := make([]byte, 4<<20)
	m := plain(t, []int64{1 << 20})
	defer spawntest.Heal()
	for _, want := range []error{errs.ErrArgument, errs.ErrEngine} {
		s := &Spec{Tensors: []int64{9}, Ring: []uint64{uint64(uintptr(unsafe.Pointer(&ring[0])))}, Size: 4 << 20,
			Ranks: 1}
		if errors.Is(want, errs.ErrEngine) {
			t := &m.Index().Tensors[0]
			s.Tensors[0], t.First, t.Count = 0, 1<<20, 1 // makes the layout panic
		}
		r, err := Start(m, s)
		if err != nil {
			t.Fatal(err)
		}
		for hasEnded := false; !hasEnded; {
			r.prog.mu.Lock()
			for n := 0; n < 1000 && !hasEnded; n++ {
				hasEnded = job.IsClosed(r.layoutEnd)
			}
			if hasEnded && r.prog.err == nil {
				t.Error("the layout ended before its error was set")
			}
			r.prog.mu.Unlock()
		}
		for i, err := range callAll(r) {
			if !errors.Is(err, want) {
				t.Errorf("call %d: %v, want %v", i, err, want)
			}
		}
		if done, err := r.Job().Wait(time.Minute); !done || !errors.Is(err, want) {
			t.Error(done, err)
		}
	}
	if left := spawntest.Left(); len(left) != 0 {
		t.Errorf("still running: %v", left)
	}
}

// DecodePiece refuses a piece before this rank has read its share.
func TestDecodeBeforeShare(t *testing.T) {
	const mib = 1 << 20
	m, release := openHeld(t, plain(t, []int64{4 * mib}).Index().Sources[0].URI)
	ring, got := make([]byte, 8*mib), make([]byte, 4*mib)
	r, err := Start(m, &Spec{Tensors: []int64{0}, Ring: []uint64{uint64(uintptr(unsafe.Pointer(&ring[0])))},
		Size: 8 * mib, Ranks: 1})
	if err == nil {
		err = r.Aim([]plan.Request{{Dest: uintptr(unsafe.Pointer(&got[0])), Hi0: plan.Whole, Hi1: plan.Whole}})
	}
	if err != nil {
		t.Fatal(err)
	}
	if err := r.DecodePiece(0, 0); !errors.Is(err, errs.ErrArgument) {
		t.Errorf("DecodePiece before the share was read: %v", err)
	}
	release()
	if landed, err := r.AwaitOwnShare(0, time.Minute); !landed || err != nil {
		t.Fatal(landed, err)
	}
	if err := errors.Join(r.DecodePiece(0, 0), func() error { _, err := r.Job().Wait(-1); return err }()); err != nil {
		t.Error(err)
	}
}

// Aim refuses a request for bytes that only another rank needs, because they are not sent.
func TestAimAtBytesOfAnotherRank(t *testing.T) {
	m := plain(t, []int64{1000}, []int64{1000})
	var needs []plan.Request
	for rank := range 2 { // each rank needs one tensor
		needs = append(needs, plan.Request{Tensor: int64(rank), Dest: uintptr(rank), Hi0: plan.Whole, Hi1: plan.Whole})
	}
	var got [1000]byte
	for rank := range 2 {
		r, err := Start(m, &Spec{Tensors: []int64{0, 1}, Size: 4 << 20, Ranks: 2, Rank: rank, Mapped: true, Buffers: 1,
			Needs: needs})
		if err != nil {
			t.Fatal(err)
		}
		for at := range 2 {
			err := r.Aim([]plan.Request{{Tensor: int64(at), Dest: uintptr(unsafe.Pointer(&got[0])), Hi0: plan.Whole,
				Hi1: plan.Whole}})
			if at != rank != errors.Is(err, errs.ErrArgument) {
				t.Errorf("rank %d, tensor %d: %v", rank, at, err)
			}
		}
		r.Job().Cancel()
		_, _ = r.Job().Wait(-1)
	}
}

// If Join fails because an offer's process does not exist, Unmapped is set. It is not set if the group load failed
// earlier with a different ErrNotSupported.
func TestUnmappedIsSetByJoin(t *testing.T) {
	m := plain(t, []int64{7})
	for _, earlier := range []bool{false, true} {
		r, err := Start(m, &Spec{Size: 2 * 4096, Ranks: 2, Rank: 1, Mapped: true, Buffers: 1})
		if err != nil {
			t.Fatal(err)
		}
		if earlier {
			r.prog.failWith(errs.New(errs.ErrNotSupported, "something else"), true)
		}
		own, err := r.Offer()
		if err != nil {
			t.Fatal(err)
		}
		err = r.Join([]peers.Offer{{Process: 1 << 30, Flags: 3, File: 3, Bytes: own.Bytes}, own})
		_, _ = r.Job().Wait(-1)
		rep, is := r.Job().Value().(Report)
		if !errors.Is(err, errs.ErrNotSupported) || !is || rep.Unmapped == earlier {
			t.Errorf("failed before %v: %v, %+v", earlier, err, rep)
		}
	}
}
