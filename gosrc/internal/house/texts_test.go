package house

// Checks ARCHITECTURE.md, Python and texts.

import (
	"fmt"
	"path"
	"regexp"
	"strings"
)

// checkArchitecture checks that ARCHITECTURE.md names exactly the packages of the tree.
func checkArchitecture(t *Tree) (out []Finding) {
	const file = "ARCHITECTURE.md"
	text := t.readText(file)
	names := map[string]bool{}
	for _, m := range regexp.MustCompile("(?m)^\\| `([a-z0-9/]+)` \\|").FindAllStringSubmatch(text, -1) {
		names[m[1]] = true
		if t.Packages[m[1]] == nil {
			out = append(out, Finding{file, "names the package " + m[1] + ", which does not exist",
				"a wrong overview misleads its readers"})
		}
	}
	for _, name := range t.packageNames() {
		if !names[name] {
			out = append(out, Finding{file, "does not name the package " + name,
				"newcomers find code through this page: add a table row \"| `package` | duty |\""})
		}
	}
	return out
}

// checkPythonPrinting requires the Python package to use its logger.
func checkPythonPrinting(t *Tree) (out []Finding) {
	call := regexp.MustCompile(`(^|[^\w.#"'])print\(`)
	for _, p := range t.Texts {
		if !strings.HasPrefix(p, "python/overwire/") || path.Ext(p) != ".py" {
			continue
		}
		switch path.Base(p) {
		case "__main__.py": // a program, which may print
			continue
		}
		for i, line := range strings.Split(t.readText(p), "\n") {
			code, _, _ := strings.Cut(line, "#")
			if call.MatchString(code) && !strings.Contains(line, ">>>") {
				out = append(out, Finding{fmt.Sprintf("%s:%d", p, i+1), "print(",
					"a library writes messages to logging.getLogger(\"overwire\")"})
			}
		}
	}
	return out
}

// checkMachinePaths finds paths of a development machine in files that are distributed to users.
func checkMachinePaths(t *Tree) (out []Finding) {
	place := regexp.MustCompile(`(^|[\s"'=(:,` + "`" + `])/(work|root|home/\w+)(/|\b)`)
	for _, p := range t.Texts {
		if strings.HasPrefix(p, "gosrc/internal/house/") {
			continue // names such paths as part of the rule
		}
		for i, line := range strings.Split(t.readText(p), "\n") {
			if m := place.FindString(line); m != "" {
				out = append(out, Finding{fmt.Sprintf("%s:%d", p, i+1), "names " + strings.TrimSpace(m),
					"paths of the development machine do not exist on other machines"})
			}
		}
	}
	return out
}
