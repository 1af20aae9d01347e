package house

// Checks how many fields a struct has, and in how many files its methods are.

import (
	"fmt"
	"go/ast"
	"maps"
	"path"
	"slices"
	"strconv"
	"strings"
)

// receiverOf returns the name of a method's receiver type, or "" for a function.
func receiverOf(d ast.Decl) string {
	fn, ok := d.(*ast.FuncDecl)
	if !ok || fn.Recv == nil {
		return ""
	}
	x := fn.Recv.List[0].Type
	if star, ok := x.(*ast.StarExpr); ok {
		x = star.X
	}
	if generic, ok := x.(*ast.IndexExpr); ok {
		x = generic.X
	}
	if generic, ok := x.(*ast.IndexListExpr); ok {
		x = generic.X
	}
	if name, ok := x.(*ast.Ident); ok {
		return name.Name
	}
	return ""
}

// checkMethodFiles requires all methods of a type to be in one file.
func checkMethodFiles(t *Tree) (out []Finding) {
	files := map[string]map[string]bool{} // keyed by type: the files with its methods
	t.eachFile(func(p *Package, f *File) {
		if f.Test || f.Generated {
			return
		}
		for _, d := range f.AST.Decls {
			if name := receiverOf(d); name != "" {
				key := p.Path + "." + name
				if files[key] == nil {
					files[key] = map[string]bool{}
				}
				files[key][f.Path] = true
			}
		}
	})
	counts := map[string]int{}
	for key, in := range files {
		counts[key] = len(in)
	}
	for _, key := range slices.Sorted(maps.Keys(counts)) {
		if counts[key] > max(1, scatteredMethods[key]) {
			out = append(out, Finding{key, fmt.Sprintf("its methods are in %d files: %s", counts[key],
				strings.Join(slices.Sorted(maps.Keys(files[key])), ", ")),
				"a type that does not fit in one file should be two types; splitting it makes the files depend on each other"})
		}
	}
	return append(out, loweredCeilings(t, scatteredMethods, counts, 1)...)
}

// loweredCeilings finds exceptions whose ceiling is higher than the current count of the type. Counts up to
// usual need no exception. Types of packages outside the tree are ignored.
func loweredCeilings(t *Tree, ceilings, counts map[string]int, usual int) (out []Finding) {
	for _, key := range slices.Sorted(maps.Keys(ceilings)) {
		pkg := key[:strings.LastIndexByte(key, '.')]
		if t.Packages[pkg] != nil && counts[key] < ceilings[key] {
			what := fmt.Sprintf("its ceiling in gosrc/internal/house/table_test.go is %d, and it has %d", ceilings[key],
				counts[key])
			if counts[key] <= usual {
				what += ": remove it from the list"
			}
			out = append(out, Finding{key, what, "ceilings are only lowered: a ceiling above the current count would hide new growth"})
		}
	}
	return out
}

// checkStructSizes limits the fields of structs in narrow packages. Each name in a list of names counts, and so
// do the fields of embedded structs.
func checkStructSizes(t *Tree) (out []Finding) {
	types := structTypes(t)
	counts := map[string]int{}
	t.eachFile(func(p *Package, f *File) {
		if f.Test || f.Generated || !matchesAny(p.Path, narrow) {
			return
		}
		named := map[*ast.StructType]string{}
		ast.Inspect(f.AST, func(n ast.Node) bool {
			if spec, ok := n.(*ast.TypeSpec); ok {
				if s, ok := spec.Type.(*ast.StructType); ok {
					named[s] = p.Path + "." + spec.Name.Name
				}
			}
			s, ok := n.(*ast.StructType)
			if !ok {
				return true
			}
			fields := types.countFields(p.Path, f, s)
			counts[named[s]] = fields
			if fields > max(maxFields, wideStructs[named[s]]) {
				out = append(out, Finding{t.placeOf(s), fmt.Sprintf("a struct of %d fields", fields),
					fmt.Sprintf("a type must be small enough to remember: at most %d fields, with those of "+
						"embedded structs", maxFields)})
			}
			return true
		})
	})
	return append(out, loweredCeilings(t, wideStructs, counts, maxFields)...)
}

// structsByName maps package and name to the structs of a tree.
type structsByName map[string]declared

type declared struct {
	pkg  string
	file *File
	body *ast.StructType
}

func structTypes(t *Tree) structsByName {
	all := structsByName{}
	t.eachFile(func(p *Package, f *File) {
		if f.Test {
			return
		}
		for _, d := range f.AST.Decls {
			g, ok := d.(*ast.GenDecl)
			if !ok {
				continue
			}
			for _, s := range g.Specs {
				if spec, ok := s.(*ast.TypeSpec); ok {
					if body, ok := spec.Type.(*ast.StructType); ok {
						all[p.Path+"."+spec.Name.Name] = declared{p.Path, f, body}
					}
				}
			}
		}
	})
	return all
}

// countFields counts the fields of a struct. An embedded type that is not a struct of this tree counts as one
// field.
func (all structsByName) countFields(pkg string, f *File, s *ast.StructType) (n int) {
	for _, field := range s.Fields.List {
		if len(field.Names) > 0 {
			n += len(field.Names)
			continue
		}
		embedded, ok := all[nameOf(pkg, f, field.Type)]
		if !ok {
			n++
			continue
		}
		n += all.countFields(embedded.pkg, embedded.file, embedded.body)
	}
	return n
}

// nameOf returns the package and name of an embedded type.
func nameOf(pkg string, f *File, x ast.Expr) string {
	if star, ok := x.(*ast.StarExpr); ok {
		x = star.X
	}
	switch x := x.(type) {
	case *ast.Ident:
		return pkg + "." + x.Name
	case *ast.SelectorExpr:
		local, _ := x.X.(*ast.Ident)
		for _, spec := range f.AST.Imports {
			imported, _ := strconv.Unquote(spec.Path.Value)
			if ours, ok := strings.CutPrefix(imported, module); ok && local != nil && path.Base(ours) == local.Name {
				return ours + "." + x.Sel.Name
			}
		}
	}
	return ""
}
