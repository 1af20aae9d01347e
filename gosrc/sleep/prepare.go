package sleep

// This file gets the host memory of a sleep before the tensors sleep.

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

// A Preparation gets host memory in the background.
type Preparation struct {
	// Bytes is what a sleep is expected to take; 0 on the host, whose sleeps keep nothing.
	Bytes int64
	job   *job.Job // nil: nothing to do
	ready int64    // set before the job ends
}

// Prepare begins to get the host memory that a sleep of these tensors of a GPU will take,
// or, without tensors, `bytes` of it. It refuses at once what there is no room for, and
// reads the tensors only until it returns; it takes no memory of the GPU. The next sleep
// uses what is there, and needs not wait for the rest. The growth belongs to no caller:
// the end of the process, Drop and empty_cache end it.
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
		s := &sleeper{Spec: spec, way: way{samples: func(at []uint64, n int64, got func(i int, b []byte)) error {
			return readSamples(gpu, at, n, got)
		}}}
		if err := s.classifyTensors(in); err != nil {
			return nil, err
		}
		if err := s.layOut(); err != nil {
			return nil, err
		}
		most, need = s.imageRoom()
	}
	if need <= 0 || need > 1<<43 {
		return nil, errs.New(errs.ErrArgument, "sleep: %d bytes of host memory", need)
	}
	if err := spec.refuseRoom(need, gpu); err != nil {
		return nil, err
	}
	want := aheadOf(need)
	if unit := memory.RegisterAlignment(); spec.Budget > 0 && sizes.RoundUp(want, unit) > spec.Budget {
		if want = spec.Budget / unit * unit; want == 0 {
			return &Preparation{Bytes: need}, nil // the sleep takes as much at once
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

// Wait waits for the end, and returns how many bytes were made ready.
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

// Return gives back the host memory that is kept for sleeps of a device.
func Return(name string) error {
	gpu, err := gpuOf(name)
	if gpu != nil {
		pinned.Drop(gpu)
	}
	return err
}

// readSamples gives n bytes at each address of a GPU, of whose memory it takes none.
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
