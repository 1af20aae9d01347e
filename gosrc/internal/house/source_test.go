package house

// Helps to read source files.

import (
	"bytes"
	"path"
	"slices"
	"strings"
)

// countLines counts lines as an editor does: a last line without a newline counts.
func countLines(b []byte) int {
	n := bytes.Count(b, []byte("\n"))
	if len(b) > 0 && b[len(b)-1] != '\n' {
		n++
	}
	return n
}

// headOf is the beginning of a file, where generators sign.
func headOf(b []byte) string { return string(b[:min(len(b), 2048)]) }

// isText reports, by its name, whether people wrote a file.
func isText(rel string) bool {
	base := path.Base(rel)
	if slices.Contains([]string{"Makefile", "LICENSE", "NOTICE", "go.mod", "go.sum", "run", ".gitignore"}, base) {
		return true
	}
	return slices.Contains([]string{".go", ".py", ".pyi", ".md", ".c", ".h", ".cu", ".cuh", ".toml", ".sh",
		".txt", ".map", ".json", ".yml", ".yaml", ".cfg", ".ini", ".mod"}, strings.ToLower(path.Ext(base)))
}
