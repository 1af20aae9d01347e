package bench

// This file reads a file to a GPU without decoding, which is the baseline for loads by one process or several.

import (
	"cmp"
	"context"
	"os"
	"unsafe"

	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/device/cuda"
	"github.com/overwire/overwire/gosrc/device/cuda/stream"
	"github.com/overwire/overwire/gosrc/errs"
)

// A Reading reads the bytes [Lo, Hi) of a file. Each thread reads Step bytes into one of its slots, and copies
// them to the GPU on that slot's stream. The caller owns the memory.
type Reading struct {
	Path    string
	Lo, Hi  int64
	GPU     int    // device number, or -1 for the host
	To      uint64 // destination address on that device
	Slots   uint64 // for a GPU, the address of pinned memory with Each steps per thread
	Threads int
	Step    int64 // bytes per read; 0 means ReadStep
	Each    int   // slots per thread; 0 means SlotsEach
}

const (
	// ReadStep fits in a core's L2 cache. With smaller steps, calls take more time than the cache saves: 1 MiB reaches
	// only three quarters of this rate.
	ReadStep = 2 << 20
	// SlotsEach lets a thread read while its previous steps are copied to the GPU.
	SlotsEach = 3
)

// Run reads the range and returns when all bytes are at To.
func (r Reading) Run(ctx context.Context) error {
	if r.Lo < 0 || r.Hi < r.Lo || r.Threads < 1 || r.Threads > 1024 || r.To == 0 || r.GPU >= 0 && r.Slots == 0 {
		return errs.New(errs.ErrArgument, "baseline: invalid range [%d, %d) or number of threads %d", r.Lo,
			r.Hi, r.Threads)
	}
	step, each := cmp.Or(r.Step, ReadStep), cmp.Or(r.Each, SlotsEach)
	file, err := os.Open(r.Path)
	if err != nil {
		return errs.FromOS(err)
	}
	defer file.Close()
	if r.GPU < 0 {
		return runParallel(r.Threads, r.Hi-r.Lo, step, func(_ int, lo, hi int64) error {
			if err := ctx.Err(); err != nil {
				return errs.Cause(ctx)
			}
			return readAt(file, unsafe.Slice((*byte)(device.Pointer(uintptr(r.To)+uintptr(lo))), hi-lo), r.Lo+lo)
		})
	}
	gpu, err := cuda.Open(r.GPU)
	if err != nil {
		return err
	}
	streams := make([]uintptr, r.Threads*each)
	defer func() {
		for _, s := range streams {
			if s != 0 {
				gpu.SyncAndFreeStream(s)
			}
		}
	}()
	for i := range streams {
		if streams[i], err = gpu.NewStream(); err != nil {
			return err
		}
	}
	turns := make([]int, r.Threads)
	err = runParallel(r.Threads, r.Hi-r.Lo, step, func(w int, lo, hi int64) error {
		if err := ctx.Err(); err != nil {
			return errs.Cause(ctx)
		}
		at := w*each + turns[w]%each
		turns[w]++
		if err := gpu.SyncStream(streams[at]); err != nil {
			return err
		}
		slot := r.Slots + uint64(at)*uint64(step)
		if err := readAt(file, unsafe.Slice((*byte)(device.Pointer(uintptr(slot))), hi-lo), r.Lo+lo); err != nil {
			return err
		}
		return gpu.Copy(stream.Order{Stream: streams[at]}, r.To+uint64(lo), slot, hi-lo, false)
	})
	for _, s := range streams {
		if e := gpu.SyncStream(s); err == nil {
			err = e
		}
	}
	return err
}
