package knob

import (
	"go/ast"
	"go/parser"
	"go/token"
	"strings"
	"testing"
)

func load(t *testing.T, env map[string]string) []string {
	t.Helper()
	t.Cleanup(func() { Load(nil) })
	return Load(env)
}

// Values, aliases, precedence and invalid values give the documented settings for each environment.
func TestLoad(t *testing.T) {
	preload := func() any { return Preload.Get() }
	threads := func() any { return Threads.Get() }
	log := func() any { return Log.Get() }
	off := func() any { return NoPreload.Get() }
	for _, c := range []struct {
		name string
		env  map[string]string
		get  func() any
		want any
		warn string // part of the only warning; "" if there is none
	}{
		{"nothing set", nil, preload, "", ""},
		{"our name", map[string]string{"OVERWIRE_PRELOAD": "a"}, preload, "a", ""},
		{"older name", map[string]string{"PRELOAD_PATH": "b"}, preload, "b", ""},
		{"ours wins", map[string]string{"OVERWIRE_PRELOAD": "a", "PRELOAD_PATH": "b"}, preload, "a", ""},
		{"empty is unset", map[string]string{"OVERWIRE_PRELOAD": "", "PRELOAD_PATH": "b"}, preload, "b", ""},
		{"number", map[string]string{"NUM_THREADS": " 8 "}, threads, 8, ""},
		{"word for a number", map[string]string{"NUM_THREADS": "many"}, threads, 0, `NUM_THREADS="many" ignored`},
		{"negative", map[string]string{"OVERWIRE_THREADS": "-1"}, threads, 0, "expected a number from 0 to 1024"},
		{"beyond int64", map[string]string{"OVERWIRE_THREADS": "99999999999999999999"}, threads, 0, "OVERWIRE_THREADS"},
		{"yes", map[string]string{"NO_PRELOAD": "yes"}, off, true, ""},
		{"zero is no", map[string]string{"NO_PRELOAD": "0"}, off, false, ""},
		{"LOAD_UNCOMPRESSED stops the preload", map[string]string{"LOAD_UNCOMPRESSED": "1"}, off, true, ""},
		{"neither", map[string]string{"OVERWIRE_NO_PRELOAD": "perhaps"}, off, false, "expected yes or no"},
		{"DEBUG", map[string]string{"DEBUG": "true"}, log, "debug", ""},
		{"DEBUG=0", map[string]string{"DEBUG": "0"}, log, "warning", ""},
		{"someone else's DEBUG", map[string]string{"DEBUG": "app:*"}, log, "warning", ""},
		{"SILENT", map[string]string{"SILENT": "1"}, log, "silent", ""},
		{"choice in capitals", map[string]string{"OVERWIRE_LOG": "ERROR"}, log, "error", ""},
		{"no such choice", map[string]string{"OVERWIRE_LOG": "loud"}, log, "warning", "expected one of warning, debug"},
		{"a misspelled setting", map[string]string{"OVERWIRE_TREADS": "4"}, threads, 0,
			"OVERWIRE_TREADS is not a setting of this version (did you mean OVERWIRE_THREADS?"},
		{"no such setting", map[string]string{"OVERWIRE_XYZ": "4"}, threads, 0,
			"OVERWIRE_XYZ is not a setting of this version (see"},
		{"tests' own", map[string]string{"OVERWIRE_TEST_DIR": "x"}, threads, 0, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			warnings := load(t, c.env)
			if got := c.get(); got != c.want {
				t.Errorf("value %v, want %v", got, c.want)
			}
			if all := strings.Join(warnings, "\n"); (c.warn == "") != (all == "") || !strings.Contains(all, c.warn) {
				t.Errorf("warnings %q, want %q", all, c.warn)
			}
		})
	}
}

// A second Load discards the values of the first one.
func TestLoadReplaces(t *testing.T) {
	load(t, map[string]string{"OVERWIRE_THREADS": "3"})
	if from := Threads.row().From; from != "OVERWIRE_THREADS" || Threads.Get() != 3 {
		t.Fatalf("%q %v", from, Threads.Get())
	}
	Load(map[string]string{})
	if from := Threads.row().From; from != "" || Threads.Get() != 0 {
		t.Errorf("kept %q %v", from, Threads.Get())
	}
}

// Every declared knob is in the table once, its name begins with OVERWIRE_, and its description is one
// sentence.
func TestTable(t *testing.T) {
	file, err := parser.ParseFile(token.NewFileSet(), "table.go", nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	declared := 0
	ast.Inspect(file, func(n ast.Node) bool {
		if call, ok := n.(*ast.CallExpr); ok {
			if f, ok := call.Fun.(*ast.Ident); ok {
				switch f.Name {
				case "text", "number", "choice", "flag":
					declared++
				}
			}
		}
		return true
	})
	rows := Table()
	if len(rows) != declared {
		t.Errorf("%d knobs declared, %d in the table", declared, len(rows))
	}
	seen := map[string]bool{}
	for _, r := range rows {
		for _, name := range append([]string{r.Name}, r.Aliases...) {
			if seen[name] {
				t.Errorf("%s is in the table twice", name)
			}
			seen[name] = true
		}
		if !strings.HasPrefix(r.Name, prefix) {
			t.Errorf("%s does not begin with %s", r.Name, prefix)
		}
		if !strings.HasSuffix(r.Doc, ".") || strings.Contains(strings.TrimSuffix(r.Doc, "."), ". ") {
			t.Errorf("%s: %q is not one sentence", r.Name, r.Doc)
		}
		if len(r.Doc) > 120 || r.Page == "" {
			t.Errorf("%s: %d characters, page %q: want at most 120, and a page", r.Name, len(r.Doc), r.Page)
		}
		if r.From != "" || r.Value != r.Default {
			t.Errorf("%s is set before any Load", r.Name)
		}
	}
}

// Rows name the variable that set the value.
func TestRowsSayFrom(t *testing.T) {
	load(t, map[string]string{"PRELOAD_PATH": "x.safetensors"})
	for _, r := range Table() {
		if r.Name == "OVERWIRE_PRELOAD" && (r.From != "PRELOAD_PATH" || r.Value != "x.safetensors") {
			t.Errorf("%+v", r)
		}
	}
}
