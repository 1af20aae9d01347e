package errs

// This file adds a class to the errors of ended contexts.

import (
	"context"
	"errors"
	"fmt"
)

// Ended adds a class to the plain error of an ended context.
func Ended(ctx context.Context, err error) error {
	if err != nil && (errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded)) &&
		!errors.Is(err, ErrCancelled) && !errors.Is(err, ErrTimeout) {
		return Cause(ctx)
	}
	return err
}

// Cause is context.Cause with a class added.
func Cause(ctx context.Context) error {
	err := context.Cause(ctx)
	switch {
	case err == nil || errors.Is(err, ErrCancelled) || errors.Is(err, ErrEngine):
		return err
	case errors.Is(err, context.DeadlineExceeded):
		return fmt.Errorf("%w: %w", ErrTimeout, err)
	}
	return fmt.Errorf("%w: %w", ErrCancelled, err)
}
