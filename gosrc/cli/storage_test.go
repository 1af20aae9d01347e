package cli

import (
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// Storage options may be strings, numbers and booleans. Anything else is refused.
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

// countText uses the singular for 1. Every message with a number and its noun must use it.
func TestCounts(t *testing.T) {
	for n, want := range map[int]string{0: "0 files", 1: "1 file", 2: "2 files", 12345: "12,345 files"} {
		if got := countText(n, "file"); got != want {
			t.Error(got)
		}
	}
	sources, err := filepath.Glob("*.go")
	if err != nil || len(sources) == 0 {
		t.Fatal(sources, err)
	}
	printed := regexp.MustCompile(`"[^"\n]*%[ds] (?:files|tensors|spans|blocks|workers|gaps|cores|processors|elements|` +
		`chunks|lanes|shards)\b`)
	for _, name := range sources {
		source, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		if found := printed.Find(source); found != nil && !strings.HasSuffix(name, "_test.go") {
			t.Errorf("%s: %s: use countText", name, found)
		}
	}
}
