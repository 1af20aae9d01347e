package house

// Checks Go packages and file sizes.

import (
	"fmt"
	"go/ast"
	"path"
	"slices"
	"strconv"
	"strings"
)

// Rules are the checks by name, so that tests can run them separately.
var Rules = map[string]func(*Tree) []Finding{
	"imports":          checkImports,
	"cgo":              checkCgo,
	"package comments": checkPackageComments,
	"package names":    checkPackageNames,
	"go statements":    checkGoStatements,
	"environment":      checkEnvironment,
	"file writing":     checkFileWriting,
	"init functions":   checkInits,
	"printing":         checkPrinting,
	"test packages":    checkTestPackages,
	"file lengths":     checkFileLengths,
	"function lengths": checkFunctionLengths,
	"struct sizes":     checkStructSizes,
	"method files":     checkMethodFiles,
	"package lengths":  checkPackageLengths,
	"architecture":     checkArchitecture,
	"python printing":  checkPythonPrinting,
	"machine paths":    checkMachinePaths,
	"words":            checkWords,
	"duties":           checkDuties,
	"one meaning":      checkOneMeaning,
}

// matchesAny reports whether a package matches one of the patterns.
func matchesAny(pkg string, patterns []string) bool {
	return slices.ContainsFunc(patterns, func(p string) bool {
		if stem, ok := strings.CutSuffix(p, "/..."); ok {
			return pkg == stem || strings.HasPrefix(pkg, stem+"/")
		}
		return pkg == p
	})
}

func checkImports(t *Tree) (out []Finding) {
	for _, name := range t.packageNames() {
		if _, ok := mayImport[name]; !ok {
			out = append(out, Finding{"gosrc/" + name, "this package is not in the table of packages",
				"every package has one duty and a written list of packages it may import: " +
					"add it to ARCHITECTURE.md and to gosrc/internal/house/table_test.go"})
		}
	}
	t.eachFile(func(r *Package, f *File) {
		if _, ok := mayImport[r.Path]; !ok || f.Test {
			return // reported above; tests may import any package
		}
		for _, spec := range f.AST.Imports {
			p, _ := strconv.Unquote(spec.Path.Value)
			if pkg, ok := strings.CutPrefix(p, module); ok {
				if pkg != r.Path && !matchesAny(pkg, mayImport[r.Path]) {
					out = append(out, Finding{t.placeOf(spec), fmt.Sprintf("%s imports %s", r.Path, pkg),
						"a package can only be understood, tested and replaced separately if it imports only what " +
							"the table allows: " +
							"leaves never import each other, and no package imports upwards"})
				}
				continue
			}
			if first, _, _ := strings.Cut(p, "/"); strings.Contains(first, ".") && !allowedModule(p, r.Path) {
				out = append(out, Finding{t.placeOf(spec), fmt.Sprintf("%s imports %s", r.Path, p),
					"each third-party module is imported only by the packages in gosrc/internal/house/table_test.go"})
			}
		}
	})
	return out
}

func allowedModule(imported, pkg string) bool {
	for mod, users := range modules {
		if imported == mod || strings.HasPrefix(imported, mod+"/") {
			return slices.ContainsFunc(users, func(u string) bool {
				return u == "" ||
					matchesAny(pkg, []string{u + "/..."})
			})
		}
	}
	return false
}

func checkCgo(t *Tree) (out []Finding) {
	for _, name := range t.packageNames() { // including generated files
		for _, f := range t.Packages[name].Files {
			for _, spec := range f.AST.Imports {
				if spec.Path.Value == `"C"` && !matchesAny(name, cgoPackages) && !f.Ignored {
					out = append(out, Finding{t.placeOf(spec), name + ` imports "C"`,
						"cgo is limited to " + strings.Join(cgoPackages, ", ") +
							", so that other packages can be built and tested with CGO_ENABLED=0"})
				}
			}
		}
	}
	return out
}

func checkPackageComments(t *Tree) (out []Finding) {
	for _, name := range t.packageNames() {
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

func checkPackageNames(t *Tree) (out []Finding) {
	for _, name := range t.packageNames() {
		if slices.Contains(vague, path.Base(name)) {
			out = append(out, Finding{"gosrc/" + name, "a package with the name " + path.Base(name),
				"the name of a package must state its duty"})
		}
	}
	return out
}

func checkGoStatements(t *Tree) (out []Finding) {
	t.eachFile(func(r *Package, f *File) {
		// Packages for tests (sourcetest, codectest) count as tests.
		if f.Test || strings.HasSuffix(r.Path, "test") || r.Path == "internal/spawn" {
			return
		}
		ast.Inspect(f.AST, func(n ast.Node) bool {
			if s, ok := n.(*ast.GoStmt); ok {
				out = append(out, Finding{t.placeOf(s), "a bare go statement",
					"an unrecovered panic in any goroutine ends the Python process: start it with spawn.Go"})
			}
			return true
		})
	})
	return out
}

// eachMention calls found for every use of pkg.name, for the listed names, where pkg is imported from
// importPath.
func eachMention(t *Tree, f *File, importPath string, names []string, found func(ast.Node, string)) {
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

func checkEnvironment(t *Tree) (out []Finding) {
	names := []string{"Getenv", "LookupEnv", "Environ", "Setenv", "Unsetenv", "Clearenv", "ExpandEnv"}
	t.eachFile(func(r *Package, f *File) {
		if f.Test || r.Path == "knob" {
			return
		}
		for _, pkg := range []string{"os", "syscall", "golang.org/x/sys/unix"} {
			eachMention(t, f, pkg, names, func(n ast.Node, call string) {
				out = append(out, Finding{t.placeOf(n), call,
					"inside Python, Go does not see os.environ: every variable is in the table of package knob"})
			})
		}
	})
	return out
}

func checkFileWriting(t *Tree) (out []Finding) {
	t.eachFile(func(r *Package, f *File) {
		if f.Test || r.Path == "internal/atomicfile" || strings.HasSuffix(r.Path, "test") || mayWrite[r.Path] != "" {
			return
		}
		eachMention(t, f, "os", []string{"Create", "CreateTemp", "OpenFile", "WriteFile", "Rename", "Chmod"},
			func(n ast.Node, call string) {
				out = append(out, Finding{t.placeOf(n), call,
					"a replaced file must keep its mode, owner and links, and never be incomplete: write it with " +
						"internal/atomicfile"})
			})
	})
	return out
}

func checkInits(t *Tree) (out []Finding) {
	t.eachFile(func(r *Package, f *File) {
		for _, d := range f.AST.Decls {
			if fn, ok := d.(*ast.FuncDecl); ok && fn.Recv == nil && fn.Name.Name == "init" {
				out = append(out, Finding{t.placeOf(fn), "an init function",
					"an import must not do work or register anything implicitly: use explicit tables"})
			}
		}
	})
	return out
}

func checkPrinting(t *Tree) (out []Finding) {
	t.eachFile(func(r *Package, f *File) {
		if f.Test || strings.HasPrefix(r.Path, "bind/") || f.AST.Name.Name == "main" {
			return // bind passes the process's streams to cli; a program owns its process
		}
		report := func(n ast.Node, call string) {
			out = append(out, Finding{t.placeOf(n), call,
				"the engine runs in the user's process: write results to a writer parameter, and messages " +
					"to Python's logger"})
		}
		eachMention(t, f, "fmt", []string{"Print", "Printf", "Println"}, report)
		eachMention(t, f, "os", []string{"Stdout"}, report)
		if r.Path != "internal/spawn" {
			eachMention(t, f, "os", []string{"Stderr"}, report)
		}
		eachMention(t, f, "os", []string{"Exit"}, report)
		eachMention(t, f, "log", []string{"Print", "Printf", "Println", "Fatal", "Fatalf", "Fatalln", "Panic",
			"Panicf"}, report)
	})
	return out
}

func checkTestPackages(t *Tree) (out []Finding) {
	t.eachFile(func(r *Package, f *File) {
		if f.Test || strings.HasSuffix(r.Path, "test") {
			return
		}
		for _, spec := range f.AST.Imports {
			p, _ := strconv.Unquote(spec.Path.Value)
			if strings.HasPrefix(p, module) && strings.HasSuffix(p, "test") {
				out = append(out, Finding{t.placeOf(spec), p,
					"the engine must not contain what only tests may do, such as continuing after a panic"})
			}
		}
	})
	return out
}

func checkFileLengths(t *Tree) (out []Finding) {
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
		src := t.readText(p)
		if byTool[p] || isGenerated(src) || strings.Contains(headOf([]byte(src)), "Code generated") {
			continue
		}
		if n := countLines([]byte(src)); n > maxFileLines {
			out = append(out, Finding{p, fmt.Sprintf("%d lines", n),
				fmt.Sprintf("a file must be readable in one sitting: at most %d lines", maxFileLines)})
		}
	}
	return out
}

func checkFunctionLengths(t *Tree) (out []Finding) {
	t.eachFile(func(_ *Package, f *File) {
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
				out = append(out, Finding{t.placeOf(fn), fmt.Sprintf("%s has %d lines", fn.Name.Name, n),
					fmt.Sprintf("a function must be readable at a glance: at most %d lines", maxFunctionLines)})
			}
		}
	})
	return out
}

func checkPackageLengths(t *Tree) (out []Finding) {
	over := map[string]bool{}
	for _, name := range t.packageNames() {
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
					fmt.Sprintf("a package of more than %d lines has two duties: split it, or give the reason in "+
						"gosrc/internal/house/table_test.go", maxPackageLines)})
			}
		}
	}
	return append(out, staleEntries(longPackages, over)...)
}

func staleEntries(listed map[string]string, over map[string]bool) (out []Finding) {
	for name := range listed {
		if !over[name] {
			out = append(out, Finding{name, "is listed as too long, but is not",
				"an unneeded exception would hide the next violation"})
		}
	}
	return out
}
