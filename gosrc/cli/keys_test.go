package cli

import (
	"bytes"
	"encoding/hex"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// Keys and passwords come from files and variables, never from the command line, and no message shows them. A file can
// only be decrypted with the key that encrypted it.
func TestKeys(t *testing.T) {
	plain := made(t, "llama-bf16")
	dir := t.TempDir()
	at := func(name string) string { return filepath.Join(dir, name) }
	write := func(name, text string) string {
		if err := os.WriteFile(at(name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return "file:" + at(name)
	}
	digits := strings.Repeat("0123456789abcdef", 4)
	raw, _ := hex.DecodeString(digits)
	env := Env{Secrets: map[string]string{"THE_KEY": digits, "OTHER": strings.Repeat("00", 32), "WORDS": "planted words"}}
	run := func(argv ...string) (int, string) {
		var out, stderr bytes.Buffer
		status := Main(t.Context(), nil, argv, &out, &stderr, env)
		for _, secret := range []string{digits, string(raw), "planted"} {
			if strings.Contains(out.String()+stderr.String(), secret) {
				t.Errorf("overwire %q shows a secret", argv)
			}
		}
		return status, stderr.String()
	}
	key, text, words := write("raw", string(raw)), write("hex", digits+"\n"), write("words", "planted words\n")
	pipe := at("pipe")
	if err := unix.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	sealed, open, again, back := at("sealed.tensors"), at("open.tensors"), at("again.tensors"), at("back.safetensors")
	for _, c := range []struct {
		status int
		says   string
		argv   []string
	}{
		{ExitOK, "", []string{"convert", plain, "-o", sealed, "--encrypt-key", key}},
		{ExitOK, "", []string{"inspect", sealed}},
		{ExitOK, "", []string{"convert", plain, "-o", open}},
		{ExitOK, "", []string{"inspect", sealed, "--digests", "--decrypt-key", key}},
		{ExitBad, "no key was given", []string{"verify", sealed}},
		{ExitOK, "", []string{"verify", sealed, "--decrypt-key", text}},
		{ExitOK, "", []string{"load", sealed, "--decrypt-key=env:THE_KEY"}},
		{ExitBad, "the key is wrong", []string{"verify", sealed, "--decrypt-key", "env:OTHER"}},
		{ExitBad, "a key that does not come from a password", []string{"verify", sealed, "--decrypt-password", words}},
		{ExitOK, "", []string{"convert", sealed, "-o", again, "--decrypt-key", key, "--encrypt-password", words}},
		{ExitOK, "", []string{"decompress", again, "-o", back, "--decrypt-password", "env:WORDS"}},
		{ExitOK, "", []string{"diff", plain, sealed, "--decrypt-key", key, "--exit-code"}},
		{ExitOK, "", []string{"diff", sealed, plain, "--decrypt-key", key, "--exit-code"}},
		{ExitOK, "", []string{"diff", open, sealed, "--decrypt-key", key, "--exit-code"}},
		{ExitBad, "not encrypted", []string{"diff", plain, plain, "--decrypt-key", key}},
		{ExitBad, "the key is wrong", []string{"diff", plain, sealed, "--decrypt-key", "env:OTHER"}},
		{ExitUsage, "list of processes", []string{"verify", sealed, "--decrypt-key", digits}},
		{ExitUsage, "list of processes", []string{"verify", sealed, "--decrypt-password=planted"}},
		{ExitUsage, "cannot be combined", []string{"verify", sealed, "--decrypt-key", key, "--decrypt-password", words}},
		{ExitUsage, "32 bytes", []string{"verify", sealed, "--decrypt-key", words}},
		{ExitUsage, "not set", []string{"verify", sealed, "--decrypt-key", "env:UNSET"}},
		{ExitUsage, "empty", []string{"verify", sealed, "--decrypt-password", write("nothing", "\n")}},
		{ExitNotFound, "absent", []string{"verify", sealed, "--decrypt-key", "file:" + at("absent")}},
		{ExitUsage, "not a regular file", []string{"verify", sealed, "--decrypt-key", "file:" + pipe}},
		{ExitUsage, "not a regular file", []string{"verify", sealed, "--decrypt-password", "file:/dev/zero"}},
		{ExitUsage, "only .tensors", []string{"convert", plain, "-o", at("x.safetensors"), "--encrypt-key", key}},
		{ExitUsage, "not folders", []string{"convert", sealed, "-o", mkdir(t, at("dir.tensors")), "--decrypt-key", key, "--encrypt-key", key}},
		{ExitUsage, "no option", []string{"decompress", sealed, "-o", at("y"), "--encrypt-key", key}},
	} {
		if status, stderr := run(c.argv...); status != c.status || !strings.Contains(stderr, c.says) {
			t.Errorf("overwire %q: status %d, want %d; %q, want %q", c.argv, status, c.status, stderr, c.says)
		}
	}
	a, _ := os.ReadFile(plain)
	b, _ := os.ReadFile(back)
	if len(a) == 0 || !sameTensors(t, plain, back) {
		t.Errorf("the restored tensors differ: %d and %d bytes", len(a), len(b))
	}
	if s, _ := os.ReadFile(sealed); bytes.Contains(s, a[len(a)-4096:]) {
		t.Error("the encrypted file has plain bytes")
	}
}

func mkdir(t *testing.T, path string) string {
	t.Helper()
	if err := os.Mkdir(path, 0o700); err != nil {
		t.Fatal(err)
	}
	return path
}

// sameTensors compares two plain files by their compressed form, which depends only on the tensors.
func sameTensors(t *testing.T, a, b string) bool {
	t.Helper()
	var all [2][]byte
	for i, path := range []string{a, b} {
		to := filepath.Join(t.TempDir(), "x.tensors")
		must(t, "convert", path, "-o", to)
		var err error
		if all[i], err = os.ReadFile(to); err != nil {
			t.Fatal(err)
		}
	}
	return bytes.Equal(all[0], all[1])
}
