//go:build owfake

package cuda

import (
	"errors"
	"testing"
	"time"
	"unsafe"

	"github.com/overwire/overwire/gosrc/codec/digest"
	"github.com/overwire/overwire/gosrc/codec/x16"
	"github.com/overwire/overwire/gosrc/device/cuda/cudatest"
	"github.com/overwire/overwire/gosrc/device/cuda/driver"
	"github.com/overwire/overwire/gosrc/device/cuda/memory"
	"github.com/overwire/overwire/gosrc/device/cuda/stream"
	"github.com/overwire/overwire/gosrc/errs"
)

// Freeing a resource may make the driver wait for other work, and most calls destroy a graph capture that is in
// progress on any thread. If a call breaks a rule of the fake driver, these tests fail at their end.

// alone stops the reaper, so that the test can run the reaper's steps.
func (d *Device) alone(t *testing.T) {
	t.Cleanup(memory.FakeWithoutReaper(d.Memory)) // runs before the device is closed
}

// dict allocates many small tensors, as a load does.
func dict(t *testing.T, d *Device) (drop func()) {
	t.Helper()
	mem, err := d.Alloc([]int64{16 << 10, 1 << 20, 300, 5 << 20, 16 << 10})
	if err != nil {
		t.Fatal(err)
	}
	return func() {
		for _, m := range mem {
			m.Release()
		}
	}
}

// held counts the live allocations, without cached blocks.
func held(d *Device) int64 {
	_, kept, _ := memory.CountBlocks(d.Memory)
	return cudatest.ReadState().Blocks - int64(kept)
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%s: %+v", what, cudatest.ReadState())
		}
	}
}

// A graph capture by another thread or library survives all functions of this package, which still work.
func TestCaptureSurvives(t *testing.T) {
	t.Run("on other streams", func(t *testing.T) { captureLivesOn(t, false) })
	t.Run("on a stream that the default stream waits for", func(t *testing.T) { captureLivesOn(t, true) })
}

func captureLivesOn(t *testing.T, blocking bool) {
	r := random(t)
	d := begun(t)
	var p piece
	p.coded(weights(r, x16.BF16, 8000), x16.BF16)
	p.raw(weights(r, x16.BF16, 30_000))
	life := func() {
		for i, size := range []int64{64 << 10, 256 << 10, 64 << 10} { // queues are created, cached and freed
			l, err := d.Queue(3+i, size)
			if err != nil {
				t.Fatal(err)
			}
			other, err := d.Queue(2, size)
			if err != nil {
				t.Fatal(err)
			}
			p.run(t, d, l, 0)
			p.run(t, d, other, 1)
			l.Close()
			other.Close()
		}
		mine, err := memory.NewPages(4096, nil)
		if err != nil {
			t.Fatal(err)
		}
		b := unsafe.Slice((*byte)(mine.P), 4096)
		if err := d.Register(b); err != nil {
			t.Error(err)
		}
		gone := make(chan struct{})
		d.Unregister(b, func() { mine.Free(); close(gone) })
		<-gone
		dict(t, d)()
		if _, _, err := d.MemoryInfo(); err != nil {
			t.Error(err)
		}
		if err := d.WithContext(func() error { return nil }); err != nil {
			t.Error(err)
		}
		if _, err := driver.Info(); err != nil {
			t.Error(err)
		}
		d.PrepareQueue(0, 0)
		if err := d.Trim(); err != nil {
			t.Error(err)
		}
	}
	before := dict(t, d)
	end := cudatest.CaptureStream(0, blocking)
	before()
	life()
	if !blocking { // otherwise the default stream, which may use the memory, cannot be queried
		eventually(t, "memory was not freed during the capture", func() bool { return held(d) == 0 })
	}
	if s := cudatest.ReadState(); s.Broken > 0 {
		t.Error(s.What)
	}
	end()
	eventually(t, "memory was not freed after the capture", func() bool { return held(d) == 0 })
	life()
}

// Work on a stream that is being captured is rejected before it affects the capture. The error says what to do.
func TestWorkOnACapturedStreamIsRefused(t *testing.T) {
	d, l := open(t, 2, 64<<10)
	on, err := d.NewStream()
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := d.FreeStream(on); err != nil {
			t.Error(err)
		}
	}()
	mem, err := d.Alloc([]int64{4096, 4096})
	if err != nil {
		t.Fatal(err)
	}
	dst, src := uint64(uintptr(mem[0].Ptr)), uint64(uintptr(mem[1].Ptr))
	streams := []stream.Bitstream{{Src: src, Stored: 4096, Dst: dst, Size: 4096, Chunk: 4096}}
	order := stream.Order{Stream: on}
	all := map[string]func() error{
		"FollowStream": func() error { return l.FollowStream(on) },
		"Waits":        func() error { return endOf(l).MakeStreamWait(on) },
		"Copy":         func() error { return d.Copy(order, dst, src, 4096, false) },
		"Copy, waits":  func() error { return d.Copy(order, dst, src, 4096, true) },
		"Copy after":   func() error { return d.Copy(stream.Order{Stream: 1, After: []uintptr{on}}, dst, src, 4096, false) },
		"It waits":     func() error { return d.MakeStreamWait(on, 1) },
		"Other waits":  func() error { return d.MakeStreamWait(1, on) },
		"SyncStream":   func() error { return d.SyncStream(on) },
		"FreeStream":   func() error { return d.FreeStream(on) },
		"Decode":       func() error { _, err := d.Decode(order, stream.FormatX16, streams); return err },
		"Decode after": func() error {
			_, err := d.Decode(stream.Order{Stream: 1, After: []uintptr{on}}, stream.FormatX16, streams)
			return err
		},
		"Peek":   func() error { _, err := d.Peek(order, 0, stream.FormatX16, streams); return err },
		"Encode": func() error { _, err := d.Encode(order, streams, dst); return err },
		"Digest": func() error { _, err := d.Digest(order, []digest.View{digest.Contiguous(src, 4096)}, nil); return err },
		"Digest after": func() error {
			_, err := d.Digest(stream.Order{Stream: 1, After: []uintptr{on}},
				[]digest.View{digest.Contiguous(src, 4096)}, nil)
			return err
		},
	}
	end := cudatest.CaptureStream(on, false)
	for name, call := range all {
		if err := call(); !errors.Is(err, errs.ErrNotSupported) {
			t.Errorf("%s: %v", name, err)
		}
	}
	end()
	for _, name := range []string{"FollowStream", "Waits", "Copy", "Copy after", "It waits", "Other waits", "SyncStream"} {
		if err := all[name](); err != nil {
			t.Errorf("%s after the capture: %v", name, err)
		}
	}
	for _, m := range mem {
		m.Release()
	}
}

// A load does not wait for other users' work, even if memory of an earlier load was released, the cached queue does not
// fit, and another load ends at the same time.
func TestLoadDoesNotWaitForOthers(t *testing.T) {
	r := random(t)
	d := begun(t)
	d.alone(t)
	var p piece
	p.coded(weights(r, x16.BF16, 8000), x16.BF16)
	p.raw(weights(r, x16.BF16, 40_000))
	load := func(slots int, size int64) {
		l, err := d.Queue(slots, size)
		if err != nil {
			t.Fatal(err)
		}
		second, err := d.Queue(slots, size)
		if err != nil {
			t.Fatal(err)
		}
		p.run(t, d, l, 0) // also releases the loaded memory
		p.run(t, d, second, 0)
		l.Close()
		second.Close()
	}
	load(2, 64<<10)
	drop := dict(t, d)
	side, err := d.NewStream()
	if err != nil {
		t.Fatal(err)
	}
	idle := cudatest.OccupyStream(side)
	drop()
	for i := range 3 {
		load(2+i, 64<<10<<i)
	}
	mine, err := memory.NewPages(4096, nil)
	if err != nil {
		t.Fatal(err)
	}
	b := unsafe.Slice((*byte)(mine.P), 4096)
	if err := d.Register(b); err != nil {
		t.Fatal(err)
	}
	d.Unregister(b, mine.Free)
	if n := cudatest.CountWaits(); n != 0 {
		t.Errorf("%d calls waited for other users' work", n)
	}
	idle()
	if err := d.FreeStream(side); err != nil {
		t.Error(err)
	}
}

// Memory is not freed while a stream of its users (NoteStream) has work, and the reaper checks that without waiting.
func TestMemoryOutlivesItsUsers(t *testing.T) {
	d := begun(t)
	d.alone(t)
	side, err := d.NewStream()
	if err != nil {
		t.Fatal(err)
	}
	d.NoteStream(side)
	d.NoteStream(side)
	for _, stream := range []uintptr{side, 1} {
		mem, err := d.Alloc([]int64{70_000})
		if err != nil {
			t.Fatal(err)
		}
		idle := cudatest.OccupyStream(stream)
		cudatest.QueueFill(mem[0].Ptr, mem[0].Bytes, 7, stream) // uses the memory after the other work
		mem[0].Release()
		for range 5 {
			if err := d.Reap(false); err != nil {
				t.Fatal(err)
			}
		}
		if s := cudatest.ReadState(); held(d) != 1 || cudatest.CountWaits() != 0 {
			t.Errorf("stream %#x: %+v", stream, s)
		}
		idle()
		eventually(t, "memory was not freed after its users' work", func() bool {
			if err := d.Reap(false); err != nil {
				t.Fatal(err)
			}
			return held(d) == 0
		})
	}
	// A user's stream cannot be queried while it is being captured.
	dict(t, d)()
	end := cudatest.CaptureStream(side, false)
	for range 3 {
		if err := d.Reap(true); err != nil { // does not wait until the capture ends
			t.Fatal(err)
		}
	}
	if held(d) == 0 {
		t.Error("memory was freed while its user's stream was being captured")
	}
	end()
	if err := d.FreeUnused(); err != nil || cudatest.ReadState().Blocks != 0 {
		t.Errorf("after the capture: %v, %+v", err, cudatest.ReadState())
	}
	if err := d.FreeStream(side); err != nil {
		t.Error(err)
	}
	memory.FakeForgetStreams(d.Memory) // the stream is freed before the process ends
}

// If the driver fails to free a resource, it is retained and freed exactly once when the driver allows it. This covers
// tensors, a queue, a batch, registered memory, and resources allocated before an error.
func TestFailedFreesAreTriedAgain(t *testing.T) {
	d := begun(t)
	d.alone(t)
	for nth := int64(1); nth < 60; nth++ {
		dict(t, d)()
		cudatest.FailCall(nth, 900, false)
		err := d.FreeUnused()
		reached := cudatest.ReadState()
		cudatest.FailCall(0, 0, false)
		if err == nil && reached.Blocks != 0 {
			t.Fatalf("call %d failed: %+v without an error", nth, reached)
		}
		if err := d.FreeUnused(); err != nil {
			t.Fatalf("call %d failed: then %v", nth, err)
		}
		d.FreeDeferred()
		if s := cudatest.ReadState(); s.Blocks != 0 || s.Broken > 0 || s.Relaxed != 0 {
			t.Fatalf("call %d failed: %+v", nth, s)
		}
	}
	if live := d.CountLive(); live != 0 {
		t.Errorf("%d blocks are counted as live", live)
	}
	// Calls fail while a queue is freed, and then while queues and tensors are made.
	for nth := int64(1); nth < 120; nth += 3 {
		l, err := d.Queue(2, 64<<10)
		if err != nil {
			t.Fatal(err)
		}
		l.Close()
		cudatest.FailCall(nth, 900, false)
		_ = d.Trim() // with or without an error, the reaper then frees the queue
		cudatest.FailCall(0, 0, false)
		d.FreeDeferred()
		if s := cudatest.ReadState(); s.Blocks != 0 || s.Pins != 0 || s.Broken > 0 {
			t.Fatalf("a queue, call %d: %+v", nth, s)
		}
	}
	for nth := int64(1); nth < 80; nth++ {
		cudatest.FailCall(nth, 999, false)
		l, err := d.Queue(2, 64<<10)
		mem, err2 := d.Alloc([]int64{1 << 20, 1 << 20, 1 << 20})
		cudatest.FailCall(0, 0, false)
		if err == nil {
			l.Close()
		}
		if err2 == nil {
			for _, m := range mem {
				m.Release()
			}
		}
		if err := d.Trim(); err != nil {
			t.Fatal(err)
		}
		if s := cudatest.ReadState(); s.Blocks != 0 || s.Pins != 0 || s.Broken > 0 {
			t.Fatalf("making a queue failed at call %d: %+v", nth, s)
		}
	}
}

// When a device is lost, all resources that could not be freed are dropped. Nothing is retried forever or freed
// twice.
func TestLostDeviceDropsAllResources(t *testing.T) {
	d := begun(t)
	d.alone(t)
	l, err := d.Queue(2, 64<<10)
	if err != nil {
		t.Fatal(err)
	}
	l.Close()
	dict(t, d)()
	if err := d.Reap(true); err != nil { // moves the blocks to the cache
		t.Fatal(err)
	}
	drop := dict(t, d)
	dict(t, d)()
	drop()
	cudatest.LoseDevice(719)
	if err := d.Trim(); !errors.Is(err, errs.ErrDevice) {
		t.Errorf("%v", err)
	}
	live, kept, deferred := memory.CountBlocks(d.Memory)
	cudatest.FailCall(0, 0, false)
	if s := cudatest.ReadState(); live+deferred+kept != 0 || s.Blocks+s.Pins != 0 || s.Broken > 0 {
		t.Errorf("%d blocks, %d deferred, %d cached: %+v", live, deferred, kept, s)
	}
}

// The next load reuses released memory without a driver call. Memory over the permanent cache's size is freed later,
// and all cached memory if memory is short.
func TestReleasedMemoryIsReused(t *testing.T) {
	d := begun(t)
	d.alone(t)
	big := []int64{100 << 20, 60 << 20}
	for range 3 {
		dict(t, d)()
		if err := d.Reap(true); err != nil {
			t.Fatal(err)
		}
	}
	if n := cudatest.ReadState().Blocks; n != 1 {
		t.Errorf("%d allocations for the same sizes three times", n)
	}
	calls := cudatest.CountCalls()
	drop := dict(t, d)
	if n := cudatest.CountCalls() - calls; n != 0 || held(d) != 1 {
		t.Errorf("%d driver calls for cached memory", n)
	}
	drop()
	mem, err := d.Alloc(big)
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range mem {
		m.Release()
	}
	if err := d.Reap(true); err != nil {
		t.Fatal(err)
	}
	_, young, _ := memory.CountBlocks(d.Memory)
	if held(d) != 0 || young == 0 {
		t.Error("memory that was just released is not cached for the next load")
	}
	eventually(t, "too much memory stayed cached", func() bool {
		memory.FakeFreeSurplus(d.Memory)
		return cudatest.ReadState().Bytes <= memory.KeepBytes
	})
	mem, err = d.Alloc([]int64{250 << 20}) // almost all device memory
	if err != nil {
		t.Fatal(err)
	}
	mem[0].Release()
	if err := d.Trim(); err != nil || cudatest.ReadState().Blocks != 0 {
		t.Errorf("%v, %+v", err, cudatest.ReadState())
	}
}
