package errs

// This file describes errors for other languages.

import (
	"errors"
	"syscall"

	"github.com/overwire/overwire/gosrc/internal/rawjson"
)

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
