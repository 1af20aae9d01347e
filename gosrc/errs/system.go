package errs

// This file gives errors of the system their classes.

import (
	"context"
	"errors"
	"fmt"
	"os"
	"syscall"
)

// Classed reports whether err has a class already.
func Classed(err error) bool {
	for _, c := range classes {
		if errors.Is(err, c.Err) {
			return true
		}
	}
	return false
}

// system maps the errors of the system to classes, in the order in which they
// are looked for. What is not here is ErrIO.
var system = []struct{ from, class error }{
	{context.Canceled, ErrCancelled},
	{context.DeadlineExceeded, ErrTimeout},
	{os.ErrDeadlineExceeded, ErrTimeout},
	{syscall.ETIMEDOUT, ErrTimeout},
	{syscall.ENOENT, ErrNotFound},
	{syscall.ENOTDIR, ErrNotFound},
	{syscall.EACCES, ErrPermission},
	{syscall.EPERM, ErrPermission},
	{syscall.EROFS, ErrPermission},
	{syscall.ENOMEM, ErrMemory},
	{syscall.EISDIR, ErrArgument},
	{syscall.EINVAL, ErrArgument},
	{syscall.ENAMETOOLONG, ErrArgument},
	{syscall.ELOOP, ErrArgument},
	{syscall.EEXIST, ErrArgument},
	{syscall.ENOTSUP, ErrNotSupported},
	{syscall.ENOSYS, ErrNotSupported},
	{os.ErrNotExist, ErrNotFound},
	{os.ErrPermission, ErrPermission},
}

// FromOS gives an error of the system its class and keeps it: errors.Is finds
// both. EIO, ENOSPC, EMFILE and whatever else the medium says is ErrIO. An
// error that has a class, and nil, come back as they are.
func FromOS(err error) error {
	if err == nil || Classed(err) {
		return err
	}
	for _, s := range system {
		if errors.Is(err, s.from) {
			return fmt.Errorf("%w: %w", s.class, err)
		}
	}
	return fmt.Errorf("%w: %w", ErrIO, err)
}
