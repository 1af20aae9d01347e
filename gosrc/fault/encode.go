package fault

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"syscall"
)

// Prefix begins every error text that Encode makes.
const Prefix = "overwire-fault:"

// Encode returns err as one line for another language: Prefix and a JSON
// object with class, message, source, tensor, chunk and offset. Message and
// source are redacted; chunk and offset are -1, source and tensor empty where
// they are not known. A nil error is "".
func Encode(err error) string {
	if err == nil {
		return ""
	}
	at := where(err)
	text, _ := json.Marshal(struct { // a struct of strings and numbers cannot fail
		Class   string `json:"class"`
		Message string `json:"message"`
		Source  string `json:"source"`
		Tensor  string `json:"tensor"`
		Chunk   int64  `json:"chunk"`
		Offset  int64  `json:"offset"`
	}{Class(err), "overwire: " + Redact(err.Error()), Redact(at.Source), at.Tensor, at.Chunk, at.Offset})
	return Prefix + string(text)
}

// where joins every At around the cause: what the outer one does not say, an
// inner one may.
func where(err error) At {
	out := At{Chunk: -1, Offset: -1}
	for {
		var at *At
		if !errors.As(err, &at) {
			return out
		}
		if out.Source == "" {
			out.Source = at.Source
		}
		if out.Tensor == "" {
			out.Tensor = at.Tensor
		}
		if out.Chunk < 0 {
			out.Chunk = at.Chunk
		}
		if out.Offset < 0 {
			out.Offset = at.Offset
		}
		err = at.Err
	}
}

// Classed reports whether err has a class already.
func Classed(err error) bool {
	for _, c := range classes {
		if errors.Is(err, c.err) {
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
