package errs

import (
	"strings"
	"testing"
)

// Control characters are escaped, and other characters do not change.
func TestVisible(t *testing.T) {
	for text, want := range map[string]string{
		"": "", "a b~é日\u00a0": "a b~é日\u00a0", "a\nb\tc": "a\nb\tc", "\x00\x1b\x7f": `\u0000\u001b\u007f`,
		"\u0080\u009f\u061c\u200e\u200f\u202a\u202e\u2066\u2069": `\u0080\u009f\u061c\u200e\u200f\u202a\u202e\u2066\u2069`,
		"\u2029\u202f\u2065\u206a":                               "\u2029\u202f\u2065\u206a",
		"caf\xe9 \x9b \xe2\x82":                                  "caf\xe9 " + `\x9b` + " \xe2" + `\x82`,
	} {
		if got := Visible(text); got != want || Visible(got) != got {
			t.Errorf("%q: %q, want %q", text, got, want)
		}
	}
	if got := OneLine("a\nb\tc\rd"); got != `a\u000ab\u0009c\u000dd` {
		t.Errorf("%q", got)
	}
	at := &At{Verb: "read", Source: "m\x1b[31m\n.safetensors", Tensor: "t\u202e", Chunk: -1, Offset: -1, Err: New(ErrCorrupt, "x\x07")}
	if got := Describe(at).Message; strings.ContainsAny(got, "\x1b\x07\u202e\n") {
		t.Errorf("%q", got)
	}
	if got := Describe(at); got.Source != at.Source || got.Tensor != at.Tensor {
		t.Errorf("%+v", got)
	}
}
