package bench

// This file measures what several processes read together: the floor of loads by ranks.

import (
	"context"
	"os"
	"unsafe"

	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/device/cuda"
	"github.com/overwire/overwire/gosrc/errs"
)

// A Reading reads the bytes [Lo, Hi) of a file, by threads that each read ReadStep bytes
// at a time. The memory belongs to the caller.
type Reading struct {
	Path    string
	Lo, Hi  int64
	GPU     int    // by number; -1: the host
	To      uint64 // room for the bytes, there
	Slots   uint64 // with a GPU: pinned memory, SlotsEach steps for each thread
	Threads int
}

const (
	// ReadStep fits a core's second-level cache.
	ReadStep = 1 << 20
	// SlotsEach lets a thread read while its last step is copied to the GPU.
	SlotsEach = 2
)

// Run reads once. It returns when all bytes are in To.
func (r Reading) Run(ctx context.Context) error {
	if r.Lo < 0 || r.Hi < r.Lo || r.Threads < 1 || r.Threads > 1024 || r.To == 0 || r.GPU >= 0 && r.Slots == 0 {
		return errs.New(errs.ErrArgument, "a floor of bytes [%d, %d) by %d threads", r.Lo, r.Hi, r.Threads)
	}
	file, err := os.Open(r.Path)
	if err != nil {
		return errs.FromOS(err)
	}
	defer file.Close()
	if r.GPU < 0 {
		return runParallel(r.Threads, r.Hi-r.Lo, ReadStep, func(_ int, lo, hi int64) error {
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
	streams := make([]uintptr, r.Threads*SlotsEach)
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
	err = runParallel(r.Threads, r.Hi-r.Lo, ReadStep, func(w int, lo, hi int64) error {
		if err := ctx.Err(); err != nil {
			return errs.Cause(ctx)
		}
		at := w*SlotsEach + turns[w]%SlotsEach
		turns[w]++
		if err := gpu.SyncStream(streams[at]); err != nil {
			return err
		}
		slot := r.Slots + uint64(at)*ReadStep
		if err := readAt(file, unsafe.Slice((*byte)(device.Pointer(uintptr(slot))), hi-lo), r.Lo+lo); err != nil {
			return err
		}
		return gpu.Copy(cuda.Order{Stream: streams[at]}, r.To+uint64(lo), slot, hi-lo, false)
	})
	for _, s := range streams {
		if e := gpu.SyncStream(s); err == nil {
			err = e
		}
	}
	return err
}
