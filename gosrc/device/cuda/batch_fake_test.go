//go:build owfake

package cuda_test

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"testing"
	"unsafe"

	"github.com/overwire/overwire/gosrc/device/cuda"
	"github.com/overwire/overwire/gosrc/device/cuda/cudatest"
	"github.com/overwire/overwire/gosrc/device/cuda/driver"
	"github.com/overwire/overwire/gosrc/device/cuda/stream"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/nvcomp"
)

// A batch reads the output of an earlier stream, and a copy after the batch reads the batch's output, without a wait
// between them.
func TestBatchOrder(t *testing.T) {
	g := newGPU(t)
	in := contents(rand.New(rand.NewPCG(5, 8)))[5:6]
	spec := nvcomp.Spec{Algorithm: "X16", Chunk: 16 << 10}
	stored := encoded(t, spec, in)
	streams := g.streams(spec, in, stored)
	first, err := g.NewStream()
	if err != nil {
		t.Fatal(err)
	}
	second, err := g.NewStream()
	if err != nil {
		t.Fatal(err)
	}
	late := g.room(len(stored[0]), 0)
	if err := g.Copy(stream.Order{Stream: first}, late, streams[0].Src, streams[0].Stored, false); err != nil {
		t.Fatal(err)
	}
	streams[0].Src = late
	b, err := g.Decode(stream.Order{Stream: second, After: []uintptr{first}}, stream.FormatX16, streams)
	if err != nil {
		t.Fatal(err)
	}
	if b.Done() {
		t.Error("the batch ended before any wait, so this test is inconclusive")
	}
	if err := g.MakeStreamWait(first, second); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, len(in[0]))
	if err := g.Copy(stream.Order{Stream: first}, uint64(uintptr(unsafe.Pointer(&got[0]))), streams[0].Dst,
		streams[0].Size, true); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, in[0]) {
		t.Error("the batch read its input too early, or its output was read too early")
	}
	if failures, err := b.Wait(); err != nil || failures[0] != nil {
		t.Error(failures, err)
	}
	if err := errors.Join(g.FreeStream(first), g.FreeStream(second)); err != nil {
		t.Error(err)
	}
}

// CheckStream rejects a stream of another device. DeviceOf returns the device of an address.
func TestOtherDevice(t *testing.T) {
	g := newGPU(t)
	other, err := cuda.Open(1)
	if err != nil {
		t.Fatal(err)
	}
	q, err := other.NewStream()
	if err != nil {
		t.Fatal(err)
	}
	if err := g.CheckStream(q); !errors.Is(err, errs.ErrArgument) {
		t.Errorf("a stream of cuda:1: %v", err)
	}
	if err := errors.Join(g.CheckStream(1), g.CheckStream(2), other.CheckStream(q), other.FreeStream(q)); err != nil {
		t.Error(err)
	}
	host := make([]byte, 8)
	if at := g.room(8, 0); driver.DeviceOf(at) != 0 ||
		driver.DeviceOf(uint64(uintptr(unsafe.Pointer(&host[0])))) != -1 {
		t.Error("addresses were assigned to wrong devices")
	}
}

// If the driver denies entry to the context, a batch still runs, but its state is unknown. Its pad is not reused, and
// Done returns false. The result is available later.
func TestBatchOfASilentDriver(t *testing.T) {
	g := newGPU(t)
	in := contents(rand.New(rand.NewPCG(5, 8)))[5:6]
	spec := nvcomp.Spec{Algorithm: "X16", Chunk: 16 << 10}
	streams := g.streams(spec, in, encoded(t, spec, in))
	on, err := g.NewStream()
	if err != nil {
		t.Fatal(err)
	}
	decode := func() (*stream.Batch, error) {
		return g.Decode(stream.Order{Stream: on}, stream.FormatX16, streams)
	}
	first, err := decode() // after this, no allocation waits for other work
	if err == nil {
		_, err = first.Wait()
	}
	if err != nil {
		t.Fatal(err)
	}
	idle := cudatest.OccupyStream(on)
	b, err := decode()
	if err != nil {
		t.Fatal(err)
	}
	cudatest.RefuseContext(2)
	if b.Done() {
		t.Error("Done is true although the driver did not report the state")
	}
	cudatest.RefuseContext(2)
	if _, err := b.Wait(); !errors.Is(err, errs.ErrDevice) {
		t.Errorf("Wait: %v", err)
	}
	if b.Done() {
		t.Error("Done is true after a failed Wait, but the batch is still running")
	}
	for range 127 { // afterwards, the next batch would use b's memory
		if _, err := decode(); err != nil {
			t.Fatal(err)
		}
	}
	cudatest.RefuseContext(2)
	if _, err := decode(); !errors.Is(err, errs.ErrDevice) || cudatest.CountWaits() != 0 {
		t.Errorf("memory of a running batch was reused: %v, %d waits", err, cudatest.CountWaits())
	}
	cudatest.RefuseContext(0)
	idle()
	if failures, err := b.Wait(); err != nil || failures[0] != nil || !b.Done() {
		t.Error(failures, err)
	}
	got := make([]byte, len(in[0]))
	if err := g.Copy(stream.Order{Stream: on}, uint64(uintptr(unsafe.Pointer(&got[0]))), streams[0].Dst,
		streams[0].Size, true); err != nil || !bytes.Equal(got, in[0]) {
		t.Errorf("%v, or wrong bytes", err)
	}
	if err := g.FreeStream(on); err != nil {
		t.Error(err)
	}
}

// If any driver call fails, a batch ends with a typed error and nothing leaks.
func TestBatchEveryCallFails(t *testing.T) {
	in := contents(rand.New(rand.NewPCG(5, 9)))[3:5]
	spec := nvcomp.Spec{Algorithm: "X16", Chunk: 4096}
	stored := encoded(t, spec, in)
	life := func() (err error) {
		d, err := cuda.Open(0)
		if err != nil {
			return err
		}
		mem, err := d.Alloc([]int64{int64(len(stored[0])), int64(len(in[0]))})
		if err != nil {
			return err
		}
		defer mem[0].Release()
		defer mem[1].Release()
		src := uint64(uintptr(mem[0].Ptr))
		if err := d.Copy(stream.Order{Stream: 1, After: []uintptr{2}}, src,
			uint64(uintptr(unsafe.Pointer(&stored[0][0]))), mem[0].Bytes, true); err != nil {
			return err
		}
		s := []stream.Bitstream{{Src: src, Stored: mem[0].Bytes, Dst: uint64(uintptr(mem[1].Ptr)), Size: mem[1].Bytes,
			Chunk: 4096}}
		if _, err := d.Peek(stream.Order{}, 0, stream.FormatX16, s); err != nil {
			return err
		}
		b, err := d.Decode(stream.Order{After: []uintptr{1}}, stream.FormatX16, s)
		if err != nil {
			return err
		}
		_ = b.Done()
		failures, err := b.Wait()
		if err == nil && failures[0] != nil {
			t.Error(failures[0])
		}
		got := make([]byte, len(in[0]))
		if err == nil {
			err = d.Copy(stream.Order{}, uint64(uintptr(unsafe.Pointer(&got[0]))), s[0].Dst, s[0].Size, true)
		}
		if err == nil && !bytes.Equal(got, in[0]) {
			t.Error("wrong bytes")
		}
		return err
	}
	for _, c := range []struct {
		code   int
		sticky bool
		class  error
		first  int64 // each case fails every third call
	}{{999, false, errs.ErrDevice, 1}, {999, true, errs.ErrDevice, 2}, {2, false, errs.ErrMemory, 3}} {
		failed := 0
		for nth := c.first; ; nth += 3 {
			end := cuda.Fake(64 << 20)
			cudatest.FailCall(nth, c.code, c.sticky)
			err := life()
			cudatest.FailCall(0, 0, false)
			calls := cudatest.CountCalls()
			if left := end(); left != "" {
				t.Fatalf("call %d fails with %d: %v; leaked: %s", nth, c.code, err, left)
			}
			if err != nil {
				failed++
				if !errors.Is(err, c.class) {
					t.Fatalf("call %d fails with %d: %v", nth, c.code, err)
				}
			}
			if calls < nth {
				break
			}
		}
		t.Logf("code %d, sticky %v: %d failed", c.code, c.sticky, failed)
		if failed < 20 {
			t.Error("too few calls failed")
		}
	}
}
