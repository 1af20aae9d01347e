package errs

// This file escapes characters that a terminal would interpret.

import (
	"fmt"
	"strings"
	"unicode/utf8"
)

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
