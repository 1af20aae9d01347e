package cli

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// cache lists and removes only prepared models.
func TestCache(t *testing.T) {
	folder := t.TempDir()
	name := strings.Repeat("0a", 20) + ".safetensors"
	for _, file := range []string{name, ".begun-1-" + name, "..begun-1-" + name + ".overwire-0a1b", "model.safetensors",
		name + ".bak", strings.Repeat("0a", 20) + ".txt"} {
		if err := os.WriteFile(filepath.Join(folder, file), make([]byte, 1000), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if out := must(t, "cache", "list", folder); !strings.Contains(out, name) || !strings.Contains(out, "1 file, 1.0 kB kept") {
		t.Errorf("list printed %q", out)
	}
	if out := must(t, "cache", "clear", folder); !strings.Contains(out, "3 files, 3.0 kB removed") {
		t.Errorf("clear printed %q", out)
	}
	left, err := os.ReadDir(folder)
	if err != nil || len(left) != 3 {
		t.Errorf("left: %v, %v", left, err)
	}
	if out := must(t, "cache", "list", filepath.Join(folder, "none")); !strings.Contains(out, "0 files") {
		t.Errorf("list of a missing folder printed %q", out)
	}
	t.Setenv("OVERWIRE_PREPARED", folder)
	if status, _, _ := overwire("cache", "remove"); status != ExitUsage {
		t.Errorf("status %d", status)
	}
}
