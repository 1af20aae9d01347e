package cuda

import (
	"bytes"
	"context"
	"errors"
	"sync"
	"testing"

	"github.com/overwire/overwire/gosrc/codec/x16"
	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/device/cuda/queue"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/tensor"
)

// Many workers share a queue. Everything is loaded, and every slot is freed.
func TestWorkers(t *testing.T) {
	r := random(t)
	d, l := open(t, 3, 256<<10)
	var p piece
	for tr := uint8(x16.BF16); tr <= x16.Bytes; tr++ {
		p.coded(weights(r, tr, 9000), tr)
	}
	p.raw(weights(r, x16.Bytes, 70_000))
	var wg sync.WaitGroup
	for w := range 5 {
		wg.Go(func() {
			for range 4 {
				mine := piece{bytes: p.bytes, jobs: append([]device.DecodeTask(nil), p.jobs...)}
				sizes := make([]int64, len(mine.jobs))
				for i := range sizes {
					sizes[i] = size(&mine.jobs[i])
				}
				mem, err := d.Alloc(sizes)
				if err != nil {
					t.Error(err)
					return
				}
				for i := range mem {
					mine.jobs[i].Dst = mem[i].Ptr
				}
				s, err := l.Get(t.Context())
				if err != nil {
					t.Error(err)
					return
				}
				copy(s.Memory(), mine.bytes)
				landed := make(chan error, len(mine.jobs))
				if err := l.Submit(s, int64(len(mine.bytes)), mine.jobs, func(_ int, err error) {
					landed <- err
				}); err != nil {
					t.Error(err)
					return
				}
				for range mine.jobs {
					if err := <-landed; err != nil {
						t.Error(err)
					}
				}
				for i, m := range mem {
					got := make([]byte, m.Bytes)
					if err := d.Read(got, m); err != nil || !bytes.Equal(got, p.want[i]) {
						t.Errorf("worker %d, job %d: error %v, or wrong bytes", w, i, err)
					}
					m.Release()
				}
			}
		})
	}
	wg.Wait()
}

// One queue is reused for loads that divide its memory differently. Its slots never overlap.
func TestQueueIsReshaped(t *testing.T) {
	r := random(t)
	d := begun(t)
	var p piece
	p.coded(weights(r, x16.BF16, 90_000), x16.BF16)
	p.raw(weights(r, x16.Bytes, 20_000))
	slots, size := queue.DefaultRing()
	fine, fineSize := queue.RemoteRing()
	finest, finestSize := queue.ExchangeRing(11)
	var first *queue.Queue
	for i, cut := range []struct {
		slots int
		size  int64
	}{{fine, fineSize}, {slots, size}, {slots / 2, size}, {slots / 2, 2 * size}, {finest, finestSize}, {fine, fineSize},
		{slots, size}} {
		l, err := d.Queue(cut.slots, cut.size)
		if err != nil {
			t.Fatal(err)
		}
		if i == 0 {
			first = l
		} else if l != first {
			t.Errorf("%d slots of %d bytes: the queue was not reused", cut.slots, cut.size)
		}
		if l.CountFree() != cut.slots {
			t.Errorf("%d slots, want %d", l.CountFree(), cut.slots)
		}
		all := make([]device.Slot, cut.slots)
		for k := range all {
			if all[k], err = l.Get(t.Context()); err != nil {
				t.Fatal(err)
			}
			for j := range all[k].Memory() {
				all[k].Memory()[j] = byte(k)
			}
		}
		for k, s := range all {
			if int64(len(s.Memory())) < cut.size || s.Memory()[0] != byte(k) ||
				s.Memory()[len(s.Memory())-1] != byte(k) {
				t.Errorf("slot %d of %d bytes overlaps another slot", k, len(s.Memory()))
			}
			l.Put(s)
		}
		for range cut.slots + 1 {
			p.run(t, d, l, 0)
		}
		l.Close()
	}
}

// A queue for ranks that exchange shares can be reused for a load from files.
func TestFinestQueueServesFiles(t *testing.T) {
	d := begun(t)
	first, err := d.Queue(queue.ExchangeRing(11))
	if err != nil {
		t.Fatal(err)
	}
	first.Close()
	second, err := d.Queue(queue.DefaultRing())
	if err != nil {
		t.Fatal(err)
	}
	if second != first {
		t.Error("the queue was not reused")
	}
	second.Close()
}

// Get and Drain return when their context is cancelled, and Close waits for the remaining work.
func TestCancel(t *testing.T) {
	d := begun(t)
	l, err := d.Queue(1, 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	s, err := l.Get(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(errs.ErrCancelled)
	if _, err := l.Get(ctx); !errors.Is(err, errs.ErrCancelled) {
		t.Errorf("Get: %v", err)
	}
	mem, err := d.Alloc([]int64{1000})
	if err != nil {
		t.Fatal(err)
	}
	defer mem[0].Release()
	gate, called := make(chan struct{}), false
	job := []device.DecodeTask{{Chunk: tensor.Chunk{Stored: 1000, Logical: 1000}, Dst: mem[0].Ptr}}
	if err := l.Submit(s, 1000, job, func(int, error) { <-gate; called = true }); err != nil {
		t.Fatal(err)
	}
	if err := l.Drain(ctx); !errors.Is(err, errs.ErrCancelled) {
		t.Errorf("Drain: %v", err)
	}
	close(gate)
	l.Close()
	if !called {
		t.Error("Close did not wait")
	}
	again, err := d.Queue(1, 1<<20)
	if err != nil || again != l {
		t.Errorf("the idle queue was not reused: %v", err)
	}
	again.Close()
}
