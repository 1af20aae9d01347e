package house

import (
	"fmt"
	"path"
	"regexp"
	"slices"
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

// importLine finds what a line of Python imports, absolute or relative.
var importLine = regexp.MustCompile(`^\s*(?:from\s+([.\w]+)\s+import\s+\(?\s*([\w ,]*)|import\s+([\w., ]+))`)

// compat holds python/overwire/compat to the public face: its files translate
// names and never reach the engine or each other.
func compat(t *Tree) (out []Finding) {
	const dir = "python/overwire/compat/"
	siblings := map[string]bool{}
	for _, p := range t.Texts {
		if rest, ok := strings.CutPrefix(p, dir); ok {
			first, _, _ := strings.Cut(rest, "/")
			if name := strings.TrimSuffix(first, ".py"); !strings.HasPrefix(name, "_") {
				siblings[name] = true
			}
		}
	}
	for _, p := range t.Texts {
		rest, ok := strings.CutPrefix(p, dir)
		if !ok || path.Ext(p) != ".py" {
			continue
		}
		first, _, _ := strings.Cut(rest, "/")
		own := strings.TrimSuffix(first, ".py")
		for i, line := range strings.Split(t.read(p), "\n") {
			m := importLine.FindStringSubmatch(line)
			if m == nil {
				continue
			}
			words := regexp.MustCompile(`\w+`).FindAllString(m[1]+" "+m[2]+" "+m[3], -1)
			for _, w := range words {
				if w == "_core" || w == "_engine" {
					out = append(out, Finding{fmt.Sprintf("%s:%d", p, i+1), "imports " + w,
						"a compat module translates names over the public API: a feature enters the native API first, or not at all"})
				}
			}
			ours := strings.HasPrefix(m[1], ".") || slices.Contains(words, "compat")
			for _, w := range words {
				// __init__ and __main__ own no name and may hand out the others.
				if ours && siblings[w] && w != own && !strings.HasPrefix(own, "__") {
					out = append(out, Finding{fmt.Sprintf("%s:%d", p, i+1), "imports its neighbour " + w,
						"each compat module is one rival's face and can be dropped alone"})
				}
			}
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
