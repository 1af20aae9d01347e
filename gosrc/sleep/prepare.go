package sleep

// This file allocates host memory in advance for a sleep.

import (
	"context"

	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/device/cuda"
	"github.com/overwire/overwire/gosrc/device/cuda/memory"
	"github.com/overwire/overwire/gosrc/device/pinned"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/sizes"
	"github.com/overwire/overwire/gosrc/job"
)

// A Preparation allocates host memory in the background.
type Preparation struct {
	// Bytes is the expected size of a sleep. It is 0 for tensors on the host, which need no preparation.
	Bytes int64
	job   *job.Job // nil if there is nothing to do
	ready int64    // set before the job ends
}

// Prepare starts to allocate the host memory that a sleep of these GPU tensors will need, or `bytes`
// if there are no tensors. It returns an error if that is more than is available. It does not read the
// tensors after it returns, and uses no GPU memory. The next sleep uses the memory that is ready and
// does not wait for the rest. Return frees the memory.
func Prepare(spec Spec, bytes int64, in []Tensor) (*Preparation, error) {
	gpu, err := gpuOf(spec.Device)
	if err != nil {
		return nil, err
	}
	if gpu == nil {
		return &Preparation{}, nil
	}
	most, need := 2*bytes, bytes
	if len(in) > 0 {
		s := &sleeper{Spec: spec}
		s.items, err = classifyTensors(in, func(at []uint64, n int64, got func(i int, b []byte)) error {
			return readSamples(gpu, at, n, got)
		}, &s.report)
		if err != nil {
			return nil, err
		}
		if err := s.layOut(); err != nil {
			return nil, err
		}
		most, need = s.estimateRoom()
	}
	if need <= 0 || need > 1<<43 {
		return nil, errs.New(errs.ErrArgument, "sleep: invalid amount of host memory, %d bytes: expected 1 to "+
			"%d", need, int64(1)<<43)
	}
	if err := spec.refuseRoom(need, gpu); err != nil {
		return nil, err
	}
	want := aheadOf(need)
	if unit := memory.RegisterAlignment(); spec.Budget > 0 && sizes.RoundUp(want, unit) > spec.Budget {
		if want = spec.Budget / unit * unit; want == 0 {
			// less than one unit fits in the budget; the sleep allocates it itself
			return &Preparation{Bytes: need}, nil
		}
	}
	m, err := pinned.Prepare(max(most, want), want, gpu)
	if err != nil {
		return nil, err
	}
	p := &Preparation{Bytes: need}
	p.job = job.Start("sleep memory", func(ctx context.Context, _ *job.Job) (err error) {
		p.ready, err = m.Prepared(ctx, want)
		return err
	})
	return p, nil
}

// Wait waits until the memory is allocated, and returns how many bytes are ready.
func (p *Preparation) Wait(ctx context.Context) (int64, error) {
	if p.job == nil {
		return 0, nil
	}
	select {
	case <-p.job.Done():
		return p.ready, p.job.Err()
	case <-ctx.Done():
		return 0, context.Cause(ctx)
	}
}

// Return releases the host memory that is cached for sleeps of a device.
func Return(name string) error {
	gpu, err := gpuOf(name)
	if gpu != nil {
		pinned.Drop(gpu)
	}
	return err
}

// readSamples is a sampler for GPU memory that allocates no GPU memory.
func readSamples(gpu *cuda.Device, at []uint64, n int64, got func(i int, b []byte)) error {
	b := make([]byte, n)
	for i, a := range at {
		if err := gpu.Read(b, device.Memory{Ptr: device.Pointer(uintptr(a)), Bytes: n}); err != nil {
			return err
		}
		got(i, b)
	}
	return nil
}
