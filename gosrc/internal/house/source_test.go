package house

// This file has helpers for reading source files.

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

// headOf returns the beginning of a file, where generators put their notice.
func headOf(b []byte) string { return string(b[:min(len(b), 2048)]) }

// isText reports whether a file is hand-written text, according to its name.
func isText(rel string) bool {
	base := path.Base(rel)
	if slices.Contains([]string{"Makefile", "LICENSE", "NOTICE", "go.mod", "go.sum", "run", ".gitignore"}, base) {
		return true
	}
	return slices.Contains([]string{".go", ".py", ".pyi", ".md", ".c", ".h", ".cu", ".cuh", ".toml", ".sh",
		".txt", ".map", ".json", ".yml", ".yaml", ".cfg", ".ini", ".mod"}, strings.ToLower(path.Ext(base)))
}
