//go:build owfake

package cli

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/overwire/overwire/gosrc/device/cuda"
)

// The trace page of a load to a GPU has rows for its workers, copies and kernels.
func TestTraceFake(t *testing.T) {
	plain := made(t, "llama-bf16")
	small := filepath.Join(filepath.Dir(plain), "small.safetensors")
	must(t, "compress", plain, "-o", small)
	end := cuda.Fake(1 << 30)
	trace, page := small+".json", small+".html"
	must(t, "load", small, "--device", "cuda", "--trace", trace, "-j", "2")
	if left := end(); left != "" {
		t.Errorf("left behind: %s", left)
	}
	must(t, "inspect", trace, "--html", page)
	text, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{`"name":"worker `, `"name":"copies","device":true`, `"name":"kernels `, `"submit"`, `"copy"`, `"decode"`} {
		if !strings.Contains(string(text), want) {
			t.Errorf("no %s", want)
		}
	}
}
