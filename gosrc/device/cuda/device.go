package cuda

// This file opens each device once, and trims devices.

import (
	"sync"

	"github.com/overwire/overwire/cuda/built"
	"github.com/overwire/overwire/gosrc/device/cuda/driver"
	"github.com/overwire/overwire/gosrc/device/cuda/memory"
	"github.com/overwire/overwire/gosrc/device/cuda/queue"
	"github.com/overwire/overwire/gosrc/device/cuda/stream"
	"github.com/overwire/overwire/gosrc/errs"
)

// A Device is one GPU: its context, and the parts that use it. The parts do not depend on Device. A process has one
// Device per index.
type Device struct {
	*driver.Context
	*memory.Memory
	*queue.Pool
	*stream.Streams
	*stream.Batches
	stream.Digests
	stream.Deltas

	resident *stream.Resident // runs digests and deltas
	modules  [2]*driver.Module
}

// opened holds the devices of the process, by index.
var opened struct {
	mu      sync.Mutex
	devices map[int]*Device
}

// firstRing is the maximum pinned memory of the first queue. Tests make it smaller.
var firstRing int64 = queue.MostBytes

// Open returns the device with the given index. The first call makes its context, which takes about 0.2 s unless
// torch has already done so. While it does, Open prepares the pinned memory of the first queue.
func Open(index int) (*Device, error) {
	opened.mu.Lock()
	defer opened.mu.Unlock()
	count, err := driver.Load()
	if err != nil {
		return nil, err
	}
	if index < 0 || index >= count {
		return nil, errs.New(errs.ErrDevice, "cuda:%d does not exist: there are %d CUDA devices", index, count)
	}
	if d := opened.devices[index]; d != nil {
		return d, nil
	}
	near := driver.Near(index)
	spare := memory.PrepareSpare(firstRing, near)
	ctx, err := driver.OpenContext(index, near)
	if err != nil {
		spare.Take().Free()
		return nil, err
	}
	d := &Device{Context: ctx, modules: [2]*driver.Module{ctx.Module(built.X16), ctx.Module(built.Resident)}}
	d.Memory = memory.New(ctx, d.Trim)
	d.Pool = queue.NewPool(ctx, d.Memory, spare, d.modules[0])
	d.Streams = stream.New(ctx, d.Memory)
	d.Batches = stream.NewBatches(d.Streams, d.modules[0])
	d.resident = stream.NewResident(d.Streams, d.modules[1])
	d.Digests, d.Deltas = stream.Digests{On: d.resident}, stream.Deltas{On: d.resident}
	if opened.devices == nil {
		opened.devices = map[int]*Device{}
	}
	opened.devices[index] = d
	return d, nil
}

// Trim calls Device.Trim for all open devices. Memory of live tensors is not freed. Trim continues after an error and
// returns the first one.
func Trim() (err error) {
	opened.mu.Lock()
	defer opened.mu.Unlock()
	for _, d := range opened.devices {
		if e := d.Trim(); err == nil {
			err = e
		}
	}
	return err
}

// Trim frees memory that is cached between loads: the idle queue with its pinned memory and staging memory, and tensor
// memory that is no longer held. It waits for the work that uses them, and the driver may also wait for other work. If
// a user's stream is being captured into a graph, the memory is freed after the capture.
func (d *Device) Trim() (err error) {
	for _, trim := range []func() error{d.Pool.Trim, d.Batches.Trim, d.resident.Trim, d.FreeUnused} {
		if e := trim(); err == nil {
			err = e
		}
	}
	d.FreeDeferred()
	return err
}

// NewPacker returns a Packer, which the caller must close. See stream.NewPacker.
func (d *Device) NewPacker(sums bool) (*stream.Packer, error) {
	return stream.NewPacker(d.Batches, sums)
}
