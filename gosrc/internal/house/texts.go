package house

import (
	"fmt"
	"path"
	"regexp"
	"strings"
)

// architecture holds ARCHITECTURE.md to the tree: it names every room and no
// room that is not there.
func architecture(t *Tree) (out []Finding) {
	const file = "ARCHITECTURE.md"
	text := t.read(file)
	named := map[string]bool{}
	for _, m := range regexp.MustCompile("(?m)^\\| `([a-z0-9/]+)` \\|").FindAllStringSubmatch(text, -1) {
		named[m[1]] = true
		if t.Rooms[m[1]] == nil {
			out = append(out, Finding{file, "names the room " + m[1] + ", which is not there",
				"a map that shows what is not there sends people astray"})
		}
	}
	for _, name := range t.names() {
		if !named[name] {
			out = append(out, Finding{file, "does not name the room " + name,
				"a newcomer finds any byte's place from this page: a table row \"| `room` | duty |\" for each"})
		}
	}
	return out
}

// pythonPrinting holds the Python face to its logger.
func pythonPrinting(t *Tree) (out []Finding) {
	call := regexp.MustCompile(`(^|[^\w.#"'])print\(`)
	for _, p := range t.Texts {
		if !strings.HasPrefix(p, "python/overwire/") || path.Ext(p) != ".py" {
			continue
		}
		switch path.Base(p) {
		case "__main__.py": // a program: it talks to people
			continue
		}
		for i, line := range strings.Split(t.read(p), "\n") {
			code, _, _ := strings.Cut(line, "#")
			if call.MatchString(code) && !strings.Contains(line, ">>>") {
				out = append(out, Finding{fmt.Sprintf("%s:%d", p, i+1), "print(",
					"a library speaks through logging.getLogger(\"overwire\")"})
			}
		}
	}
	return out
}

// machinePaths finds places of one machine in what everybody gets.
func machinePaths(t *Tree) (out []Finding) {
	place := regexp.MustCompile(`(^|[\s"'=(:,` + "`" + `])/(work|root|home/\w+)(/|\b)`)
	for _, p := range t.Texts {
		if strings.HasPrefix(p, "gosrc/internal/house/") {
			continue // speaks of the rule itself
		}
		for i, line := range strings.Split(t.read(p), "\n") {
			if m := place.FindString(line); m != "" {
				out = append(out, Finding{fmt.Sprintf("%s:%d", p, i+1), "names " + strings.TrimSpace(m),
					"paths of the machine that built it mean nothing on any other"})
			}
		}
	}
	return out
}
