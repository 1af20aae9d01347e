//go:build !nostores

package cli

import (
	"encoding/json"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/overwire/overwire/gosrc/source/sourcetest"
)

// Files can be written to a store and read back. Nothing in the store is overwritten without --force. A presigned URL
// returns the compressed file.
func TestStore(t *testing.T) {
	s := sourcetest.StartS3(t, false)
	b, _ := json.Marshal(s.Options())
	storage := "--storage=" + string(b)
	plain := made(t, "llama-bf16")
	must(t, "compress", plain, "-o", "s3://models/m.safetensors", storage)
	if status, _, stderr := overwire("compress", plain, "-o", "s3://models/m.safetensors", storage); status == 0 ||
		!strings.Contains(stderr, "--force") {
		t.Errorf("status %d, %s", status, stderr)
	}
	must(t, "compress", "--force", plain, "-o", "s3://models/m.safetensors", storage)
	if out := must(t, "verify", "s3://models/m.safetensors", storage); !strings.Contains(out, "contents verified") {
		t.Error(out)
	}
	back := plain + ".back"
	must(t, "decompress", "s3://models/m.safetensors", "-o", back, storage)
	want, _ := os.ReadFile(plain)
	got, err := os.ReadFile(back)
	if err != nil || string(got) != string(want) {
		t.Fatalf("decompress restored %d bytes of %d: %v", len(got), len(want), err)
	}

	// A folder, with and without a trailing slash.
	folder := filepath.Join(t.TempDir(), "model")
	if err := os.Mkdir(folder, 0o755); err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{"model.safetensors": string(want), "config.json": "{}"} {
		if err := os.WriteFile(filepath.Join(folder, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	must(t, "compress", folder, "-o", "s3://models/packed", storage)
	for _, uri := range []string{"s3://models/packed", "s3://models/packed/"} {
		if status, _, stderr := overwire("compress", folder, "-o", uri, storage); status != ExitUsage ||
			!strings.Contains(stderr, "--force") {
			t.Errorf("%s: status %d, %s", uri, status, stderr)
		}
		must(t, "compress", folder, "-o", uri, storage, "-f")
		must(t, "load", uri, storage)
		must(t, "decompress", uri, "-o", folder+".back", storage, "-f")
		if text, err := os.ReadFile(filepath.Join(folder+".back", "config.json")); err != nil || string(text) != "{}" {
			t.Error(err)
		}
	}
	for _, uri := range []string{"s3://models/packed", "s3://models/packed/"} {
		brought := filepath.Join(t.TempDir(), "brought")
		must(t, "fetch", uri, "-o", brought, storage)
		if text, err := os.ReadFile(filepath.Join(brought, "config.json")); err != nil || string(text) != "{}" {
			t.Error(err)
		}
		must(t, "verify", brought)
		if status, _, stderr := overwire("fetch", uri, "-o", brought, storage); status != ExitUsage ||
			!strings.Contains(stderr, "--force") {
			t.Errorf("status %d, %s", status, stderr)
		}
		must(t, "fetch", uri, "-o", brought, storage, "-f")
	}
	if status, _, stderr := overwire("fetch", "s3://models/packed", storage); status != ExitUsage ||
		!strings.Contains(stderr, "is a folder: give -o") {
		t.Errorf("status %d, %s", status, stderr)
	}
	r, err := http.Get(strings.TrimSpace(must(t, "fetch", "s3://models/m.safetensors", "--presign", "600", storage)))
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	if n, _ := io.Copy(io.Discard, r.Body); r.StatusCode != http.StatusOK || n == 0 || n >= int64(len(want)) {
		t.Errorf("status %d, %d bytes", r.StatusCode, n)
	}
}
