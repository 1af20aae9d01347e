//go:build owfake

package load_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/overwire/overwire/gosrc/device/cuda"
	"github.com/overwire/overwire/gosrc/device/cuda/cudatest"
	"github.com/overwire/overwire/gosrc/device/cuda/queue"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/load"
	"github.com/overwire/overwire/gosrc/load/loadtest"
	"github.com/overwire/overwire/gosrc/plan"
	"github.com/overwire/overwire/gosrc/save"
)

// Plain and compressed tensors land correctly in memory that is allocated while the load runs. They also land correctly
// in destinations that the caller binds in any order, even while the queue is being made. Start does not wait for the
// queue.
func TestLateDestinations(t *testing.T) {
	for _, spec := range []save.Spec{{Compress: true, ChunkBytes: 64 << 10}, {}} {
		for _, making := range []bool{false, true} {
			t.Run(fmt.Sprintf("compress %v, while a queue is made %v", spec.Compress, making), func(t *testing.T) {
				lateDestinations(t, spec, making)
			})
		}
	}
}

func lateDestinations(t *testing.T, spec save.Spec, making bool) {
	_, m, want := loadtest.WriteModel(t, spec, "", 4<<20)
	loadtest.UseEngine(t)
	defer load.FakeAllotment(64<<10, 0)()
	for range 3 {
		loadtest.LoadAll(t, m, want, 0)
	}
	d, err := cuda.Open(0)
	if err != nil {
		t.Fatal(err)
	}
	tensors := m.Index().Tensors
	reqs := make([]load.Request, len(tensors))
	var mine []int
	var sizes []int64
	for i := range tensors {
		reqs[i] = load.Request{Tensor: int64(i), Hi0: plan.Whole, Hi1: plan.Whole}
		if i%2 == 0 && tensors[i].Bytes > 0 {
			reqs[i].Dest = load.BindLater
			mine, sizes = append(mine, i), append(sizes, tensors[i].Bytes)
		}
	}
	own, err := d.Alloc(sizes)
	if err != nil {
		t.Fatal(err)
	}
	end := func() {}
	if making {
		end = queue.FakeMaking(d.Pool)
	}
	l, err := m.Start(reqs, load.Options{Device: "cuda:0", Stream: 1})
	if err != nil {
		t.Fatal(err)
	}
	if making {
		time.Sleep(50 * time.Millisecond) // the job is waiting for its queue by then
	}
	if err := l.Bind([]int64{int64(mine[0]) + 1, 4096}, 0); !errors.Is(err, errs.ErrArgument) {
		t.Errorf("a destination for a request that does not wait for one: %v", err)
	}
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	for _, k := range rand.New(rand.NewPCG(seed, 0)).Perm(len(mine)) {
		if err := l.Bind([]int64{int64(mine[k]), int64(uintptr(own[k].Ptr))}, uint64(k%2)); err != nil {
			t.Fatal(err)
		}
	}
	end()
	if err := loadtest.Finish(t, l); err != nil {
		t.Fatal(err)
	}
	if err := l.Bind([]int64{int64(mine[0]), 4096}, 1); err != nil {
		t.Errorf("after the end: %v", err)
	}
	for k, i := range mine {
		got := make([]byte, sizes[k])
		if err := d.Read(got, own[k]); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got, want[tensors[i].Name].Data) {
			t.Errorf("%s differs at its late destination", tensors[i].Name)
		}
		own[k].Release()
	}
	for i := range tensors {
		if reqs[i].Dest == 0 && !bytes.Equal(loadtest.ExportBytes(t, d, l, i), want[tensors[i].Name].Data) {
			t.Errorf("%s differs", tensors[i].Name)
		}
	}
	l.Close()
}

// If its destinations are never bound, a load waits until it is cancelled.
func TestDestinationsNeverSettled(t *testing.T) {
	_, m, _ := loadtest.WriteModel(t, save.Spec{Compress: true}, "", 4<<20)
	loadtest.UseEngine(t)
	reqs := make([]load.Request, len(m.Index().Tensors))
	for i := range reqs {
		reqs[i] = load.Request{Tensor: int64(i), Dest: load.BindLater, Hi0: plan.Whole, Hi1: plan.Whole}
	}
	if _, err := m.Start(reqs, load.Options{}); !errors.Is(err, errs.ErrArgument) {
		t.Errorf("late destinations on the host: %v", err)
	}
	l, err := m.Start(reqs, load.Options{Device: "cuda:0"})
	if err != nil {
		t.Fatal(err)
	}
	if done, err := l.Job().Wait(20 * time.Millisecond); done {
		t.Errorf("the load ended: %v", err)
	}
	l.Close()
	if err := loadtest.Finish(t, l); !errors.Is(err, context.Canceled) && !errors.Is(err, errs.ErrCancelled) {
		t.Errorf("cancelled: %v", err)
	}
}

// If a driver call fails while memory is allocated during the load, the load ends with its error, and nothing leaks.
func TestLateMemoryFails(t *testing.T) {
	path, m, _ := loadtest.WriteModel(t, save.Spec{Compress: true, ChunkBytes: 64 << 10}, "", 2<<20)
	m.Close()
	defer load.FakeAllotment(128<<10, 0)()
	step := int64(1)
	if testing.Short() {
		step = 5
	}
	failed := 0
	for nth := int64(1); ; nth += step {
		end := cuda.Fake(64 << 20)
		cudatest.FailCall(nth, 2, false)
		m, err := load.Open(t.Context(), load.Spec{URIs: []string{path}})
		if err != nil {
			t.Fatal(err)
		}
		l, err := m.Start(nil, load.Options{Device: "cuda:0"})
		if err == nil {
			err = loadtest.Finish(t, l)
			l.Close()
		}
		m.Close()
		calls := cudatest.CountCalls()
		if left := end(); left != "" {
			t.Fatalf("call %d fails: %v; left: %s", nth, err, left)
		}
		if err != nil {
			failed++
			var at *errs.At
			if !errors.Is(err, errs.ErrMemory) || !errors.As(err, &at) || at.Source != path {
				t.Fatalf("call %d fails: %v", nth, err)
			}
		}
		if calls < nth {
			break
		}
	}
	if failed == 0 {
		t.Error("no load failed")
	}
	loadtest.CheckQuiet(t)
}

// A prepared queue is used by the next load.
func TestPrepare(t *testing.T) {
	loadtest.UseEngine(t)
	d, err := cuda.Open(0)
	if err != nil {
		t.Fatal(err)
	}
	d.PrepareQueue(0, 0)
	before, _, _ := d.MemoryInfo()
	d.PrepareQueue(0, 0)
	l, err := d.Queue(0, 0)
	if err != nil {
		t.Fatal(err)
	}
	if now, _, _ := d.MemoryInfo(); now != before {
		t.Errorf("the queue took %d more bytes, although one was prepared", before-now)
	}
	l.Close()
	load.Prepare("cuda:0", false)
	load.Prepare("cuda:99", true) // the load reports this error
	load.Prepare("nothing", false)
	load.AwaitPreparations()
}
