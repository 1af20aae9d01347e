package house

// This file holds prose and names to the words of docs/glossary.md.

import (
	"fmt"
	"go/ast"
	"go/token"
	"path"
	"regexp"
	"slices"
	"strings"
)

// retired are the words that the project no longer uses, as regular expressions
// of a line, each with the words to use instead.
var retired = []struct{ word, say string }{
	{`\bfar (away|off|sources?|stores?|objects?|folders?|files?|rings?|ones?)\b`, "remote"},
	{`\b(Far[A-Z]\w*|far[A-Z]\w*|[a-z]\w*Far)\b`, "remote"},
	{`\b(the|a|its) climb\b|\bclimb(s|ed|ing)\b|\bsteep\b|\bcalm(er|ly)?\b`, "adaptive concurrency, and what is counted"},
	{`\bdog\b`, "watchdog"},
	{`\bpast the (page )?cache\b`, "by direct I/O (O_DIRECT)"},
	{`(?i)\bin a row\b`, "contiguous"},
	{`(?i)\bby turns\b`, "alternating"},
	{`(?i)\bso (many|much)\b`, "n, that number, as many as"},
	{`\b([Nn]obody|[Ww]hoever)\b`, "no one, the caller that, any process that"},
	{`\b(of|to|by) who\b`, "for a caller that"},
	{`(?i)\btold\b`, "documented, reported, passed to"},
	{`\b(this|each|every|another|the|a|one|no|other|which) room\b( that| is| has| may| imports?\b|[.,;:]|$)|\brooms\b`, "package"},
	{`\bhanded\b|\bhands? (over|out)\b`, "exported, passed, returned"},
	{`\bTeam\b|\b(senders|teams)\b`, "exchange, group"},
	{`(?i)\b(lend|lends|lent|borrows|borrowed)\b`, "view, share, reference"},
	{`\b(device\.|\*|type )Lane\b`, "Queue"},
}

// notYet are the files and folders (with a slash) that these rules do not hold yet.
// Take an entry away once its files are clean, and add none.
var notYet = []string{
	"ARCHITECTURE.md", "README.md", "Makefile", "setup.py", "cuda/abi_stream.h", "cuda/stream_make.cuh", "cuda/lab/",
	"docs/benchmarks.md", "docs/correctness.md", "python/overwire/_core.pyi", "wheels/",
	"gosrc/bind/", "gosrc/device/", "gosrc/load/", "gosrc/pipeline/", "gosrc/rig/", "gosrc/source/",
}

// wordsIn reports whether a text file is held to the words: what people write of
// the project, but not other people's texts and not the table above.
func wordsIn(rel string) bool {
	switch {
	case strings.HasPrefix(rel, "gosrc/internal/house/words"), strings.HasPrefix(rel, "tests/goldens/"),
		strings.HasPrefix(rel, "gosrc/bind/core/"), rel == "docs/glossary.md", rel == "CHANGELOG.md":
		return false
	}
	return slices.Contains([]string{".go", ".py", ".pyi", ".c", ".h", ".cc", ".cu", ".cuh", ".md", ".sh"}, path.Ext(rel)) ||
		path.Base(rel) == "Makefile"
}

// unfinished reports whether a file is in notYet, or in a folder there.
func unfinished(file string) bool {
	return slices.ContainsFunc(notYet, func(p string) bool { return p == file || strings.HasSuffix(p, "/") && strings.HasPrefix(file, p) })
}

// words finds retired words in texts.
func words(t *Tree) (out []Finding) {
	each := make([]*regexp.Regexp, len(retired))
	all := make([]string, len(retired))
	for i, r := range retired {
		each[i] = regexp.MustCompile(r.word)
		all[i] = "(?:" + r.word + ")"
	}
	any := regexp.MustCompile("(?m)" + strings.Join(all, "|"))
	for _, p := range t.Texts {
		if unfinished(p) || !wordsIn(p) {
			continue
		}
		text := t.read(p)
		for _, at := range any.FindAllStringIndex(text, -1) {
			found := text[at[0]:at[1]]
			i := slices.IndexFunc(each, func(re *regexp.Regexp) bool { return re.MatchString(found) })
			out = append(out, Finding{fmt.Sprintf("%s:%d", p, 1+strings.Count(text[:at[0]], "\n")),
				fmt.Sprintf("%q is retired: say %s", strings.TrimSpace(found), retired[i].say),
				"a newcomer reads a file without a dictionary of ours: docs/glossary.md has the words"})
		}
	}
	return out
}

// duties asks every file for its duty in its first lines: a package comment or a
// comment before the first declaration in Go, a docstring in Python, a comment in
// C, CUDA and shell. Go's test files are named by what they test.
func duties(t *Tree) (out []Finding) {
	missing := func(p string) {
		if unfinished(p) {
			return
		}
		out = append(out, Finding{p, "does not open with its duty",
			"the first sentence says what a file is for, so that a reader knows whether to go on"})
	}
	t.each(func(r *Package, f *File) {
		if !f.Test && !opens(f.AST) {
			missing(f.Path)
		}
	})
	for _, p := range t.Texts {
		src := strings.TrimLeft(t.read(p), " \n")
		if strings.HasPrefix(src, "#!") {
			_, src, _ = strings.Cut(src, "\n")
		}
		var begins []string
		switch path.Ext(p) {
		case ".py", ".pyi":
			begins = []string{`"""`, `r"""`}
		case ".c", ".h", ".cc", ".cu", ".cuh":
			begins = []string{"//", "/*"}
		case ".sh":
			begins = []string{"# "}
		default:
			continue
		}
		if src != "" && !slices.ContainsFunc(begins, func(b string) bool { return strings.HasPrefix(src, b) }) {
			missing(p)
		}
	}
	return out
}

// opens reports whether a Go file has a package comment, or another comment above
// its first declaration that does not belong to it.
func opens(f *ast.File) bool {
	if f.Doc != nil {
		return true
	}
	first, doc := f.FileEnd, (*ast.CommentGroup)(nil)
	for _, d := range f.Decls {
		switch d := d.(type) {
		case *ast.GenDecl:
			if d.Tok == token.IMPORT {
				continue
			}
			first, doc = d.Pos(), d.Doc
		case *ast.FuncDecl:
			first, doc = d.Pos(), d.Doc
		}
		break
	}
	for _, c := range f.Comments {
		if c.Pos() > f.Name.Pos() && c.End() < first && c != doc {
			return true
		}
	}
	return false
}

// oneMeaning are the words of docs/glossary.md that are exported types: each is the
// type of one package, and of packages below it that implement it.
var oneMeaning = []string{"Chunk", "Grid", "Index", "Plan", "Piece", "Ring", "Queue", "Task", "Permit", "Group", "Facts", "Golden", "Export"}

func oneType(t *Tree) (out []Finding) {
	owner := map[string]string{}
	t.each(func(r *Package, f *File) {
		if f.Test {
			return
		}
		for _, d := range f.AST.Decls {
			g, ok := d.(*ast.GenDecl)
			if !ok || g.Tok != token.TYPE {
				continue
			}
			for _, s := range g.Specs {
				name := s.(*ast.TypeSpec).Name.Name
				if !slices.Contains(oneMeaning, name) {
					continue
				}
				other := owner[name]
				if other == "" {
					owner[name] = r.Path
				} else if other != r.Path && !strings.HasPrefix(r.Path, other+"/") {
					out = append(out, Finding{t.at(s), fmt.Sprintf("type %s is also one of %s", name, other),
						"a word of the glossary has one meaning: name one of the two by what it is"})
				}
			}
		}
	})
	return out
}
