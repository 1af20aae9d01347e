package save

// This file counts workers and gives ended contexts their error class.

import (
	"context"
	"errors"
	"fmt"
	"runtime"

	"github.com/overwire/overwire/gosrc/fault"
	"github.com/overwire/overwire/gosrc/knob"
)

// Threads is how many workers there are: as asked, or if that is 0 as the environment
// says, or one a core.
func Threads(asked int) int {
	if asked <= 0 {
		asked = knob.Threads.Get()
	}
	if asked <= 0 {
		asked = runtime.GOMAXPROCS(0)
	}
	return min(asked, 256)
}

// classed gives the bare errors of an ended context their class, wherever in a
// verb they were noticed.
func classed(ctx context.Context, err error) error {
	if err != nil && (errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded)) &&
		!errors.Is(err, fault.ErrCancelled) && !errors.Is(err, fault.ErrTimeout) {
		return cancelled(ctx)
	}
	return err
}

// cancelled is why ctx ended, in one of our classes.
func cancelled(ctx context.Context) error {
	err := context.Cause(ctx)
	switch {
	case err == nil || errors.Is(err, fault.ErrCancelled):
		return err
	case errors.Is(err, context.DeadlineExceeded):
		return fmt.Errorf("%w: %w", fault.ErrTimeout, err)
	}
	return fmt.Errorf("%w: %w", fault.ErrCancelled, err)
}
