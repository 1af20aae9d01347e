package errs

// This file describes errors for other languages, and escapes characters that a terminal would interpret.

import (
	"errors"
	"fmt"
	"strings"
	"syscall"
	"unicode/utf8"

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
