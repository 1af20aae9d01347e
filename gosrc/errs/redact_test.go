package errs

import (
	"errors"
	"fmt"
	"strings"
	"testing"
)

// RedactURI removes the whole user part and query of a URI, whatever they contain, and nothing else.
func TestRedactURI(t *testing.T) {
	for uri, want := range map[string]string{
		"http://host:9/m?user=a@b&token=S":            "http://***",
		"http://host/m?user=a@b&token=S":              "http://host/m?***",
		"http://user:p@ss/w:rd@host/a/m":              "http://***@host/a/m",
		"http://user:p@host:80/m@v1?x":                "http://***@v1?***",
		"http://token@host:80/m@v1":                   "http://***@host:80/m@v1",
		"redis://:my pass@host/k":                     "redis://***@host/k",
		"redis://:pa/ss@host:6379/k":                  "redis://***@host:6379/k",
		"redis://u:12/3@host/k":                       "redis://***@host/k",
		"rediss://u:pa%2Fss%40x@host/k":               "rediss://***@host/k",
		"redis://u:p?w@host/k":                        "redis://***",
		"redis://u:p#w@host/k":                        "redis://***",
		`redis://:"quoted'pass"@host/k`:               "redis://***@host/k",
		"redis://:pass\nword@host/k":                  "redis://***@host/k",
		"s3://AKIAOVERWIRETESTKEY1:a/b c@bucket/k":    "s3://***@bucket/k",
		"s3://bucket/a b/model@v1":                    "s3://bucket/a b/model@v1",
		"s3://bucket/k?versionId=x":                   "s3://bucket/k?***",
		"hf://org/name/m.safetensors@refs/pr/1":       "hf://org/name/m.safetensors@refs/pr/1",
		"hf://org/hf_abcdefghijklmnop/m":              "hf://org/***/m",
		"HTTPS://U:P@h/":                              "HTTPS://***@h/",
		"https://h/m#part":                            "https://h/m?***",
		"http://[::1]:8080/m":                         "http://[::1]:8080/m",
		"weights, see http://u:p@h/m":                 "weights, see http://***@h/m",
		"/data/monkey/token=abc/signature: x":         "/data/monkey/token=abc/signature: x",
		"/data/a@b?c#d":                               "/data/a@b?c#d",
		"./http://u:p@h":                              "./http://u:p@h",
		"file:///tmp/password=x":                      "file:///tmp/password=x",
		"":                                            "",
		"http://host:9/with=equals/api_key=S3cretKey": "http://host:9/with=equals/api_key=***",
	} {
		got := RedactURI(uri)
		if got != want {
			t.Errorf("%q: %q, want %q", uri, got, want)
		}
		if again := RedactURI(got); again != got {
			t.Errorf("%q: first %q, then %q", uri, got, again)
		}
	}
}

// Ordinary words in sentences are not secrets.
func TestRedactWords(t *testing.T) {
	for _, text := range []string{
		"--decrypt-password: environment variable WORDS is not set", "invalid signature: self-signed certificate", "a file called signature: x",
		"open http://host/m: not found", "see https://host/a, or https://host/b.", "the session token: missing", "monkey=1", "keyboard: qwerty",
	} {
		if got := Redact(text); got != text {
			t.Errorf("%q: %q", text, got)
		}
	}
	for text, want := range map[string]string{
		"signature: 5f3a": "signature: ***", "password: Hunter": "password: ***", "password: hunter2": "password: ***", "password=hunter": "password=***",
		`"password": "hunter"`: `"password": "***"`, "Get http://u:p@h/m?sig=x: EOF": "Get http://***@h/m?***: EOF",
	} {
		if got := Redact(text); got != want {
			t.Errorf("%q: %q, want %q", text, got, want)
		}
	}
}

// A message contains no credentials of URIs in the error at any depth, even if the reason repeats a URI. Local
// paths do not change.
func TestMessage(t *testing.T) {
	const uri = "redis://:my secret/word@host/k"
	inner := &At{Verb: "read", Source: uri, Chunk: -1, Offset: 7, Err: New(ErrIO, "no answer from %s for password=hunter", uri)}
	for _, err := range []error{inner, fmt.Errorf("once: %w", inner),
		&At{Verb: "load", Source: "/a/signature: 1", Chunk: -1, Offset: -1, Err: fmt.Errorf("twice: %w", inner)},
		New(ErrIO, "%v", inner),
	} {
		for _, text := range []string{Message(err), Text(err)} {
			for _, secret := range []string{"secret", "word@", "hunter"} {
				if strings.Contains(text, secret) {
					t.Errorf("%q is in %s", secret, text)
				}
			}
		}
	}
	if got := Message(inner); got != "read redis://***@host/k @7: i/o error: no answer from redis://***@host/k for password=***" {
		t.Error(got)
	}
	if got := Message(&At{Verb: "open", Source: "/a/signature: 1", Chunk: -1, Offset: -1, Err: ErrNotFound}); got != "open /a/signature: 1: not found" {
		t.Error(got)
	}
	if got := Message(errors.New("token is http://u:p@h")); got != "token is http://***@h" {
		t.Error(got)
	}
}

// RedactURI leaves no password in a URI, in whatever part of it.
func FuzzRedactURI(f *testing.F) {
	for _, word := range []string{"p@ss", "pa/ss", "pa ss", "pa%2Fss", "pa?ss", "pa#ss", `pa"ss'`, "12/34", "://x", "a@b&token=c", "pass\n", "[::1]", "?@", "y?"} {
		f.Add(word)
	}
	f.Fuzz(func(t *testing.T, word string) {
		if len(word) < 2 {
			t.Skip()
		}
		for _, parts := range [][2]string{
			{"redis://:", "@host:6379/key"}, {"http://user:", "@host/key"}, {"s3://name:", "@bucket/key"}, {"http://host/key?a=b&token=", ""},
			{"http://host:80/key?a@b&token=", "&c"}, {"https://host/key#", ""},
		} {
			uri := parts[0] + word + parts[1]
			got := RedactURI(uri)
			// The result may contain text that also occurs around the password.
			if frame := "://***@host:6379/key ://***@bucket/key host/key?***"; strings.Contains(got, word) && !strings.Contains(parts[0]+parts[1]+frame, word) {
				t.Errorf("%q: %q", uri, got)
			}
			if again := RedactURI(got); again != got {
				t.Errorf("%q: first %q, then %q", uri, got, again)
			}
		}
	})
}

// redactPlainly is the twin of Redact that runs every regular expression.
func redactPlainly(text string) string {
	uri, others := patterns()
	text = uri.ReplaceAllStringFunc(text, func(s string) string {
		end := len(strings.TrimRight(s, ":,;.)"))
		return bareURI(s[:end]) + s[end:]
	})
	for _, s := range others {
		text = s.re.ReplaceAllString(text, s.with)
	}
	return text
}

// Redact skips a regular expression only if it does not match.
func FuzzRedact(f *testing.F) {
	for _, text := range []string{
		"open http://u:p@h/m?x=y#z, see", "Cookie: a", "PROXY-authorization = b", "bearer abc", "Bearer\n tok", "x-amz-credential=S3",
		`"api_KEY" : "v"`, "key: K9", "password\t=x", "pa\u017fsword=x", "to\u212aen=y hf_to\u212aen: 1", "AKIAOVERWIRETESTKEY1", "hf_abcdefghijklmnop",
		"ghs_abcdefghijklmnop", "github_pat_abcdefghijklmnop", "glpat-abcdefghijklmnop", "xoxp-abcdefghijklmnop", "sk-abcdefghijklmnop", "AIzaabcdefghijklmnop",
		"eyJabcdefgh.abcdefgh.x", "s3://bucket/tokenizer/model.safetensors", "a=b token", "passwd:1", "\xff token=x",
	} {
		f.Add(text)
		f.Add(strings.ToUpper(text))
	}
	f.Fuzz(func(t *testing.T, text string) {
		if got, want := Redact(text), redactPlainly(text); got != want {
			t.Errorf("%q: %q, want %q", text, got, want)
		}
	})
}

func BenchmarkRedact(b *testing.B) {
	for _, text := range []string{"s3://bucket/models/llama/model-00001-of-00030.safetensors", "hf://org/name/tokenizer.json",
		"read s3://bucket/m.safetensors tensor \"a.b\" @4096: i/o error: connection refused", "https://h/m?X-Amz-Signature=abc"} {
		b.Run(text, func(b *testing.B) {
			for b.Loop() {
				_ = RedactURI(text)
			}
		})
	}
}
