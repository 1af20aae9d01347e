//go:build owfake

package cuda

import (
	"testing"

	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/device/cuda/cudatest"
	"github.com/overwire/overwire/gosrc/device/cuda/queue"
	"github.com/overwire/overwire/gosrc/tensor"
)

// Loose slots that wait for the same event are submitted together, with one event and no kernel. Slots that wait for
// different events are not.
func TestSubmitAllShares(t *testing.T) {
	r := random(t)
	d, q := open(t, queue.GroupSlots+6, 192<<10)
	events := twoEvents(q)
	for _, c := range []struct{ slots, others, groups int }{{1, 0, 1}, {queue.GroupSlots, 0, 1},
		{queue.GroupSlots + 1, 0, 2},
		{3, 3, 2}} {
		var pieces []queue.FilledSlot
		for i := range c.slots + c.others {
			k := 0
			if i >= c.slots {
				k = 1
			}
			p, piece := sending(t, d, q, r, alike, events[k])
			defer p.mem.Release()
			pieces = append(pieces, piece)
		}
		cudatest.TakeHistory()
		q.SubmitAll(pieces)
		if err := q.Drain(t.Context()); err != nil {
			t.Fatal(err)
		}
		calls := map[string]int{}
		for _, call := range cudatest.TakeHistory() {
			calls[call]++
		}
		if calls["copy_in"] != len(pieces) || calls["launch"] != 0 || calls["event_record"] != c.groups {
			t.Errorf("%+v: %v", c, calls)
		}
	}
}

// If any driver call fails, every task gets the error once or is loaded, and all slots are freed.
func TestSubmitAllFails(t *testing.T) {
	r := random(t)
	for nth, reached := int64(1), true; reached; nth++ {
		d, q, end := faked(t, 4, 192<<10)
		var all []*parcel
		var pieces []queue.FilledSlot
		for i := range 4 {
			p, piece := sending(t, d, q, r, []int{alike, alike, scattered, encoded}[i], &queue.Event{})
			all, pieces = append(all, p), append(pieces, piece)
		}
		before := cudatest.CountCalls()
		cudatest.FailCall(nth, 700, false)
		q.SubmitAll(pieces)
		failed := q.Drain(t.Context()) != nil
		reached = cudatest.CountCalls()-before >= nth
		cudatest.FailCall(0, 0, false)
		some := false
		for n, p := range all {
			for i, err := range p.failures {
				if p.calls[i] != 1 {
					t.Errorf("call %d: piece %d, task %d: %d calls of done", nth, n, i, p.calls[i])
				}
				some = some || err != nil && i != p.bad
			}
			p.mem.Release()
		}
		if failed && !some {
			t.Errorf("call %d failed, but no task got the error", nth)
		}
		if left := end(); left != "" {
			t.Errorf("call %d: leaked: %s", nth, left)
		}
	}
}

// After a panic in a submission, for example because a piece is larger than its slot, every slot is freed, and Close
// returns.
func TestSubmitPanics(t *testing.T) {
	for i := range 4 {
		together, tooLarge := i%2 == 1, int64(i/2)
		d, q, end := faked(t, 3, 192<<10)
		mem, err := d.Alloc([]int64{4096})
		if err != nil {
			t.Fatal(err)
		}
		const n = tensor.MaxChunkBytes + 1<<20 // larger than any chunk in a file, so the checksum tables are too short
		tasks := []device.DecodeTask{{Dst: mem[0].Ptr, Chunk: tensor.Chunk{Stored: n, Logical: n}}}
		var pieces []queue.FilledSlot
		for range 2 {
			s := q.TryGet()
			s.ViewDevice(uintptr(mem[0].Ptr), n)
			s.SumOnly()
			pieces = append(pieces, queue.FilledSlot{Slot: s, N: n + tooLarge*int64(len(pieces)), Tasks: tasks,
				Done: func(int, error) {}})
		}
		func() {
			defer func() {
				if recover() == nil {
					t.Error("the submission did not panic")
				}
			}()
			if together {
				q.SubmitAll(pieces)
				return
			}
			q.Put(pieces[0].Slot)
			_ = q.Submit(pieces[1].Slot, pieces[1].N, tasks, pieces[1].Done)
		}()
		if free := q.CountFree(); free != 3 {
			t.Fatalf("together %v, too large %v: %d slots of 3 are free", together, tooLarge > 0, free)
		}
		mem[0].Release()
		if left := end(); left != "" {
			t.Errorf("leaked: %s", left)
		}
	}
}
