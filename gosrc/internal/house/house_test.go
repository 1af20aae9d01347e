package house

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// The repository follows every rule.
func TestHouse(t *testing.T) {
	tree := read(t, filepath.Join("..", "..", ".."))
	if len(tree.Packages) < 5 {
		t.Fatalf("only %d packages found: is this the repository?", len(tree.Packages))
	}
	for name, rule := range Rules {
		t.Run(name, func(t *testing.T) {
			for _, f := range rule(tree) {
				t.Error(f)
			}
		})
	}
}

// Every rule finds exactly the faults of the bad tree, with their locations and a reason.
func TestBadTree(t *testing.T) {
	tree := read(t, filepath.Join("testdata", "bad"))
	want := map[string][]string{
		"imports":          {"gosrc/codec/codec.go:4", "gosrc/codec/codec.go:5", "gosrc/util"},
		"cgo":              {"gosrc/codec/codec.go:3"},
		"package comments": {"gosrc/codec", "gosrc/util"},
		"package names":    {"gosrc/util"},
		"go statements":    {"gosrc/codec/codec.go:15"},
		"environment":      {"gosrc/codec/codec.go:16"},
		"file writing":     {"gosrc/codec/codec.go:19"},
		"init functions":   {"gosrc/codec/codec.go:13"},
		"printing":         {"gosrc/codec/codec.go:17"},
		"test packages":    {"gosrc/codec/codec.go:10"},
		"file lengths":     {"python/overwire/long.py"},
		"function lengths": {"gosrc/codec/long.go:82"},
		"struct sizes":     {"gosrc/codec/codec.go:25", "gosrc/codec/parts.go:5"},
		"method files":     {"codec.Chunk", "tensor.Index"}, // one is in the table, but not in this tree
		"package lengths":  {"cli", "gosrc/tensor"},         // one is in the table, but short in this tree
		"architecture":     {"ARCHITECTURE.md", "ARCHITECTURE.md", "ARCHITECTURE.md"},
		"python printing":  {"python/overwire/compat/nyacomp.py:4"},
		"machine paths":    {"README.md:2"},
		"words":            {"README.md:3", "gosrc/codec/codec.go:22", "gosrc/codec/codec.go:22", "gosrc/codec/codec.go:23"},
		"duties": {"gosrc/codec/codec.go", "gosrc/codec/long.go", "gosrc/tensor/a.go", "gosrc/tensor/b.go", "gosrc/tensor/c.go", "gosrc/tensor/d.go",
			"gosrc/tensor/e.go", "gosrc/tensor/f.go", "python/overwire/compat/nyacomp.py",
			"python/overwire/compat/tensorizer.py", "python/overwire/long.py", "python/overwire/right.py"},
		"one meaning": {"gosrc/util/b.go:4"},
	}
	for name, rule := range Rules {
		t.Run(name, func(t *testing.T) {
			var got []string
			for _, f := range rule(tree) {
				got = append(got, f.Where)
				if f.What == "" || len(f.Why) < 20 {
					t.Errorf("%v lacks a description or a reason", f)
				}
			}
			slices.Sort(got)
			if !slices.Equal(got, want[name]) {
				t.Errorf("found %q, want %q", got, want[name])
			}
		})
	}
}

// Every package that the table of packages mentions is also in the table.
func TestTableIsComplete(t *testing.T) {
	for pkg, list := range mayImport {
		for _, p := range list {
			stem := strings.TrimSuffix(p, "/...")
			_, known := mayImport[stem]
			if !known && stem != "internal" {
				t.Errorf("%s may import %s, which is not in the table", pkg, stem)
			}
		}
	}
	for _, pkg := range append(slices.Clone(cgoPackages), vague...) {
		if strings.Contains(pkg, " ") {
			t.Errorf("%q is not a package", pkg)
		}
	}
}

// read reads a tree. The bad tree is copied and its long files are generated, so that testdata need not contain
// them.
func read(t *testing.T, root string) *Tree {
	t.Helper()
	if filepath.Base(root) == "bad" {
		tmp := t.TempDir()
		if err := os.CopyFS(tmp, os.DirFS(root)); err != nil {
			t.Fatal(err)
		}
		write := func(name, first string, n int) {
			body := first + strings.Repeat("\n", n-1)
			if err := os.MkdirAll(filepath.Dir(filepath.Join(tmp, name)), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(tmp, name), []byte(body), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		write("python/overwire/long.py", "x = 1\n", 601)
		write("python/overwire/right.py", "x = 1\n", 600)
		write("gosrc/codec/long.go", "package codec\n\nfunc right() {"+strings.Repeat("\n", 78)+"\n}; func wrong() {"+strings.Repeat("\n", 79)+"\n}", 2)
		for _, f := range []string{"a", "b", "c", "d", "e", "f"} {
			write("gosrc/tensor/"+f+".go", "package tensor\n", 600)
		}
		write("gosrc/tensor/doc.go", "// Package tensor is too long.\npackage tensor\n", 2)
		root = tmp
	}
	tree, err := Read(root)
	if err != nil {
		t.Fatal(err)
	}
	return tree
}
