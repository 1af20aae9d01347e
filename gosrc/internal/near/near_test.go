package near

import (
	"strings"
	"testing"
)

func TestBest(t *testing.T) {
	// A typo is recognised; an unrelated word is not.
	names := []string{"compress", "convert", "model.safetensors", "a", "", strings.Repeat("x", 300)}
	for word, want := range map[string]string{
		"compres": "compress", "COMPRESS": "compress", "cmopress": "compress", "konvert": "convert", "model.safetensor": "model.safetensors",
		"modle.safetensors": "model.safetensors", "compress": "", "verify": "", "b": "", "": "", strings.Repeat("x", 299): "",
		"model.bin": "",
	} {
		if got := Best(word, names); got != want {
			t.Errorf("%q: %q, want %q", word, got, want)
		}
	}
}
