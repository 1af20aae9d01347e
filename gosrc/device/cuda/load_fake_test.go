//go:build cgo && owfake

package cuda_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/overwire/overwire/gosrc/device/cuda"
	"github.com/overwire/overwire/gosrc/fault"
	"github.com/overwire/overwire/gosrc/load"
	"github.com/overwire/overwire/gosrc/plan"
	"github.com/overwire/overwire/gosrc/save"
)

// engine gives the test a driver and holds it to leaving nothing behind.
func engine(t *testing.T) {
	t.Helper()
	end := cuda.Fake(512 << 20)
	t.Cleanup(func() {
		if left := end(); left != "" {
			t.Error(left)
		}
		quiet(t)
	})
}

// Whichever call of the driver fails during a load, whether or not the device
// recovers, the load goes on or ends with a typed error that names the file and
// the call, and the tensor if one was on its way; nothing is left behind.
func TestLoadEveryCallFails(t *testing.T) {
	path, m, want := written(t, save.Spec{Compress: true, ChunkBytes: 64 << 10}, "hostile", 0)
	// A few tensors of each way to land: coded, raw, in part, without bytes.
	var reqs []load.Request
	for i := range m.Index().Tensors {
		x := &m.Index().Tensors[i]
		q := load.Request{Tensor: int64(i), Hi0: plan.Whole, Hi1: plan.Whole}
		switch {
		case strings.HasPrefix(x.Name, "hostile.BF16.") && x.Bytes < 20_000, strings.HasPrefix(x.Name, "hostile.F8_E4M3.r"):
		case x.Name == "hostile.F32.random":
			q.Lo1, q.Hi1 = 2, 5
		default:
			continue
		}
		reqs = append(reqs, q)
	}
	t.Logf("%d of %d tensors", len(reqs), len(want))
	step := int64(1)
	if testing.Short() {
		step = 7
	}
	for _, c := range []struct {
		code   int
		sticky bool
		class  error
	}{{999, false, fault.ErrDevice}, {999, true, fault.ErrDevice}, {2, false, fault.ErrMemory}} {
		failed, moving := 0, 0
		for nth := int64(1); ; nth += step {
			end := cuda.Fake(512 << 20)
			cuda.FakeFail(nth, c.code, c.sticky)
			l, err := m.Start(reqs, load.Options{Device: "cuda:1", Stream: 1})
			if err == nil {
				err = finish(t, l)
				l.Close()
			}
			calls := cuda.FakeCalls()
			what := fmt.Sprintf("call %d fails with %d: %v", nth, c.code, err)
			if left := end(); left != "" {
				t.Fatalf("%s; left: %s", what, left)
			}
			if err != nil {
				failed++
				var at *fault.At
				if !errors.Is(err, c.class) || !errors.As(err, &at) || at.Source != path {
					t.Fatal(what)
				}
				if at.Tensor != "" {
					moving++
				}
				if (at.Verb == "copy" || at.Verb == "decode") != (at.Tensor != "") {
					t.Fatalf("%s: which tensor?", what)
				}
				if !strings.Contains(err.Error(), "cu") {
					t.Fatalf("%s: which call?", what)
				}
			}
			if calls < nth {
				break
			}
		}
		t.Logf("code %d, sticky %v: %d loads failed, %d of them on the way of a tensor", c.code, c.sticky, failed, moving)
		if failed < 100/int(step) || moving == 0 {
			t.Error("too few loads were seen to fail")
		}
	}
	quiet(t)
	engine(t)
	whole(t, m, want, 1)
}
