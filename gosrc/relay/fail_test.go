package relay

import (
	"errors"
	"testing"
	"time"
	"unsafe"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/spawn"
)

// callAll makes the calls that wait for the layout, and returns their errors.
func callAll(r *Relay) []error {
	_, shares := r.ShareSizes()
	_, await := r.AwaitOwnShare(0, time.Minute)
	return []error{r.Aim(nil), shares, await, r.DecodePiece(0, 0)}
}

// Where the layout fails, or panics, all that wait for it get that error, however early they look, and nothing is left.
func TestLayoutFails(t *testing.T) {
	ring := make([]byte, 4<<20)
	m := plain(t, []int64{1 << 20})
	defer spawn.Heal()
	for _, want := range []error{errs.ErrArgument, errs.ErrEngine} {
		s := &Spec{Tensors: []int64{9}, Ring: []uint64{uint64(uintptr(unsafe.Pointer(&ring[0])))}, Size: 4 << 20,
			Ranks: 1}
		if errors.Is(want, errs.ErrEngine) {
			s.Tensors[0], m.Index().Tensors[0].Bytes = 0, -1<<40 // it panics
		}
		r, err := Start(m, s)
		if err != nil {
			t.Fatal(err)
		}
		for hasEnded := false; !hasEnded; {
			r.mu.Lock()
			for n := 0; n < 1000 && !hasEnded; n++ {
				hasEnded = isClosed(r.layoutEnd)
			}
			if hasEnded && r.err == nil {
				t.Error("the layout has ended without its error")
			}
			r.mu.Unlock()
		}
		for i, err := range callAll(r) {
			if !errors.Is(err, want) {
				t.Errorf("call %d: %v, and not %v", i, err, want)
			}
		}
		if done, err := r.Job().Wait(time.Minute); !done || !errors.Is(err, want) {
			t.Error(done, err)
		}
	}
	if left := spawn.Left(); len(left) != 0 {
		t.Errorf("still running: %v", left)
	}
}
