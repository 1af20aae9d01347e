// Package errs has the error classes of overwire: one sentinel and one Python
// exception for each class, one typed error that says where it happened, and
// the redaction of secrets in texts that people see.
package errs

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"
	"syscall"
)

// The classes. Every error that leaves a package wraps exactly one of them, so
// that errors.Is finds its class through any wrapping.
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
	ErrCrypto       = errors.New("cryptography")      // a missing or wrong key, or changed encrypted bytes
	ErrBase         = errors.New("another base")      // a delta that was made from other tensors
	ErrCancelled    = errors.New("cancelled")         // by the caller or by another error
	ErrForked       = errors.New("engine forked")     // used in a child of the process that started it
	ErrEngine       = errors.New("engine failure")    // a bug of ours: a recovered panic
)

// A ClassOf is an error class, and the Python exception that it becomes: its name,
// the built-in that a user would catch without knowing us, and its documentation. Own:
// it has fields of its own.
type ClassOf struct {
	Err               error
	Python, Base, Doc string
	Own               bool
}

// classes are in the order in which they are looked for.
var classes = []ClassOf{
	{ErrCancelled, "CancelledError", "RuntimeError",
		"The work was cancelled: by the caller, or because the process ends.", false},
	{ErrForked, "ForkedError", "RuntimeError", "The engine was started before `fork`, and this is the child.", false},
	{ErrEngine, "EngineError", "RuntimeError", "A bug in overwire. The engine refuses further work; please report it.",
		false},
	{ErrCorrupt, "CorruptError", "ValueError", "A valid file whose bytes have changed.", false},
	{ErrFormat, "FormatError", "ValueError", "The bytes were never a valid file of this kind.", false},
	{ErrNotFound, "NotFoundError", "FileNotFoundError", "No such file or object.", false},
	{ErrPermission, "AccessError", "PermissionError", "The file is there, but may not be read or written.", false},
	{ErrTimeout, "DeadlineError", "TimeoutError", "The time limit has passed.", false},
	{ErrMemory, "OutOfMemoryError", "MemoryError",
		"Host or device memory was not enough. What had been allocated is freed.", true},
	{ErrArgument, "ArgumentError", "ValueError", "An invalid argument, which the message names.", false},
	{ErrKey, "TensorNotFoundError", "KeyError", "No tensor of that name.", false},
	{ErrNotSupported, "NotSupportedError", "NotImplementedError", "Valid, but not something this build can do.", false},
	{ErrDevice, "DeviceError", "RuntimeError", "The device or its driver failed.", false},
	{ErrCrypto, "CryptographyError", "ValueError", "A key is missing or wrong, or encrypted bytes have changed.",
		false},
	{ErrBase, "DeltaBaseError", "ValueError",
		"A delta was made from other tensors than those that it should change. Nothing was changed.", false},
	{ErrIO, "IOFailure", "OSError", "The medium failed: an I/O error, a full disk, a short read.", false},
}

// Classes lists them.
func Classes() []ClassOf { return slices.Clone(classes) }

// Class returns the name of the Python exception for err. An error without a
// class is an EngineError, since each of ours should have one.
func Class(err error) string {
	for _, c := range classes {
		if errors.Is(err, c.Err) {
			return c.Python
		}
	}
	return "EngineError"
}

// An At says where something went wrong. The text leaves zero fields out; Chunk
// and Offset are -1 when they are not known.
type At struct {
	Verb   string // one of the ten verbs of ARCHITECTURE.md, or the caller's: "decode", "save"
	Source string
	Tensor string
	Chunk  int64
	Offset int64 // in the source
	Err    error // wraps one class
}

// Error returns: decode model.safetensors tensor "x" chunk 17 @4096: checksum mismatch.
// A system error names the path only if it is not Source, and no refusal twice.
func (a *At) Error() string { return a.placeText() + ": " + a.reasonText() }

func (a *At) placeText() string {
	var b strings.Builder
	b.WriteString(a.Verb)
	if a.Source != "" {
		b.WriteString(" " + OneLine(RedactURI(a.Source)))
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
	return b.String()
}

func (a *At) reasonText() string {
	reason := a.Err.Error()
	if sys, ok := errors.AsType[*fs.PathError](a.Err); ok && sys.Path == a.Source {
		reason = strings.Replace(reason, sys.Error(), sys.Err.Error(), 1)
	}
	refusal := ErrPermission.Error()
	return strings.Replace(reason, refusal+": "+refusal, refusal+": look at its mode, and at those of its folders", 1)
}

// Unwrap returns the cause.
func (a *At) Unwrap() error { return a.Err }

// RuleChecksum is the rule of stored bytes, an index or a header that have another checksum.
const RuleChecksum = "Checksum"

// NewMismatch says which checksum was stored, and which the bytes have.
func NewMismatch(stored, computed uint32) error {
	return WithRule(RuleChecksum, New(ErrCorrupt, "checksum mismatch: %08x stored, %08x computed", stored, computed))
}

// A rule names what an error is about beside its class, for callers that answer by it: a rule
// of a format that the bytes break, or what is lacking.
type rule struct {
	error
	name string
}

// Unwrap returns the error.
func (r *rule) Unwrap() error { return r.error }

// WithRule adds the name of a rule to an error, whose text stays.
func WithRule(name string, err error) error { return &rule{err, name} }

// OfRule is New for a rule, whose name is a fact of the error and not of its text.
func OfRule(name string, class error, format string, args ...any) error {
	return WithRule(name, New(class, format, args...))
}

// RuleOf is the name of the rule that an error is about; "": it names none.
func RuleOf(err error) string {
	if r, ok := errors.AsType[*rule](err); ok {
		return r.name
	}
	return ""
}

// New returns an error of a class with a formatted reason:
// New(ErrCorrupt, "final state %d", x) reads "corrupt data: final state 7".
func New(class error, format string, args ...any) error {
	return fmt.Errorf("%w: %s", class, fmt.Sprintf(format, args...))
}

// In is Locate for an error of a whole file.
func In(verb, source string, err error) error { return Locate(verb, source, "", -1, err) }

// Place adds the file, the tensor ("": none) and the offset (-1: none) to err, unless
// err, or one that it wraps, has a place. It returns nil for nil.
func Place(verb, source, tensor string, off int64, err error) error {
	var at *At
	if err == nil || errors.As(err, &at) {
		return err
	}
	return &At{Verb: verb, Source: source, Tensor: tensor, Chunk: -1, Offset: off, Err: err}
}

// Locate adds the file, the tensor ("": none) and the chunk (-1: none) to err, as far
// as err has none of its own. It returns nil for nil.
func Locate(verb, source, tensor string, chunk int64, err error) error {
	if err == nil {
		return nil
	}
	if at, ok := err.(*At); ok {
		c := *at
		if c.Tensor == "" {
			c.Tensor = tensor
		}
		if c.Chunk < 0 {
			c.Chunk = chunk
		}
		if c.Source == "" {
			c.Source = source
		}
		return &c
	}
	return &At{Verb: verb, Source: source, Tensor: tensor, Chunk: chunk, Offset: -1, Err: err}
}

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

// FromFile is FromOS for a call on an open file, of which no caller chose an argument: EINVAL, a file system's answer
// to what it lacks, is ErrIO.
func FromFile(err error) error {
	if errors.Is(err, syscall.EINVAL) && !Classed(err) {
		return fmt.Errorf("%w: %w", ErrIO, err)
	}
	return FromOS(err)
}
