package errs

// Makes characters visible that a terminal would obey instead of showing.

import (
	"fmt"
	"strings"
	"unicode/utf8"
)

// Visible writes as \u and their number the characters that control a terminal (C0, DEL,
// C1), and those that change the order in which a text is read (bidirectional controls); a
// byte of C1 that is part of no character as \x and its number. Line ends and tabs stay. In
// JSON the strings stay the same.
func Visible(text string) string { return visibleText(text, false) }

// OneLine is Visible for a name, where a line end or a tab is not layout.
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

// plainByte is whether a byte is a visible character of ASCII.
func plainByte(c byte) bool { return c >= ' ' && c < 0x7f }

func isControl(r rune) bool {
	return r < ' ' || r >= 0x7f && r < 0xa0 || r == 0x61c || r == 0x200e || r == 0x200f || r >= 0x202a && r <= 0x202e ||
		r >= 0x2066 && r <= 0x2069
}
