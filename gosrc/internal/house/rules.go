package house

// This file has the rules about Go packages and the sizes of files.

import (
	"fmt"
	"go/ast"
	"path"
	"slices"
	"strconv"
	"strings"
)

// Rules are the checks by name, for the tests to run one by one.
var Rules = map[string]func(*Tree) []Finding{
	"imports":          imports,
	"cgo":              cgo,
	"package comments": comments,
	"package names":    packageNames,
	"go statements":    goStatements,
	"environment":      environment,
	"file writing":     fileWriting,
	"init functions":   inits,
	"printing":         printing,
	"healing":          healing,
	"file lengths":     fileLengths,
	"function lengths": functionLengths,
	"package lengths":  packageLengths,
	"architecture":     architecture,
	"python printing":  pythonPrinting,
	"machine paths":    machinePaths,
	"words":            words,
	"duties":           duties,
	"one meaning":      oneType,
}

// matches reports whether a package matches one of the patterns.
func matches(pkg string, patterns []string) bool {
	return slices.ContainsFunc(patterns, func(p string) bool {
		if stem, ok := strings.CutSuffix(p, "/..."); ok {
			return pkg == stem || strings.HasPrefix(pkg, stem+"/")
		}
		return pkg == p
	})
}

func imports(t *Tree) (out []Finding) {
	for _, name := range t.names() {
		if _, ok := mayImport[name]; !ok {
			out = append(out, Finding{"gosrc/" + name, "this package is not in the table of packages",
				"every package has one duty and a written list of packages it may import: " +
					"add it to ARCHITECTURE.md and to gosrc/internal/house/table.go"})
		}
	}
	t.each(func(r *Package, f *File) {
		if _, ok := mayImport[r.Path]; !ok || f.Test {
			return // reported above; and tests may import any package
		}
		for _, spec := range f.AST.Imports {
			p, _ := strconv.Unquote(spec.Path.Value)
			if pkg, ok := strings.CutPrefix(p, module); ok {
				if pkg != r.Path && !matches(pkg, mayImport[r.Path]) {
					out = append(out, Finding{t.at(spec), fmt.Sprintf("%s imports %s", r.Path, pkg),
						"a package can be understood, tested and replaced alone only if it imports no more than the table allows; " +
							"leaves never import each other, and no package imports upwards"})
				}
				continue
			}
			if first, _, _ := strings.Cut(p, "/"); strings.Contains(first, ".") && !allowedModule(p, r.Path) {
				out = append(out, Finding{t.at(spec), fmt.Sprintf("%s imports %s", r.Path, p),
					"each foreign module is imported in one place, listed in gosrc/internal/house/table.go"})
			}
		}
	})
	return out
}

func allowedModule(imported, pkg string) bool {
	for mod, users := range modules {
		if imported == mod || strings.HasPrefix(imported, mod+"/") {
			return slices.ContainsFunc(users, func(u string) bool { return u == "" || matches(pkg, []string{u + "/..."}) })
		}
	}
	return false
}

func cgo(t *Tree) (out []Finding) {
	for _, name := range t.names() { // generated files too
		for _, f := range t.Packages[name].Files {
			for _, spec := range f.AST.Imports {
				if spec.Path.Value == `"C"` && !matches(name, cgoPackages) && !f.Ignored {
					out = append(out, Finding{t.at(spec), name + ` imports "C"`,
						"cgo stays in " + strings.Join(cgoPackages, ", ") +
							", so that everything else builds, tests and races with CGO_ENABLED=0"})
				}
			}
		}
	}
	return out
}

func comments(t *Tree) (out []Finding) {
	for _, name := range t.names() {
		r := t.Packages[name]
		var with []string
		code := 0
		for _, f := range r.Files {
			if f.Test || f.Ignored || f.Generated {
				continue
			}
			code++
			if f.AST.Doc != nil && strings.TrimSpace(f.AST.Doc.Text()) != "" {
				with = append(with, f.Path)
			}
		}
		if code > 0 && len(with) != 1 {
			out = append(out, Finding{"gosrc/" + name,
				fmt.Sprintf("%d package comments %s", len(with), strings.Join(with, " ")),
				"a package states its duty and its contract in one place"})
		}
	}
	return out
}

func packageNames(t *Tree) (out []Finding) {
	for _, name := range t.names() {
		if slices.Contains(vague, path.Base(name)) {
			out = append(out, Finding{"gosrc/" + name, "a package called " + path.Base(name),
				"a package is named by its duty; one for everything has none"})
		}
	}
	return out
}

func goStatements(t *Tree) (out []Finding) {
	t.each(func(r *Package, f *File) {
		// Packages for tests (sourcetest, codectest) are tests.
		if f.Test || strings.HasSuffix(r.Path, "test") || r.Path == "internal/spawn" {
			return
		}
		ast.Inspect(f.AST, func(n ast.Node) bool {
			if s, ok := n.(*ast.GoStmt); ok {
				out = append(out, Finding{t.at(s), "a bare go statement",
					"an unrecovered panic in any goroutine ends the Python process: start it with spawn.Go"})
			}
			return true
		})
	})
	return out
}

// calls reports every mention of pkg.name, for names in the list, where pkg is
// imported from path.
func calls(t *Tree, f *File, importPath string, names []string, found func(ast.Node, string)) {
	local := ""
	for _, spec := range f.AST.Imports {
		if p, _ := strconv.Unquote(spec.Path.Value); p == importPath {
			local = path.Base(p)
			if spec.Name != nil {
				local = spec.Name.Name
			}
		}
	}
	if local == "" {
		return
	}
	ast.Inspect(f.AST, func(n ast.Node) bool {
		if sel, ok := n.(*ast.SelectorExpr); ok {
			if id, ok := sel.X.(*ast.Ident); ok && id.Name == local && slices.Contains(names, sel.Sel.Name) {
				found(sel, local+"."+sel.Sel.Name)
			}
		}
		return true
	})
}

func environment(t *Tree) (out []Finding) {
	names := []string{"Getenv", "LookupEnv", "Environ", "Setenv", "Unsetenv", "Clearenv", "ExpandEnv"}
	t.each(func(r *Package, f *File) {
		if f.Test || r.Path == "knob" {
			return
		}
		for _, pkg := range []string{"os", "syscall", "golang.org/x/sys/unix"} {
			calls(t, f, pkg, names, func(n ast.Node, call string) {
				out = append(out, Finding{t.at(n), call,
					"inside Python, Go does not see os.environ: every variable is in the table of package knob"})
			})
		}
	})
	return out
}

func fileWriting(t *Tree) (out []Finding) {
	t.each(func(r *Package, f *File) {
		if f.Test || r.Path == "internal/atomicfile" || strings.HasSuffix(r.Path, "test") || mayWrite[r.Path] != "" {
			return
		}
		calls(t, f, "os", []string{"Create", "CreateTemp", "OpenFile", "WriteFile", "Rename", "Chmod"}, func(n ast.Node, call string) {
			out = append(out, Finding{t.at(n), call,
				"a file that is replaced keeps its mode, owner and link, and appears whole: write it with internal/atomicfile"})
		})
	})
	return out
}

func inits(t *Tree) (out []Finding) {
	t.each(func(r *Package, f *File) {
		for _, d := range f.AST.Decls {
			if fn, ok := d.(*ast.FuncDecl); ok && fn.Recv == nil && fn.Name.Name == "init" {
				out = append(out, Finding{t.at(fn), "an init function",
					"importing does no work and registers nothing behind the reader's back: use explicit tables"})
			}
		}
	})
	return out
}

func printing(t *Tree) (out []Finding) {
	t.each(func(r *Package, f *File) {
		if f.Test || strings.HasPrefix(r.Path, "bind/") || f.AST.Name.Name == "main" {
			return // bind passes the process's streams to cli; a program owns its process
		}
		found := func(n ast.Node, call string) {
			out = append(out, Finding{t.at(n), call,
				"the engine lives in someone else's process: results go to a writer that was passed in, messages to Python's logger"})
		}
		calls(t, f, "fmt", []string{"Print", "Printf", "Println"}, found)
		calls(t, f, "os", []string{"Stdout"}, found)
		if r.Path != "internal/spawn" {
			calls(t, f, "os", []string{"Stderr"}, found)
		}
		calls(t, f, "os", []string{"Exit"}, found)
		calls(t, f, "log", []string{"Print", "Printf", "Println", "Fatal", "Fatalf", "Fatalln", "Panic", "Panicf"}, found)
	})
	return out
}

func healing(t *Tree) (out []Finding) {
	t.each(func(r *Package, f *File) {
		if f.Test {
			return
		}
		calls(t, f, module+"internal/spawn", []string{"Heal"}, func(n ast.Node, call string) {
			out = append(out, Finding{t.at(n), call,
				"state that a panic left half-changed is not to be trusted again: only tests heal"})
		})
	})
	return out
}

func fileLengths(t *Tree) (out []Finding) {
	byTool := map[string]bool{}
	for _, r := range t.Packages {
		for _, f := range r.Files {
			byTool[f.Path] = f.Generated
		}
	}
	for _, p := range t.Texts {
		switch path.Ext(p) {
		case ".go", ".py", ".pyi", ".c", ".h", ".cu", ".cuh":
		default:
			continue
		}
		src := t.read(p)
		if byTool[p] || generated(src) || strings.Contains(head([]byte(src)), "Code generated") {
			continue
		}
		if n := lines([]byte(src)); n > maxFileLines {
			out = append(out, Finding{p, fmt.Sprintf("%d lines", n),
				fmt.Sprintf("a file is read in one sitting: at most %d lines", maxFileLines)})
		}
	}
	return out
}

func functionLengths(t *Tree) (out []Finding) {
	t.each(func(_ *Package, f *File) {
		if f.Test || f.Generated {
			return
		}
		for _, d := range f.AST.Decls {
			fn, ok := d.(*ast.FuncDecl)
			if !ok {
				continue
			}
			n := t.fset.Position(fn.End()).Line - t.fset.Position(fn.Pos()).Line + 1
			if n > maxFunctionLines {
				out = append(out, Finding{t.at(fn), fmt.Sprintf("%s has %d lines", fn.Name.Name, n),
					fmt.Sprintf("a function is read at a glance: at most %d lines", maxFunctionLines)})
			}
		}
	})
	return out
}

func packageLengths(t *Tree) (out []Finding) {
	over := map[string]bool{}
	for _, name := range t.names() {
		n := 0
		for _, f := range t.Packages[name].Files {
			if !f.Test && !f.Generated {
				n += f.Lines
			}
		}
		if n > maxPackageLines {
			over[name] = true
			if longPackages[name] == "" {
				out = append(out, Finding{"gosrc/" + name, fmt.Sprintf("%d lines without tests", n),
					fmt.Sprintf("a package of more than %d lines has two duties: split it, or give the reason in gosrc/internal/house/table.go", maxPackageLines)})
			}
		}
	}
	return append(out, stale(longPackages, over)...)
}

func stale(listed map[string]string, over map[string]bool) (out []Finding) {
	for name := range listed {
		if !over[name] {
			out = append(out, Finding{name, "listed as too long and is not (any more)",
				"an exception that is no longer needed hides the next one"})
		}
	}
	return out
}
