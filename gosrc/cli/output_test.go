package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// File names, file contents, and errors about them cannot control the terminal. JSON keeps the exact names.
func TestNamesCannotControlTheTerminal(t *testing.T) {
	dir := t.TempDir()
	name := "m\x1b]0;OWNED\x07\x1b[31m\u202e\u009b\n\x7f"
	shown := `m\u001b]0;OWNED\u0007\u001b[31m\u202e\u009b\u000a\u007f`
	b, err := os.ReadFile(made(t, "llama-bf16"))
	if err != nil {
		t.Fatal(err)
	}
	for file, data := range map[string]string{name + ".safetensors": string(b), name + ".gguf": "0123456789",
		name + ".txt": "x", name + ".bad.safetensors": "junkjunkjunk"} {
		if err := os.WriteFile(filepath.Join(dir, file), []byte(data), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	whole := filepath.Join(dir, name+".safetensors")
	for _, argv := range [][]string{
		{"inspect", whole}, {"verify", whole}, {"load", whole},
		{"compress", whole, "-o", filepath.Join(t.TempDir(), name+".safetensors")},
		{"inspect", "--json", whole}, {"inspect", filepath.Join(dir, name+".bad.safetensors")},
		{"inspect", "--json", filepath.Join(dir, name+".bad.safetensors")},
		{"inspect", filepath.Join(dir, name+"none")}, {name}, {"inspect", "--" + name}, {"help", name},
	} {
		var out, failure bytes.Buffer
		Main(context.Background(), nil, argv, &out, &failure, Env{})
		all := out.String() + failure.String()
		if strings.ContainsAny(all, "\x1b\x07\u202e\u009b\x7f") || strings.Contains(all, "OWNED\n") {
			t.Errorf("%q: %q", argv, all)
		}
		if argv[0] == "inspect" && argv[1] == whole && !strings.Contains(all, shown) {
			t.Errorf("%q does not show the name: %q", argv, all)
		}
		var doc struct{ Sources []struct{ URI string } }
		if argv[len(argv)-1] == whole && slices.Contains(argv, "--json") {
			if err := json.Unmarshal(out.Bytes(), &doc); err != nil || len(doc.Sources) != 1 ||
				doc.Sources[0].URI != whole {
				t.Errorf("%q: %v, %q", argv, err, out.String())
			}
		}
	}
}

// Text from a file does not break a table.
func TestSafe(t *testing.T) {
	if got := safe("a\x1b[31m\u009bb\nc\xe9\x9b"); got != `a\u001b[31m\u009bb\u000ac`+"\xe9"+`\x9b` {
		t.Errorf("%q", got)
	}
	if got := safe(strings.Repeat("é", 300)); len([]rune(got)) != 203 {
		t.Errorf("%d runes", len([]rune(got)))
	}
}

// The progress line shows the bytes, the rate and the time left.
func TestProgressLine(t *testing.T) {
	for _, c := range []struct {
		done, total int64
		d           time.Duration
		want        string
	}{
		{0, 0, time.Second, ""},
		{1e9, 4e9, 2 * time.Second, "load  1.0 GB of 4.0 GB  0.50 GB/s  6s left"},
		{4e9, 4e9, 2 * time.Second, "load  4.0 GB of 4.0 GB  2.00 GB/s"},
	} {
		if got := progressLine("load", c.done, c.total, c.d); got != c.want {
			t.Errorf("%q, want %q", got, c.want)
		}
	}
}

// If its reader closes the pipe, a command ends and leaves no file.
func TestReaderGone(t *testing.T) {
	folder := t.TempDir()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	argv := []string{"bench", "--size", "64MB", "--dir", folder}
	_ = r.Close()
	var messages bytes.Buffer
	if status := Main(t.Context(), nil, argv, w, &messages, Env{}); status != ExitPipe || messages.Len() > 0 {
		t.Errorf("status %d, %s", status, messages.String())
	}
	if left, err := os.ReadDir(folder); err != nil || len(left) > 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
	if status := Main(t.Context(), nil, []string{"--version"}, io.Discard, w, Env{}); status != ExitOK {
		t.Errorf("stderr is closed, but nothing is printed there: status %d", status)
	}
	if status := Main(t.Context(), nil, []string{"squash"}, io.Discard, w, Env{}); status != ExitPipe {
		t.Errorf("stderr is closed: status %d", status)
	}
}
