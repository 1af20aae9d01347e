//go:build owfake

package cuda

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"testing"
	"time"
	"unsafe"

	"github.com/overwire/overwire/gosrc/codec/x16"
	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/device/cuda/cudatest"
	"github.com/overwire/overwire/gosrc/device/cuda/memory"
	"github.com/overwire/overwire/gosrc/device/cuda/queue"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/tensor"
)

// ordinal is the device that begun opens. Device 1 is coherent.
var ordinal int

// begun opens a device of the fake driver, and fails the test if it leaks or breaks a rule of the driver.
func begun(t testing.TB) *Device {
	t.Helper()
	before := cudatest.ReadState()
	if before.HasLeaks() {
		t.Fatalf("leaked by another test: %+v", before)
	}
	useFake(256 << 20)
	firstRing = memory.HugePage
	d, err := Open(ordinal)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := closeDevice(d); err != nil {
			t.Error(err)
		}
		if s := cudatest.ReadState(); s.HasLeaks() || s.Broken > 0 {
			t.Errorf("leaks or broken rules: %+v", s)
		}
	})
	return d
}

// faked returns a queue on a separate fake device. end closes both and describes leaks.
func faked(t *testing.T, slots int, slotBytes int64) (d *Device, q *queue.Queue, end func() string) {
	t.Helper()
	ended := Fake(64 << 20)
	d, err := Open(0)
	if err != nil {
		t.Fatal(err)
	}
	if q, err = d.Queue(slots, slotBytes); err != nil {
		t.Fatal(err)
	}
	return d, q, func() string {
		q.Close()
		return ended()
	}
}

// In a forked child, no call reaches the driver.
func TestFork(t *testing.T) {
	d := begun(t)
	if !cudatest.IsChildRefused(d.Handle()) {
		t.Error("a forked child used the driver")
	}
}

// On every stream, the load's bytes are written after the work that the consumer had queued on the memory.
func TestFollowStream(t *testing.T) {
	d, l := open(t, 2, 1<<20)
	r := random(t)
	var p piece
	p.coded(weights(r, x16.BF16, 8000), x16.BF16)
	p.raw(weights(r, x16.BF16, 80_000))
	for range 8 { // uses every compute stream
		mem, err := d.Alloc([]int64{8000, 80_000})
		if err != nil {
			t.Fatal(err)
		}
		for i, m := range mem {
			cudatest.QueueFill(m.Ptr, m.Bytes, 0xee, 1)
			p.jobs[i].Dst = m.Ptr
		}
		if err := l.FollowStream(1); err != nil {
			t.Fatal(err)
		}
		s, err := l.Get(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		copy(s.Memory(), p.bytes)
		if err := l.Submit(s, int64(len(p.bytes)), p.jobs, func(_ int, err error) {
			if err != nil {
				t.Error(err)
			}
		}); err != nil {
			t.Fatal(err)
		}
		if err := l.Drain(t.Context()); err != nil {
			t.Fatal(err)
		}
		for i, m := range mem {
			got := make([]byte, m.Bytes)
			if err := d.Read(got, m); err != nil || !bytes.Equal(got, p.want[i]) {
				t.Errorf("job %d: %v, or the fill ran last", i, err)
			}
			m.Release()
		}
	}
}

// life calls every function that a load uses on a device. The fake driver reports leaks.
func life(p *piece, index int) error {
	d, err := Open(index)
	if err != nil {
		return err
	}
	first := func(e error) {
		if err == nil {
			err = e
		}
	}
	sizes := make([]int64, len(p.jobs))
	for i := range sizes {
		sizes[i] = size(&p.jobs[i]) + int64(i%2)
	}
	mem, e := d.Alloc(sizes)
	first(e)
	l, e := d.Queue(2, 64<<10)
	first(e)
	if err == nil {
		first(l.FollowStream(1))
		first(l.TraceTimes(func(string, int, time.Time, time.Time, int64) {}))
		for range 3 {
			s, _ := l.Get(context.Background())
			copy(s.Memory(), p.bytes)
			for i := range p.jobs {
				p.jobs[i].Dst = unsafe.Add(mem[i].Ptr, i%2)
			}
			ch := make(chan error, len(p.jobs))
			if e := l.Submit(s, int64(len(p.bytes)), p.jobs, func(_ int, err error) { ch <- err }); e != nil {
				first(e)
				continue
			}
			for range p.jobs {
				first(<-ch)
			}
		}
		first(l.Drain(context.Background()))
		first(l.TraceTimes(nil))
	}
	if l != nil {
		l.Close()
	}
	for _, m := range mem {
		m.Release()
	}
	first(closeDevice(d))
	return err
}

// If any driver call fails, whether or not the driver recovers, a load ends with an error of the right class and
// nothing leaks.
func TestEveryCallFails(t *testing.T) {
	firstRing = memory.HugePage
	r := rand.New(rand.NewPCG(1, 0))
	var p piece
	p.coded(weights(r, x16.BF16, 6000), x16.BF16)
	p.coded(weights(r, x16.E4M3, 6000), x16.E4M3)
	p.raw(weights(r, x16.BF16, 3000))
	data := weights(r, x16.BF16, 4096)
	p.add(data, tensor.Chunk{Codec: tensor.CodecRaw, Logical: 4096}, &device.View{Row: 64, Row1: 64, Col1: 30}, nil)
	step := int64(1)
	if testing.Short() {
		step = 5
	}
	for _, c := range []struct {
		code   int
		sticky bool
		class  error
		index  int
	}{{999, false, errs.ErrDevice, 0}, {999, true, errs.ErrDevice, 0}, {2, false, errs.ErrMemory, 0},
		{999, false, errs.ErrDevice, 1}, {999, true, errs.ErrDevice, 1}, {2, false, errs.ErrMemory, 1}} {
		failed, swallowed := 0, 0
		for nth := int64(1); ; nth += step {
			useFake(64 << 20)
			cudatest.FailCall(nth, c.code, c.sticky)
			err := life(&p, c.index)
			cudatest.FailCall(0, 0, false)
			s := cudatest.ReadState()
			if s.HasLeaks() || s.Broken > 0 {
				t.Fatalf("call %d fails with %d: %v; leaked: %+v", nth, c.code, err, s)
			}
			if cudatest.CountCalls() < nth {
				break
			}
			switch {
			case err == nil:
				swallowed++
			case !errors.Is(err, c.class):
				t.Fatalf("call %d fails with %d: %v", nth, c.code, err)
			default:
				failed++
			}
		}
		t.Logf("cuda:%d, code %d, sticky %v: %d loads failed, %d did not", c.index, c.code, c.sticky, failed, swallowed)
		if failed*int(step) < 100 {
			t.Error("too few calls failed")
		}
	}
	useFake(64 << 20)
	for index := range 2 {
		if err := life(&p, index); err != nil {
			t.Error(err)
		}
	}
}
