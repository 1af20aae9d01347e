package save

// This file sets the number of workers, and gives errors of ended contexts their
// class.

import (
	"context"
	"errors"
	"fmt"
	"runtime"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/knob"
)

// Threads is the number of workers: asked, or if that is 0 the setting, or one per
// core.
func Threads(asked int) int {
	if asked <= 0 {
		asked = knob.Threads.Get()
	}
	if asked <= 0 {
		asked = runtime.GOMAXPROCS(0)
	}
	return min(asked, 256)
}

// classed adds a class to the bare errors of an ended context.
func classed(ctx context.Context, err error) error {
	if err != nil && (errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded)) &&
		!errors.Is(err, errs.ErrCancelled) && !errors.Is(err, errs.ErrTimeout) {
		return cancelled(ctx)
	}
	return err
}

// cancelled is the reason why ctx ended, with a class.
func cancelled(ctx context.Context) error {
	err := context.Cause(ctx)
	switch {
	case err == nil || errors.Is(err, errs.ErrCancelled):
		return err
	case errors.Is(err, context.DeadlineExceeded):
		return fmt.Errorf("%w: %w", errs.ErrTimeout, err)
	}
	return fmt.Errorf("%w: %w", errs.ErrCancelled, err)
}
