//go:build owfake

package relay_test

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/overwire/overwire/gosrc/device/cuda"
	"github.com/overwire/overwire/gosrc/device/cuda/cudatest"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/load"
	"github.com/overwire/overwire/gosrc/load/loadtest"
	"github.com/overwire/overwire/gosrc/peers"
	"github.com/overwire/overwire/gosrc/relay"
	"github.com/overwire/overwire/gosrc/save"
)

// If any driver call fails during a group load, the load ends with a typed error and nothing leaks.
func TestRelayEveryCallFails(t *testing.T) {
	_, m, _ := loadtest.WriteModel(t, save.Spec{Compress: true, ChunkBytes: 64 << 10}, "tied", 1<<20)
	travel := filled(m)
	reqs := asked(m, travel, 0)
	sizes := make([]int64, len(reqs))
	for i, b := range sliced(t, m, reqs) {
		sizes[i] = int64(len(b))
	}
	step := int64(7)
	if testing.Short() {
		step = 13
	}
	for _, sticky := range []bool{false, true} {
		failed, moving := 0, 0
		for nth := int64(1); ; nth += step {
			end := cuda.Fake(512 << 20)
			got, ring := memoryOn(t, "cuda:0", sizes), memoryOn(t, "cuda:0", []int64{alone, alone})
			before := cudatest.CountCalls()
			cudatest.FailCall(nth, 999, sticky)
			r, err := begun(m, specOf(travel, ring, "cuda:0", 0, 1, alone), requests(reqs, got))
			if err == nil {
				err = passed(r)
			}
			calls := cudatest.CountCalls() - before
			got.free()
			ring.free()
			what := fmt.Sprintf("call %d fails, sticky %v: %v", nth, sticky, err)
			if left := end(); left != "" {
				t.Fatalf("%s; leaked: %s", what, left)
			}
			if err != nil {
				failed++
				var at *errs.At
				if !errors.Is(err, errs.ErrDevice) || !errors.As(err, &at) || at.Source == "" ||
					!loadtest.DriverCall.MatchString(err.Error()) {
					t.Fatal(what)
				}
				if at.Tensor != "" {
					moving++
				}
			}
			if calls < nth {
				break
			}
		}
		t.Logf("sticky %v: %d relays failed, %d of them with the name of a tensor", sticky, failed, moving)
		if failed < 120/int(step) || moving == 0 {
			t.Error("too few relays failed")
		}
	}
	loadtest.CheckQuiet(t)
}

// The context, kernels, slots and streams of a group's first load are made while the headers are read. A group load
// that maps memory then makes its handle and streams before the first byte is copied, compiles nothing, and pins only
// a small queue's tables.
func TestRelayPrepared(t *testing.T) {
	end := cuda.Fake(512 << 20)
	cudatest.TakeHistory()
	load.Prepare("cuda:0", true)
	path, _, _ := loadtest.WriteModel(t, save.Spec{Compress: true, ChunkBytes: 64 << 10}, "", 1<<20)
	m := loadtest.OpenModel(t, path)
	load.AwaitPreparations()
	before := cudatest.TakeHistory()
	for _, call := range []string{"ctx_retain", "module_load", "host_register", "stream_create", "mem_alloc"} {
		if !slices.Contains(before, call) {
			t.Errorf("%s is not called while the headers are read", call)
		}
	}
	travel := filled(m)
	reqs := asked(m, travel, 0)
	sizes := make([]int64, len(reqs))
	for i, b := range sliced(t, m, reqs) {
		sizes[i] = int64(len(b))
	}
	got := memoryOn(t, "cuda:0", sizes)
	cudatest.TakeHistory()
	spec := specOf(travel, memory{}, "cuda:0", 0, 1, alone)
	spec.Mapped, spec.Buffers, spec.Stages = true, 2, 2
	r, err := relay.Start(m, spec)
	if err != nil {
		t.Fatal(err)
	}
	offer, err := r.Offer()
	if err == nil {
		err = r.Join([]peers.Offer{offer})
	}
	if err == nil {
		err = r.Aim(requests(reqs, got))
	}
	if err == nil {
		_, err = r.Job().Wait(time.Minute)
	}
	if err != nil {
		t.Fatal(err)
	}
	rep, is := r.Job().Value().(relay.Report)
	if !is || rep.Driver <= 0 || rep.Flight <= 0 || rep.Flight > rep.Stages.RingBytes {
		t.Errorf("the report has %v s of driver time and %d bytes in flight", rep.Driver, rep.Flight)
	}
	calls, pins := cudatest.TakeHistory(), 0
	first := slices.Index(calls, "copy_in")
	for i, call := range calls {
		switch call {
		case "ctx_retain", "module_load":
			t.Errorf("call %d of the relay is %s", i, call)
		case "host_register":
			pins++
		}
		if made := call == "ipc_get" || call == "host_register" || call == "stream_create"; made && i > first {
			t.Errorf("call %d of the relay is %s, after the first bytes, at %d", i, call, first)
		}
	}
	if first < 0 || pins > 1 || !slices.Contains(calls[:first], "ipc_get") {
		t.Errorf("the first copy is call %d, with %d pins: %v", first, pins, calls)
	}
	got.free()
	if left := end(); left != "" {
		t.Errorf("leaked: %s", left)
	}
}

// While two groups of slots wait for the GPU, no third group is submitted. Slots that readers fill in the meantime are
// submitted together.
func TestSlotsAreSubmittedInGroups(t *testing.T) {
	end := cuda.Fake(512 << 20)
	path, _, _ := loadtest.WriteModel(t, save.Spec{}, "", 24<<20)
	m := loadtest.OpenModel(t, path)
	travel := filled(m)
	reqs := asked(m, travel, 0)
	sizes := make([]int64, len(reqs))
	for i, b := range sliced(t, m, reqs) {
		sizes[i] = int64(len(b))
	}
	got := memoryOn(t, "cuda:0", sizes)
	gpu, err := cuda.Open(0)
	if err != nil {
		t.Fatal(err)
	}
	stream, err := gpu.NewStream()
	if err != nil {
		t.Fatal(err)
	}
	letGo := cudatest.OccupyStream(stream)
	cudatest.TakeHistory()
	spec := specOf(travel, memory{}, "cuda:0", 0, 1, 8<<20)
	spec.Mapped, spec.Buffers, spec.Stages, spec.Stream, spec.Threads = true, 4, 2, uint64(stream), 8
	r, err := relay.Start(m, spec)
	if err != nil {
		t.Fatal(err)
	}
	copies, records := 0, 0
	for until := time.Now().Add(300 * time.Millisecond); time.Now().Before(until) || copies == 0; {
		time.Sleep(time.Millisecond)
		for _, call := range cudatest.TakeHistory() {
			switch call {
			case "copy_in":
				copies++
			case "event_record": // one for that stream and one per group
				records++
			}
		}
	}
	if records > 3 {
		t.Errorf("%d groups of slots were submitted, with %d slots", records-1, copies)
	}
	letGo()
	offer, err := r.Offer()
	if err == nil {
		err = r.Join([]peers.Offer{offer})
	}
	if err == nil {
		err = r.Aim(requests(reqs, got))
	}
	if err == nil {
		_, err = r.Job().Wait(time.Minute)
	}
	if err != nil {
		t.Fatal(err)
	}
	gpu.SyncAndFreeStream(stream)
	got.free()
	if left := end(); left != "" {
		t.Errorf("leaked: %s", left)
	}
}

// passed runs a group load of one rank and returns its error.
func passed(r *relay.Relay) error {
	shares, err := r.ShareSizes()
	for k := range shares { // no shares after an error, which the job reports
		if landed, err := r.AwaitOwnShare(k, time.Minute); !landed || err != nil {
			break
		}
		if err := r.DecodePiece(k, 1); err != nil {
			break
		}
	}
	if done, e := r.Job().Wait(time.Minute); done {
		return e
	}
	return cmp.Or(err, errors.New("the job does not end"))
}
