// Package fault has the error classes of overwire: one sentinel a class, the
// Python exception each becomes, one typed error that says where, and the
// redaction of secrets in texts that people see.
package fault

import (
	"errors"
	"fmt"
	"strings"
)

// The classes. Every error that leaves a room wraps exactly one of them, so
// that errors.Is tells its kind whatever was wrapped around it.
var (
	ErrFormat       = errors.New("bad format")        // bytes that were never a valid file of this kind
	ErrCorrupt      = errors.New("corrupt data")      // a valid file whose bytes have changed
	ErrNotFound     = errors.New("not found")         // no such file, object or tensor file
	ErrPermission   = errors.New("permission denied") //
	ErrIO           = errors.New("i/o error")         // the medium failed: EIO, ENOSPC, a short read
	ErrTimeout      = errors.New("timed out")         //
	ErrMemory       = errors.New("out of memory")     // host or device
	ErrArgument     = errors.New("bad argument")      // the caller's mistake
	ErrKey          = errors.New("no such tensor")    //
	ErrNotSupported = errors.New("not supported")     // valid, but not something this build can do
	ErrDevice       = errors.New("device error")      //
	ErrCrypto       = errors.New("cryptography")      // a key that is missing or another, encrypted bytes that have changed
	ErrCancelled    = errors.New("cancelled")         // by the caller or by another error
	ErrForked       = errors.New("engine forked")     // used in a child of the process that started it
	ErrEngine       = errors.New("engine failure")    // a bug of ours: a recovered panic
)

// classes maps each sentinel to the name of the Python exception, in the order
// in which they are looked for.
var classes = []struct {
	err error
	py  string
}{
	{ErrCancelled, "CancelledError"},
	{ErrForked, "ForkedError"},
	{ErrEngine, "EngineError"},
	{ErrCorrupt, "CorruptError"},
	{ErrFormat, "FormatError"},
	{ErrNotFound, "NotFoundError"},
	{ErrPermission, "AccessError"},
	{ErrTimeout, "DeadlineError"},
	{ErrMemory, "OutOfMemoryError"},
	{ErrArgument, "ArgumentError"},
	{ErrKey, "TensorNotFoundError"},
	{ErrNotSupported, "NotSupportedError"},
	{ErrDevice, "DeviceError"},
	{ErrCrypto, "CryptographyError"},
	{ErrIO, "IOFailure"},
}

// Class returns the name of the Python exception for err; errors of no class
// are EngineError, since every error of ours should have one.
func Class(err error) string {
	for _, c := range classes {
		if errors.Is(err, c.err) {
			return c.py
		}
	}
	return "EngineError"
}

// An At says where something went wrong. Zero fields are left out of the
// text; Chunk and Offset are -1 when they are not known.
type At struct {
	Verb   string // one of the ten, or what was asked for: "decode", "save"
	Source string
	Tensor string
	Chunk  int64
	Offset int64 // in the source
	Err    error // wraps one class
}

// Error reads: decode model.safetensors tensor "x" chunk 17 @4096: checksum mismatch
func (a *At) Error() string {
	var b strings.Builder
	b.WriteString(a.Verb)
	if a.Source != "" {
		b.WriteString(" " + Redact(a.Source))
	}
	if a.Tensor != "" {
		fmt.Fprintf(&b, " tensor %q", a.Tensor)
	}
	if a.Chunk >= 0 {
		fmt.Fprintf(&b, " chunk %d", a.Chunk)
	}
	if a.Offset >= 0 {
		fmt.Fprintf(&b, " @%d", a.Offset)
	}
	return b.String() + ": " + a.Err.Error()
}

// Unwrap lets errors.Is and errors.As see the cause.
func (a *At) Unwrap() error { return a.Err }

// New returns an error of a class with a formatted reason:
// New(ErrCorrupt, "final state %d", x) reads "corrupt data: final state 7".
func New(class error, format string, args ...any) error {
	return fmt.Errorf("%w: %s", class, fmt.Sprintf(format, args...))
}
