package house

// Checks that vector instructions run only on CPUs that support them.

import (
	"go/ast"
	"go/build"
	"go/importer"
	"go/parser"
	"go/token"
	"go/types"
	"maps"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"testing"
)

// featuresAskedFor lists, by file, which CPU features its package checks before it calls the file's functions.
// Functions that need fewer features than others of their package are in a separate file.
var featuresAskedFor = map[string][]string{
	"gosrc/codec/digest/fast_amd64.go":   {"AVX512"},
	"gosrc/internal/crc32c/sum_amd64.go": {"AVX512", "AVX512VPCLMULQDQ"},
	"gosrc/codec/x16/avx2.go":            {"AVX2"},
	"gosrc/codec/x16/avx512.go":          {"AVX512", "AVX512VBMI", "AVX512VBMI2"},
	"gosrc/codec/x16/encode512.go":       {"AVX512", "AVX512VBMI", "AVX512VBMI2"},
	"gosrc/codec/x16/merge512.go":        {"AVX512", "AVX512VBMI", "AVX512VBMI2"},
	"gosrc/codec/x16/merge_simd.go":      {"AVX2"},
	"gosrc/codec/x16/split512.go":        {"AVX512", "AVX512VBMI", "AVX512VBMI2"},
	"gosrc/internal/avx/avx_amd64.go":    {"AVX"},
}

// includedFeatures lists the features that a feature implies. AVX512 is archsimd's name for F, CD, BW, DQ and
// VL.
var includedFeatures = map[string][]string{
	"AVX512F": {"AVX2", "AVX"}, "AVX512": {"AVX512F", "AVX512BW", "AVX2", "AVX"}, "AVX2": {"AVX"},
}

var documentedFeature = regexp.MustCompile(`CPU Features?: (\w+)`)

// TestVectorFilesAskForTheirFeatures compares the documented features of each file's archsimd calls with
// featuresAskedFor, and these with the checks in the file's package. Without a check, a missing feature ends
// the process with SIGILL on an older CPU.
func TestVectorFilesAskForTheirFeatures(t *testing.T) {
	if runtime.GOARCH != "amd64" {
		t.Skip("archsimd only has amd64 instructions")
	}
	root, err := exec.Command("go", "env", "GOROOT").Output() // -trimpath removes it from the test binary
	if err != nil {
		t.Fatal(err)
	}
	before := build.Default
	t.Cleanup(func() { build.Default = before })
	build.Default.GOROOT = strings.TrimSpace(string(root))
	build.Default.ToolTags = append(slices.Clone(before.ToolTags), "goexperiment.simd")
	tree := read(t, filepath.Join("..", "..", ".."))
	documented := readDocumentedFeatures(t)
	sources := importer.ForCompiler(token.NewFileSet(), "source", nil)
	listed := maps.Clone(featuresAskedFor)
	for _, pkg := range tree.packageNames() {
		if !importsSimd(tree.Packages[pkg]) {
			continue
		}
		asked := map[string]bool{}
		needed := map[string]map[string]string{} // keyed by file and feature: a call that needs it
		for file, calls := range simdCallsOf(t, tree, pkg, sources) {
			for _, call := range calls {
				if feature, ok := strings.CutPrefix(call, "X86Features."); ok {
					asked[feature] = true
				} else if feature := documented[call]; feature != "" {
					if needed[file] == nil {
						needed[file] = map[string]string{}
					}
					needed[file][feature] = call
				}
			}
		}
		for file, features := range needed {
			delete(listed, file)
			for feature, call := range features {
				if !isIncluded(feature, featuresAskedFor[file]) {
					t.Errorf("%s: %s needs %s, which the table does not list", file, call, feature)
				}
			}
			for _, feature := range featuresAskedFor[file] {
				if !asked[feature] {
					t.Errorf("%s: its package never checks the CPU for %s", file, feature)
				}
			}
		}
	}
	for file := range listed {
		t.Errorf("%s: the table lists a file without vector instructions", file)
	}
}

// readDocumentedFeatures reads from Go's source which feature each archsimd function needs.
func readDocumentedFeatures(t *testing.T) map[string]string {
	t.Helper()
	names, err := filepath.Glob(filepath.Join(build.Default.GOROOT, "src", "simd", "archsimd", "*_amd64.go"))
	if err != nil || len(names) == 0 {
		t.Fatalf("no source of archsimd in %s: %v", build.Default.GOROOT, err)
	}
	out := map[string]string{}
	for _, name := range names {
		file, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.ParseComments)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range file.Decls {
			f, ok := d.(*ast.FuncDecl)
			if !ok {
				continue
			}
			key := f.Name.Name
			if f.Recv != nil {
				key = strings.TrimPrefix(types.ExprString(f.Recv.List[0].Type), "*") + "." + key
			}
			if m := documentedFeature.FindStringSubmatch(f.Doc.Text()); m != nil {
				out[key] = m[1]
			}
		}
	}
	return out
}

// simdCallsOf lists, by file of a package, the archsimd functions and methods that it uses.
func simdCallsOf(t *testing.T, tree *Tree, pkg string, sources types.Importer) map[string][]string {
	t.Helper()
	var files []*ast.File
	for i := range tree.Packages[pkg].Files {
		f := &tree.Packages[pkg].Files[i]
		match, err := build.Default.MatchFile(filepath.Join(tree.Root, path.Dir(f.Path)), path.Base(f.Path))
		if err != nil {
			t.Fatal(err)
		}
		if match && !f.Test {
			files = append(files, f.AST)
		}
	}
	info := types.Info{Uses: map[*ast.Ident]types.Object{}}
	// Other packages of this module are not resolved, because they provide no archsimd values.
	config := types.Config{Importer: sources, Error: func(error) {}, FakeImportC: true}
	_, _ = config.Check(pkg, tree.fset, files, &info)
	out := map[string][]string{}
	for name, used := range info.Uses {
		f, ok := used.(*types.Func)
		if !ok || f.Pkg() == nil || f.Pkg().Path() != "simd/archsimd" {
			continue
		}
		key := f.Name()
		if recv := f.Signature().Recv(); recv != nil {
			key = types.TypeString(recv.Type(), func(*types.Package) string { return "" }) + "." + key
		}
		file := tree.fset.Position(name.Pos()).Filename
		out[file] = append(out[file], strings.TrimPrefix(key, "*"))
	}
	return out
}

func importsSimd(p *Package) bool {
	return slices.ContainsFunc(p.Files, func(f File) bool {
		return !f.Test && slices.ContainsFunc(f.AST.Imports, func(s *ast.ImportSpec) bool {
			return s.Path.Value == `"simd/archsimd"`
		})
	})
}

func isIncluded(feature string, in []string) bool {
	return slices.ContainsFunc(in, func(has string) bool {
		return has == feature || slices.Contains(includedFeatures[has], feature)
	})
}
