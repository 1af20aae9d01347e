// Package errs defines the error classes of overwire. Each class is one sentinel error and one Python
// exception. An At adds the location of an error. Redact removes secrets from texts that users see.
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
	"unicode/utf8"

	"github.com/overwire/overwire/gosrc/internal/rawjson"
)

// The error classes. Every error that a package returns wraps exactly one of them, so errors.Is finds the class
// through any wrapping.
var (
	ErrFormat       = errors.New("bad format")   // bytes that were never a valid file of this format
	ErrCorrupt      = errors.New("corrupt data") // a valid file with changed bytes
	ErrNotFound     = errors.New("not found")    // no such file, object or tensor file
	ErrPermission   = errors.New("permission denied")
	ErrIO           = errors.New("i/o error") // the medium failed: EIO, ENOSPC, a short read
	ErrTimeout      = errors.New("timed out")
	ErrMemory       = errors.New("out of memory") // host or device
	ErrArgument     = errors.New("bad argument")  // the caller's mistake
	ErrKey          = errors.New("no such tensor")
	ErrNotSupported = errors.New("not supported") // valid, but this build does not support it
	ErrDevice       = errors.New("device error")
	ErrCrypto       = errors.New("cryptography")   // a missing or wrong key, or changed encrypted bytes
	ErrBase         = errors.New("wrong base")     // a delta that was made from different tensors
	ErrCancelled    = errors.New("cancelled")      // by the caller or because of another error
	ErrForked       = errors.New("engine forked")  // the engine is used in a forked child process
	ErrEngine       = errors.New("engine failure") // a bug in overwire: a recovered panic
)

// A ClassOf is an error class with its Python exception: the exception's name, the built-in exception from
// which it derives, and its documentation. Own means that the exception has additional fields.
type ClassOf struct {
	Err               error
	Python, Base, Doc string
	Own               bool
}

// classes are in the order in which Class tests them.
var classes = []ClassOf{
	{ErrCancelled, "CancelledError", "RuntimeError",
		"The work was cancelled by the caller, or because the process ends.", false},
	{ErrForked, "ForkedError", "RuntimeError", "The engine was started before `fork`, and this is the child.", false},
	{ErrEngine, "EngineError", "RuntimeError", "A bug in overwire. The engine refuses further work; please report " +
		"the bug.",
		false},
	{ErrCorrupt, "CorruptError", "ValueError", "The bytes of a valid file have changed.", false},
	{ErrFormat, "FormatError", "ValueError", "The bytes were never a valid file of this format.", false},
	{ErrNotFound, "NotFoundError", "FileNotFoundError", "The file or object does not exist.", false},
	{ErrPermission, "AccessError", "PermissionError", "The file is there, but may not be read or written.", false},
	{ErrTimeout, "DeadlineError", "TimeoutError", "The time limit has passed.", false},
	{ErrMemory, "OutOfMemoryError", "MemoryError",
		"Not enough host or device memory. Everything allocated so far is freed.", true},
	{ErrArgument, "ArgumentError", "ValueError", "An argument is invalid; the message names it.", false},
	{ErrKey, "TensorNotFoundError", "KeyError", "There is no tensor with that name.", false},
	{ErrNotSupported, "NotSupportedError", "NotImplementedError", "This build does not support the input.", false},
	{ErrDevice, "DeviceError", "RuntimeError", "The device or its driver failed.", false},
	{ErrCrypto, "CryptographyError", "ValueError", "A key is missing or wrong, or encrypted bytes have changed.",
		false},
	{ErrBase, "DeltaBaseError", "ValueError",
		"The delta was made from different tensors than those it was applied to. Nothing was changed.", false},
	{ErrIO, "IOFailure", "OSError", "The disk or the network failed: an I/O error, a full disk, a short read.", false},
}

// Classes lists the classes.
func Classes() []ClassOf { return slices.Clone(classes) }

// Class returns the name of the Python exception for err. An error without a class is an EngineError, because
// every error of overwire should have a class.
func Class(err error) string {
	for _, c := range classes {
		if errors.Is(err, c.Err) {
			return c.Python
		}
	}
	return "EngineError"
}

// An At describes where an error occurred. Its text omits unknown fields: empty strings, and -1 for Chunk and Offset.
type At struct {
	Verb   string // an operation named in ARCHITECTURE.md or by the caller: "decode", "save"
	Source string
	Tensor string
	Chunk  int64
	Offset int64 // in the source
	Err    error // wraps one class
}

// Error returns text like: decode model.safetensors tensor "x" chunk 17 @4096: checksum mismatch. It contains
// the path of a system error only if it differs from Source.
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
	return strings.Replace(reason, refusal+": "+refusal, refusal+": check its permissions and those of its folders", 1)
}

// Unwrap returns the cause.
func (a *At) Unwrap() error { return a.Err }

// RuleChecksum is the rule of an error for bytes, an index or a header whose checksum does not match.
const RuleChecksum = "Checksum"

// RuleRemains is the rule of the error of a failed save that could not remove objects from a store.
const RuleRemains = "ObjectsRemain"

// NewMismatch returns the error for a stored checksum that differs from the computed one.
func NewMismatch(stored, computed uint32) error {
	return WithRule(RuleChecksum, New(ErrCorrupt, "checksum mismatch: %08x stored, %08x computed", stored, computed))
}

// A rule names the cause of an error more precisely than its class, for callers that handle it: a violated
// format rule, or what is missing.
type rule struct {
	error
	name string
}

// Unwrap returns the wrapped error.
func (r *rule) Unwrap() error { return r.error }

// WithRule adds the name of a rule to an error. The text remains the same.
func WithRule(name string, err error) error { return &rule{err, name} }

// OfRule is New with a rule. The rule's name is not part of the text.
func OfRule(name string, class error, format string, args ...any) error {
	return WithRule(name, New(class, format, args...))
}

// RuleOf returns the name of the error's rule, or "".
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

// In is Locate for errors about a whole file.
func In(verb, source string, err error) error { return Locate(verb, source, "", -1, err) }

// Place adds the file, the tensor ("" for none) and the offset (-1 for none) to err, unless err or an error
// that it wraps is already an At. It returns nil for nil.
func Place(verb, source, tensor string, off int64, err error) error {
	var at *At
	if err == nil || errors.As(err, &at) {
		return err
	}
	return &At{Verb: verb, Source: source, Tensor: tensor, Chunk: -1, Offset: off, Err: err}
}

// Locate adds the file, the tensor ("" for none) and the chunk (-1 for none) to err where they are unknown. It
// returns nil for nil.
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

// Classed reports whether err already has a class.
func Classed(err error) bool {
	for _, c := range classes {
		if errors.Is(err, c.Err) {
			return true
		}
	}
	return false
}

// system maps system errors to classes, in the order in which they are tested. All others are ErrIO.
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

// FromOS adds a class to a system error. errors.Is finds both the class and the system error. EIO, ENOSPC,
// EMFILE and all other errors of the medium are ErrIO. Errors with a class, and nil, are returned unchanged.
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

// FromFile is FromOS for a call on an open file whose arguments the caller did not choose. EINVAL is then
// ErrIO, because file systems return it for operations that they do not support.
func FromFile(err error) error {
	if errors.Is(err, syscall.EINVAL) && !Classed(err) {
		return fmt.Errorf("%w: %w", ErrIO, err)
	}
	return FromOS(err)
}

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

// A Memory is an ErrMemory with the sizes of the allocation, of the free memory and of the total memory, in
// bytes; -1 means unknown.
type Memory struct {
	Where              string // "cuda:0", "host"
	Asked, Free, Total int64
	For                string // purpose, such as "3 tensors"
	Err                string // text from the system or the driver
}

// Error returns text like: out of memory: cuda:0: 4096 bytes for 3 tensors: 100 of 9000 are free (cuMemAlloc_v2: ...)
func (m *Memory) Error() string {
	s := ErrMemory.Error() + ": " + m.Where
	if m.Asked >= 0 {
		s += fmt.Sprintf(": %d bytes", m.Asked)
	}
	if m.For != "" {
		s += " for " + m.For
	}
	if m.Total >= 0 {
		s += fmt.Sprintf(": %d of %d are free", m.Free, m.Total)
	}
	if m.Err != "" {
		s += " (" + m.Err + ")"
	}
	return s
}

// Unwrap returns the class.
func (m *Memory) Unwrap() error { return ErrMemory }

// A Description is an error in the form that is passed to other languages: its class, redacted message,
// location, rule, and system error number. If memory is short, it also has the device and the sizes Asked, Free
// and Total in bytes. Unknown fields are omitted.
type Description struct {
	Class   string `json:"class"`
	Message string `json:"message"`
	Source  string `json:"source,omitempty"`
	Tensor  string `json:"tensor,omitempty"`
	Chunk   *int64 `json:"chunk,omitempty"`
	Offset  *int64 `json:"offset,omitempty"`
	Rule    string `json:"rule,omitempty"`
	Asked   *int64 `json:"asked,omitempty"`
	Free    *int64 `json:"free,omitempty"`
	Total   *int64 `json:"total,omitempty"`
	Device  string `json:"device,omitempty"`
	Errno   int    `json:"errno,omitempty"`
}

// Describe returns the Description of an error.
func Describe(err error) Description {
	at := mergePlaces(err)
	t := Description{Class: Class(err), Message: "overwire: " + Message(err), Source: RedactURI(at.Source),
		Tensor: at.Tensor, Chunk: knownOrNil(at.Chunk), Offset: knownOrNil(at.Offset), Rule: RuleOf(err)}
	if number, ok := errors.AsType[syscall.Errno](err); ok {
		t.Errno = int(number)
	}
	if mem, ok := errors.AsType[*Memory](err); ok {
		t.Device = mem.Where
		t.Asked, t.Free, t.Total = knownOrNil(mem.Asked), knownOrNil(mem.Free), knownOrNil(mem.Total)
	}
	return t
}

func knownOrNil(n int64) *int64 {
	if n < 0 {
		return nil
	}
	return &n
}

// Prefix begins the result of Text.
const Prefix = "overwire-fault:"

// Text returns Describe as one line: Prefix and JSON.
func Text(err error) string {
	b, jsonErr := rawjson.Marshal(Describe(err))
	if jsonErr != nil { // strings and integers always marshal
		b = []byte(`{"class":"EngineError","message":"overwire: an error without a text"}`)
	}
	return Prefix + string(b)
}

// mergePlaces merges all nested Ats: outer fields take precedence, and inner fields fill the gaps.
func mergePlaces(err error) At {
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

// Visible escapes characters that control a terminal (C0, DEL, C1) or change the text direction (bidirectional
// controls) as \uXXXX, and C1 bytes that are not part of a character as \xXX. It does not change line ends and
// tabs. Strings in JSON keep their meaning.
func Visible(text string) string { return visibleText(text, false) }

// OneLine is Visible for a name. It also escapes line ends and tabs.
func OneLine(text string) string { return visibleText(text, true) }

func visibleText(text string, line bool) string {
	first := 0
	for first < len(text) && plainByte(text[first]) {
		first++
	}
	if first == len(text) {
		return text
	}
	var b strings.Builder
	b.WriteString(text[:first])
	for i := first; i < len(text); {
		r, n := utf8.DecodeRuneInString(text[i:])
		switch raw := text[i : i+n]; {
		case r == utf8.RuneError && n == 1 && text[i] < 0xa0:
			fmt.Fprintf(&b, `\x%02x`, text[i])
		case r == '\n' || r == '\t':
			if line {
				fmt.Fprintf(&b, `\u%04x`, r)
			} else {
				b.WriteString(raw)
			}
		case isControl(r):
			fmt.Fprintf(&b, `\u%04x`, r)
		default:
			b.WriteString(raw)
		}
		i += n
	}
	return b.String()
}

// plainByte reports whether a byte is a visible ASCII character.
func plainByte(c byte) bool { return c >= ' ' && c < 0x7f }

func isControl(r rune) bool {
	return r < ' ' || r >= 0x7f && r < 0xa0 || r == 0x61c || r == 0x200e || r == 0x200f || r >= 0x202a && r <= 0x202e ||
		r >= 0x2066 && r <= 0x2069
}
