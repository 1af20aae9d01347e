package main

// This file measures what a device gives without loads: copies, kernels, reads of the disk.

import (
	"bytes"
	"context"
	"fmt"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/overwire/overwire/gosrc/codec/x16"
	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/device/cuda"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/hostmem"
	"github.com/overwire/overwire/gosrc/measure"
	"github.com/overwire/overwire/gosrc/tensor"
	"github.com/overwire/overwire/gosrc/weights"
)

// touchAhead touches as much memory as the run will use: in a new virtual machine
// the first touch of a page is the host's work, a hundred times slower than later
// ones, and would be measured instead of us.
func (r *run) touchAhead() {
	const longest = 75 * time.Second
	want := r.Size*3 + 2<<30
	n := min(want, hostmem.Available()*8/10) &^ (64<<20 - 1)
	if r.Size < 1<<30 || n <= 0 {
		return
	}
	var done atomic.Int64
	start := time.Now()
	err := measure.Fresh(n, func(m []byte) error {
		return measure.Parallel(r.Threads, n, 64<<20, func(_ int, lo, hi int64) error {
			if time.Since(start) < longest && r.Ctx.Err() == nil {
				measure.Touch(m[lo:hi])
				done.Add(hi - lo)
			}
			return nil
		})
	})
	if err != nil {
		r.Missing("floors", "first touch of the machine's memory", err.Error())
		return
	}
	r.Add(measure.Row{Group: "floors", Name: "first touch of the machine's memory, all cores, once",
		Value: measure.Rate(done.Load(), time.Since(start).Seconds()),
		Unit:  "GB/s", Note: fmt.Sprintf("%.0f of %.0f GB", float64(done.Load())/1e9, float64(want)/1e9)})
}

// deviceFloors are the machine's rates between disk, memory and device, without
// overwire.
func (r *run) deviceFloors() error {
	if r.gpu == nil {
		return lackError("%s is the host: its floors stand above", r.opt.Device)
	}
	slot := int64(cuda.DefaultSlotBytes)
	queue, err := r.gpu.Queue(cuda.DefaultSlots, slot)
	if err != nil {
		return err
	}
	defer func() { queue.Close(); _ = r.gpu.Trim() }()
	for _, n := range []int64{slot, 1 << 20, 256 << 10} {
		v, err := r.ToDevice(queue, n)
		if err != nil {
			return err
		}
		name := fmt.Sprintf("pinned copy to the device, %d KiB at a time", n>>10)
		if n == slot {
			name += " (a slot)"
			r.Report.Device.Wire = v
		}
		r.Add(measure.Row{Group: "floors", Name: name, Value: v, Unit: "GB/s"})
	}
	return r.readFloors(queue)
}

// readFloors reads a cached file into the queue's pinned memory.
func (r *run) readFloors(queue *cuda.Queue) error {
	var slots []device.Slot
	for range cuda.DefaultSlots {
		s, err := queue.Get(r.Ctx)
		if err != nil {
			return err
		}
		defer queue.Put(s)
		slots = append(slots, s)
	}
	file, err := r.CachedFile()
	if err != nil {
		return err
	}
	defer file.Close()
	const piece = 1 << 20
	for _, threads := range []int{1, 8, 16} {
		v, err := r.Speed(r.FloorBytes(), func() error {
			return measure.Parallel(threads, r.FloorBytes(), piece, func(w int, lo, hi int64) error {
				return measure.ReadAt(file, slots[w%len(slots)].Memory()[:hi-lo], lo)
			})
		})
		if err != nil {
			return err
		}
		r.Add(measure.Row{Group: "floors", Name: fmt.Sprintf(
			"page cache into pinned memory, pread of 1 MiB, %d threads", threads), Value: v, Unit: "GB/s"})
	}
	return nil
}

// measureKernels measures the decoder alone: chunks on the device are decoded again and
// again, all in one launch.
func (r *run) measureKernels() error {
	if r.gpu == nil {
		return lackError("%s has no kernels", r.opt.Device)
	}
	most := min(1<<30, r.Size/8)
	for _, k := range []struct {
		kind      string
		transform uint8
		bytes     int64
		alone     bool
	}{
		{"llama-bf16", x16.BF16, most, false}, {"llama-bf16", x16.BF16, min(most, 64<<20), true},
		{"fp16", x16.FP16, most / 4, false},
		{"fp32", x16.FP32, most / 4, false}, {"fp8-e4m3", x16.E4M3, most / 4, false},
	} {
		if err := r.measureKernel(k.kind, k.transform, k.bytes, k.alone); err != nil {
			return fmt.Errorf("%s: %w", k.kind, err)
		}
	}
	return nil
}

// measureKernel measures one launch that makes n bytes; alone: with a wait after each
// launch, as for a piece of the pipeline.
func (r *run) measureKernel(kind string, transform uint8, n int64, alone bool) error {
	const chunk = 1 << 20
	all, err := weights.Make(weights.Options{Kind: kind, Size: min(32<<20, max(4<<20, n)), Seed: 5, Threads: r.Threads})
	if err != nil {
		return err
	}
	var big []byte // the largest tensors are matrices
	for _, t := range all {
		if len(t.Data) > len(big) {
			big = t.Data
		}
	}
	big = big[:len(big)/chunk*chunk]
	if len(big) == 0 {
		big = bytes.Repeat(all[0].Data, chunk/len(all[0].Data)+1)[:chunk]
	}
	var e x16.Encoder
	var stored [][]byte
	var segs []uint16
	for at := 0; at < len(big); at += chunk {
		b, seg, ok := e.Encode(nil, big[at:at+chunk], transform)
		if !ok {
			return errs.New(errs.ErrEngine, "a chunk of generated %s did not compress", kind)
		}
		stored, segs = append(stored, b), append(segs, seg)
	}
	slot := int64(0)
	count := int(max(1, n/chunk))
	for i := range count {
		slot += int64(len(stored[i%len(stored)])+15) &^ 15
	}
	queue, err := r.gpu.Queue(2, slot)
	if err != nil {
		return err
	}
	defer func() { queue.Close(); _ = r.gpu.Trim() }()
	mem, err := r.gpu.Alloc([]int64{int64(count) * chunk})
	if err != nil {
		return err
	}
	defer mem[0].Release()
	s, err := queue.Get(r.Ctx)
	if err != nil {
		return err
	}
	jobs := make([]device.DecodeTask, count)
	at, bytesIn := 0, int64(0)
	for i := range jobs {
		k := i % len(stored)
		copy(s.Memory()[at:], stored[k])
		jobs[i] = device.DecodeTask{Chunk: tensor.Chunk{Codec: tensor.CodecX16, Transform: transform, SegTiles: segs[k],
			Stored: uint32(len(stored[k])), Logical: chunk},
			Src: uint32(at), Dst: unsafe.Add(mem[0].Ptr, i*chunk)}
		bytesIn += int64(len(stored[k]))
		at += (len(stored[k]) + 15) &^ 15
	}
	var bad atomic.Pointer[error]
	if err := queue.Submit(s, int64(at), jobs, func(_ int, err error) {
		if err != nil {
			bad.CompareAndSwap(nil, &err)
		}
	}); err != nil {
		return err
	}
	if err := queue.Drain(context.WithoutCancel(r.Ctx)); err != nil {
		return err
	}
	if p := bad.Load(); p != nil {
		return *p
	}
	if err := r.compareDecoded(mem[0], big); err != nil {
		return err
	}
	return r.timeKernel(queue, kind, int64(count)*chunk, bytesIn, alone)
}

// compareDecoded compares memory of the device with a repeating pattern.
func (r *run) compareDecoded(m device.Memory, want []byte) error {
	return measure.Fresh(m.Bytes, func(got []byte) error {
		if err := r.gpu.Read(got, m); err != nil {
			return err
		}
		for at := 0; at < len(got); at += len(want) {
			if n := min(len(want), len(got)-at); !bytes.Equal(got[at:at+n], want[:n]) {
				return errs.New(errs.ErrEngine, "the GPU decodes to other bytes")
			}
		}
		return nil
	})
}

func (r *run) timeKernel(queue *cuda.Queue, kind string, logical, stored int64, alone bool) error {
	times := 20
	if alone {
		times = 1
	}
	if _, err := queue.RunAgain(2); err != nil { // warms up
		return err
	}
	v, err := r.MedianOf(func() (float64, error) {
		took, err := queue.RunAgain(times)
		return took.Seconds() / float64(times), err
	})
	if err != nil {
		return err
	}
	row := measure.Row{Group: "kernel", Value: measure.Rate(logical, v), Unit: "GB/s"}
	if alone {
		row.Name = fmt.Sprintf("decode %s, %d MiB in one launch, launch and wait included", kind, logical>>20)
		row.Goal, row.Reached = ">= 400", atLeast(row.Value, 400)
		r.Add(row)
		return nil
	}
	row.Name = fmt.Sprintf("decode %s, %d MiB in one launch", kind, logical>>20)
	// A byte of tensors costs reading ratio bytes and writing one; a copied byte is
	// read and written.
	n := min(stored, 512<<20) &^ 255
	across, err := r.acrossRate(n, times)
	if err != nil {
		return err
	}
	row.Floor, row.FloorName = across*2/(1+float64(stored)/float64(logical)), "device memory"
	row.Note = fmt.Sprintf("ratio %.4f; copies on the device %.0f GB/s", float64(stored)/float64(logical), across)
	if kind == "llama-bf16" {
		r.Report.Device.Across = across
		r.Add(measure.Row{Group: "kernel", Name: fmt.Sprintf("copy of %d MiB inside the device's memory", n>>20),
			Value: across, Unit: "GB/s"})
		row.Goal, row.Reached = ">= 0.94 x floor (2.4 TB/s on an H200)", atLeast(row.Value, 0.94*row.Floor)
	}
	r.Add(row)
	return nil
}

// acrossRate is the rate of copies of n bytes inside the device's memory.
func (r *run) acrossRate(n int64, times int) (float64, error) {
	mem, err := r.gpu.Alloc([]int64{n, n})
	if err != nil {
		return 0, err
	}
	defer func() { mem[0].Release(); mem[1].Release() }()
	from, to := uint64(uintptr(mem[0].Ptr)), uint64(uintptr(mem[1].Ptr))
	v, err := r.MedianOf(func() (float64, error) {
		start := time.Now()
		for i := range times {
			if err := r.gpu.Copy(cuda.Order{}, to, from, n, i+1 == times); err != nil {
				return 0, err
			}
		}
		return time.Since(start).Seconds() / float64(times), nil
	})
	return measure.Rate(n, v), err
}
