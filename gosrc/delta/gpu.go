package delta

// This file refuses tensors on a GPU.

import (
	"context"

	"github.com/overwire/overwire/gosrc/errs"
)

func errGPU() error {
	return errs.New(errs.ErrNotSupported, "deltas of tensors on a GPU: bring them to the host")
}

func onGPU(int, []step) (place, error) { return nil, errGPU() }

func encodeGPU(context.Context, *File, int, []int, func(i int) *Pair, func(int64)) error {
	return errGPU()
}
