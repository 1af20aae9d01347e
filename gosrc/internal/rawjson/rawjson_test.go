package rawjson

import (
	"encoding/json"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"
)

type inner struct {
	Name  string            `json:"name"`
	Table map[string]string `json:"table"`
}

type outer struct {
	URIs   []string `json:"uris"`
	In     *inner   `json:"in"`
	All    []inner  `json:"all"`
	Any    any      `json:"any"`
	Count  []int64  `json:"count"`
	Hidden func()   `json:"-"`
	own    string
}

func TestBytes(t *testing.T) {
	// Every string is preserved byte for byte, at any depth, and different strings have different JSON.
	names := []string{
		"", "plain", "caf\xe9", "caf\ufffd", "caf\xef\xbf\xbd", "\x00e9", "\x00", "a\x00\xe9b", `\udce9`, `\\udce9`,
		`\ufffd`, "\\", "\\\xff", "\xff\\",
		"\u2028<&>\"", "\U0001F600", "\U00010080", "\xed\xa0\x80", "\xed\xb3\xa9", "\xf0\x9f\x98", "é\xc3", "\xc3",
		"\xa9", "\n\xe9\t", "\x7f\x80",
	}
	seen := map[string]string{}
	for _, name := range names {
		b, err := Marshal(name)
		if err != nil || !json.Valid(b) {
			t.Fatalf("%q: %s, %v", name, b, err)
		}
		if other, twice := seen[string(b)]; twice && other != name {
			t.Errorf("%q and %q have the same JSON %s", name, other, b)
		}
		seen[string(b)] = name
		v := outer{URIs: []string{name, "x"}, In: &inner{name, map[string]string{name: name, "k": name}},
			All: []inner{{Name: name}},
			Any: map[string]any{"deep": []any{name, 1.5, nil, true}}, Count: []int64{1, 2}, own: "kept"}
		if b, err = Marshal(v); err != nil {
			t.Fatal(err)
		}
		var got outer
		got.own = "kept"
		if err := Unmarshal(string(b), &got); err != nil {
			t.Fatalf("%s: %v", b, err)
		}
		if !reflect.DeepEqual(got, v) {
			t.Errorf("%q: %s gives %+v", name, b, got)
		}
		if v.URIs[0] != name || v.In.Name != name || v.In.Table[name] != name {
			t.Errorf("%q: Marshal changed its argument", name)
		}
	}
}

func TestRandomBytes(t *testing.T) {
	// Strings of random bytes are also preserved, as keys of an object.
	seed := uint64(time.Now().UnixNano())
	t.Log("seed", seed)
	r := rand.New(rand.NewPCG(seed, 1))
	alphabet := []byte("a\\u\"\x00dcef0\x80\xbf\xc3\xe9\xed\xa0\xf0\x9f\xff")
	for range 20_000 {
		b := make([]byte, r.IntN(12))
		for i := range b {
			b[i] = alphabet[r.IntN(len(alphabet))]
		}
		text, err := Marshal(map[string]string{string(b): "v"})
		if err != nil {
			t.Fatal(err)
		}
		var got map[string]string
		if err := Unmarshal(string(text), &got); err != nil || got[string(b)] != "v" {
			t.Fatalf("%q: %s gives %q, %v", b, text, got, err)
		}
	}
}

// Unknown keys at any depth, and a second value, are refused.
func TestRefusedKeys(t *testing.T) {
	type inner struct {
		Threads int `json:"threads"`
	}
	type request struct {
		Options inner            `json:"options"`
		Storage map[string]int64 `json:"storage"`
	}
	for text, says := range map[string]string{
		`{"options": {"threads": 3}, "storage": {"anything": 1}}`: "",
		`{"option": {"threads": 3}}`:                              `"option"`,
		`{"options": {"thread": 3}}`:                              `"thread"`,
		"{\"options\": {\"caf\xe9\": 3}}":                         "unknown field",
		`{} {}`:                                                   "more than one value",
	} {
		err := Unmarshal(text, new(request))
		if (err == nil) != (says == "") || err != nil && !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v, want %q", text, err, says)
		}
	}
}

func TestRefused(t *testing.T) {
	// A lone surrogate that does not represent a byte is refused, not replaced.
	for _, text := range []string{`"\ud800"`, `"\udc00"`, `"\udc7f"`, `"\udd00"`, `"\udfff"`, `"\ud800x"`,
		`"\ud83d\ud83d\ude00"`, `"\uD800"`} {
		var got string
		if err := Unmarshal(text, &got); err == nil {
			t.Errorf("%s: %q", text, got)
		}
	}
	for text, want := range map[string]string{`"\ud83d\ude00"`: "\U0001F600", `"\ud800\udc80"`: "\U00010080",
		`"\uDCE9"`: "\xe9", `"\\udce9"`: `\udce9`, `"\\\udce9"`: "\\\xe9", "\"caf\xe9\"": "caf\xe9",
		"\"\xc3\\udca9\"": "é"} {
		var got string
		if err := Unmarshal(text, &got); err != nil || got != want {
			t.Errorf("%s: %q, %v", text, got, err)
		}
	}
	for _, text := range []string{`"\udce9`, `"\ud`, `\`, `"\udc`, ``, "\"a\x00e9\""} {
		if err := Unmarshal(text, new(string)); err == nil {
			t.Errorf("no error for %q", text)
		}
	}
}

func TestPython(t *testing.T) {
	// The JSON text represents os.fsdecode of the bytes, and vice versa.
	python, err := exec.LookPath("python3")
	if err != nil {
		t.Skip("no python3 here")
	}
	names := []string{"caf\xe9", "\xe2\x82", "\xed\xa0\x80", "\xf0\x90\x80", "a\x80\xff", "caf\ufffd"}
	b, _ := Marshal(names)
	script := filepath.Join(t.TempDir(), "s.py")
	if err := os.WriteFile(script, []byte(strings.Join([]string{
		"import json, os, sys",
		"names = json.load(sys.stdin)",
		"print(json.dumps([os.fsencode(n).hex() for n in names] + [os.fsdecode(os.fsencode(n)) for n in names]))",
	}, "\n")), 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(python, "-X", "utf8", script)
	cmd.Stdin = strings.NewReader(string(b))
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	if err := Unmarshal(string(out), &got); err != nil {
		t.Fatal(err)
	}
	for i, name := range names {
		if got[len(names)+i] != name {
			t.Errorf("%q was read back as %q", name, got[len(names)+i])
		}
		if want := hexOf(name); got[i] != want {
			t.Errorf("Python reads %q as %s, want %s", name, got[i], want)
		}
	}
}

func hexOf(text string) string {
	const digits = "0123456789abcdef"
	var b []byte
	for i := range len(text) {
		b = append(b, digits[text[i]>>4], digits[text[i]&15])
	}
	return string(b)
}
