package cli

import (
	"maps"
	"testing"
)

// Options of stores may be texts, numbers and switches; what is none of them is refused.
func TestStorageTexts(t *testing.T) {
	texts, err := storageTexts(`{"timeout": 5, "pause": 0.25, "insecure": false, "header.X": "a b"}`)
	want := map[string]string{"timeout": "5", "pause": "0.25", "insecure": "false", "header.X": "a b"}
	if err != nil || !maps.Equal(texts, want) {
		t.Errorf("%v, %v", texts, err)
	}
	for _, text := range []string{`{"timeout": null}`, `{"timeout": [1]}`, `{"a": {"b": "c"}}`, `[]`, `null`, `5`, `{`, ``} {
		if texts, err := storageTexts(text); err == nil {
			t.Errorf("%s: %v", text, texts)
		}
	}
}

// One tensor is no several.
func TestPlural(t *testing.T) {
	if plural(1, "tensor", "tensors") != "tensor" || plural(0, "tensor", "tensors") != "tensors" {
		t.Error("one and several are confused")
	}
}
