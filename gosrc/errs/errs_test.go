package errs

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"syscall"
	"testing"
)

// Class returns a different Python name for every sentinel, through any wrapping.
func TestClass(t *testing.T) {
	seen := map[string]bool{}
	for _, c := range classes {
		err := fmt.Errorf("outer: %w", &At{Verb: "read", Chunk: -1, Offset: -1, Err: New(c.Err, "why")})
		if got := Class(err); got != c.Python {
			t.Errorf("Class(%v) = %q, want %q", c.Err, got, c.Python)
		}
		if seen[c.Python] {
			t.Errorf("two classes have the exception %q", c.Python)
		}
		seen[c.Python] = true
	}
	if got := Class(errors.New("stray")); got != "EngineError" {
		t.Errorf("the class of an error without one is %q", got)
	}
}

// The text of an At is complete and contains no secrets of the source.
func TestAtText(t *testing.T) {
	err := &At{"decode", "https://u:p4ss@host/m.safetensors?sig=s3cret", "x", 17, 4096, New(ErrCorrupt, "checksum mismatch")}
	want := `decode https://***@host/m.safetensors?*** tensor "x" chunk 17 @4096: corrupt data: checksum mismatch`
	if err.Error() != want {
		t.Errorf("got  %s\nwant %s", err, want)
	}
	bare := &At{Verb: "open", Chunk: -1, Offset: -1, Err: ErrNotFound}
	if bare.Error() != "open: not found" {
		t.Errorf("got %q", bare)
	}
	for path, want := range map[string]string{
		"a": "open a: not found: no such file or directory",
		"b": "open a: not found: open b: no such file or directory", // for example a path in a folder
	} {
		err := &At{"open", "a", "", -1, -1, FromOS(&os.PathError{Op: "open", Path: path, Err: syscall.ENOENT})}
		if err.Error() != want || !errors.Is(err, syscall.ENOENT) {
			t.Errorf("got  %s\nwant %s", err, want)
		}
	}
	err = &At{"open", "a", "", -1, -1, FromOS(&os.PathError{Op: "open", Path: "a", Err: syscall.EACCES})}
	if err.Error() != "open a: permission denied: check its permissions and those of its folders" {
		t.Errorf("got %s", err)
	}
}

// FromOS adds a class to every system error and preserves the error.
func TestFromOS(t *testing.T) {
	for _, c := range []struct {
		err   error
		class error
	}{
		{syscall.ENOENT, ErrNotFound}, {syscall.ENOTDIR, ErrNotFound},
		{syscall.EACCES, ErrPermission}, {syscall.EPERM, ErrPermission}, {syscall.EROFS, ErrPermission},
		{syscall.EIO, ErrIO}, {syscall.ENOSPC, ErrIO}, {syscall.EMFILE, ErrIO}, {syscall.ENFILE, ErrIO},
		{syscall.EDQUOT, ErrIO}, {io.ErrUnexpectedEOF, ErrIO}, {errors.New("odd"), ErrIO},
		{syscall.ENOMEM, ErrMemory},
		{syscall.ETIMEDOUT, ErrTimeout}, {context.DeadlineExceeded, ErrTimeout}, {os.ErrDeadlineExceeded, ErrTimeout},
		{context.Canceled, ErrCancelled},
		{syscall.EINVAL, ErrArgument}, {syscall.EISDIR, ErrArgument},
		{syscall.ENOTSUP, ErrNotSupported},
	} {
		wrapped := &os.PathError{Op: "open", Path: "/x", Err: c.err}
		got := FromOS(wrapped)
		if !errors.Is(got, c.class) || !errors.Is(got, c.err) {
			t.Errorf("FromOS(%v) = %v, want class %v", c.err, got, c.class)
		}
		if again := FromOS(got); again != got {
			t.Errorf("FromOS wrapped %v twice", got)
		}
	}
	if FromOS(nil) != nil || FromFile(nil) != nil {
		t.Error("FromOS(nil) is an error")
	}
	if err := FromFile(syscall.EINVAL); !errors.Is(err, ErrIO) || !errors.Is(FromFile(syscall.EACCES), ErrPermission) {
		t.Errorf("FromFile(EINVAL) = %v", err)
	}
}

// Text is one line of JSON that merges all nested Ats. It omits unknown fields and contains no secrets.
func TestText(t *testing.T) {
	inner := &At{"decode", "", "", 3, 99, New(ErrCorrupt, "bad \"bytes\"\n\xff in s3://AKIAABCDEFGHIJKLMNOP:k/y@b/k")}
	err := &At{"load", "redis://:hunter2@host/0?password=hunter2", "läyer", -1, -1, fmt.Errorf("wrapped: %w", inner)}
	text := Text(err)
	body, ok := strings.CutPrefix(text, Prefix)
	if !ok || strings.Contains(text, "hunter2") || strings.Contains(text, "AKIA") || strings.ContainsRune(text, '\n') {
		t.Fatalf("Text: %s", text)
	}
	var got struct {
		Class, Message, Source, Tensor string
		Chunk, Offset                  int64
	}
	if err := json.Unmarshal([]byte(body), &got); err != nil {
		t.Fatal(err)
	}
	if got.Class != "CorruptError" || got.Tensor != "läyer" || got.Chunk != 3 || got.Offset != 99 ||
		got.Source != "redis://***@host/0?***" || !strings.HasPrefix(got.Message, "overwire: load redis://") {
		t.Errorf("Text: %+v", got)
	}
	for _, c := range []struct {
		err  error
		want string
	}{
		{&At{Verb: "decode", Source: "m.safetensors", Tensor: "x", Chunk: 17, Offset: 4096, Err: New(ErrCorrupt, "checksum mismatch")},
			`{"class":"CorruptError","message":"overwire: decode m.safetensors tensor \"x\" chunk 17 @4096: corrupt data: checksum mismatch","source":"m.safetensors","tensor":"x","chunk":17,"offset":4096}`},
		{&At{Verb: "open", Source: "f", Chunk: -1, Offset: -1, Err: ErrNotFound}, `{"class":"NotFoundError","message":"overwire: open f: not found","source":"f"}`},
		{fmt.Errorf("outer: %w", ErrTimeout), `{"class":"DeadlineError","message":"overwire: outer: timed out"}`},
		{&At{Verb: "index", Chunk: -1, Offset: 8, Err: OfRule("InvalidOffset", ErrFormat, "over %d", 7)},
			`{"class":"FormatError","message":"overwire: index @8: bad format: over 7","offset":8,"rule":"InvalidOffset"}`},
		{&Memory{Where: "cuda:0", Asked: 1, Free: -1, Total: -1},
			`{"class":"OutOfMemoryError","message":"overwire: out of memory: cuda:0: 1 bytes","asked":1,"device":"cuda:0"}`},
		{errors.New("of no class"), `{"class":"EngineError","message":"overwire: of no class"}`},
	} {
		if got := Text(c.err); got != Prefix+c.want {
			t.Errorf("\n got %s\nwant %s", got, Prefix+c.want)
		}
	}
}

// Redact removes every planted secret and does not change harmless texts.
func TestRedact(t *testing.T) {
	const canary = "cAnArY1234567890abcdef"
	for _, text := range []string{
		"https://user:" + canary + "@host/path",
		"https://user:p@" + canary + "/x@host/path",
		"https://" + canary + "@host/path",
		"s3://key:ab/" + canary + "@bucket/key",
		"redis://:" + canary + "@host:6379/0",
		"https://h/x?X-Amz-Signature=" + canary + "&X-Amz-Date=1",
		"https://h/x?token=" + canary + " and more",
		"https://h/x#" + canary,
		`Get "https://h/x?sig=` + canary + `": EOF`,
		"Authorization: Bearer " + canary,
		"authorization: Basic " + canary,
		`{"Authorization": "token ` + canary + `"}`,
		"sent bearer " + canary + ", got 401",
		"AWS_SECRET_ACCESS_KEY=" + canary,
		"aws_session_token = " + canary,
		`"secret_access_key": "` + canary + `"`,
		"X-Amz-Security-Token: " + canary,
		"HF_TOKEN=" + canary,
		"api_key=" + canary,
		"password: " + canary,
		"hf_" + canary, "ghp_" + canary, "sk-" + canary,
		"eyJ" + canary + "." + canary + "." + canary,
	} {
		if got := Redact(text); strings.Contains(got, canary) || strings.Contains(got, canary[4:]) {
			t.Errorf("Redact(%q) = %q", text, got)
		}
	}
	if got := Redact("id AKIAIOSFODNN7EXAMPLE used"); got != "id *** used" {
		t.Errorf("AWS id: %q", got)
	}
	for _, text := range []string{
		"", "model-00001-of-00002.safetensors", "/data/a b/x.safetensors",
		`model.embed_tokens.weight`, "s3://bucket/key/model.safetensors", "https://host:8080/path/x",
		"file:///tmp/x@2/model.safetensors",
		"decode model.safetensors chunk 17 @4096: checksum mismatch", "ghost", "mask_sk-1",
		"--decrypt-password: the variable WORDS is not set", "x509: invalid signature: parent certificate cannot sign this kind of certificate",
		"signature: x", "password: expected str, got a number",
	} {
		if got := Redact(text); got != text {
			t.Errorf("Redact(%q) = %q: removed text that is not secret", text, got)
		}
	}
	for _, text := range []string{"https://u:p@h/x?q", "Bearer abc", "a=b@c"} {
		if once := Redact(text); Redact(once) != once {
			t.Errorf("Redact is not stable on %q: %q, %q", text, once, Redact(once))
		}
	}
}
