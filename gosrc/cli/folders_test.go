package cli

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/overwire/overwire/gosrc/save"
)

// The sizes that compress prints for a folder count only weights. --verbose prints the size of auxiliary files
// separately, and the hashes.
func TestSums(t *testing.T) {
	dir := filepath.Dir(made(t, "llama-bf16"))
	if err := os.WriteFile(filepath.Join(dir, "tokenizer.json"), make([]byte, 9_000_000), 0o600); err != nil {
		t.Fatal(err)
	}
	out := must(t, "compress", dir, "-o", filepath.Join(t.TempDir(), "a"), "--verbose")
	for _, want := range []string{"2.0 MB -> 1.3 MB (67 %), 21 tensors, ", "1 auxiliary file copied, 9.0 MB\n", "sha256 of the original: "} {
		if !strings.Contains(out, want) {
			t.Errorf("no %q in:\n%s", want, out)
		}
	}
	packed := filepath.Join(t.TempDir(), "b")
	var rep save.Report
	if err := json.Unmarshal([]byte(must(t, "compress", dir, "-o", packed, "--json")), &rep); err != nil {
		t.Fatal(err)
	}
	if rep.BytesCopied != 9_000_000 || rep.BytesOut >= rep.BytesIn || rep.Ratio >= 0.7 {
		t.Errorf("%+v", rep)
	}
	out = must(t, "compress", dir, "-o", filepath.Join(t.TempDir(), "d"), "-v", "--no-sha256")
	if strings.Contains(out, "sha256 of the original: ") {
		t.Errorf("%q", out)
	}
	if out := must(t, "decompress", packed, "-o", filepath.Join(t.TempDir(), "c")); !strings.Contains(out, "1 file identical to the original (SHA-256)\n") {
		t.Error(out)
	}
	if out := must(t, "decompress", packed, "-o", filepath.Join(t.TempDir(), "d"), "-q"); out != "" {
		t.Error(out)
	}
	// If the output is one file, auxiliary files are listed as not copied.
	if out := must(t, "compress", dir, "-o", filepath.Join(t.TempDir(), "m.safetensors")); !strings.Contains(out, "not copied: "+filepath.Join(dir, "tokenizer.json")) {
		t.Error(out)
	}
}
