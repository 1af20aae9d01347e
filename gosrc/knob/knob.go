// Package knob has one table of all environment variables of overwire: name, type, default, a description in
// one sentence, and older names that still work.
//
// No other package reads the environment. Inside Python, Go does not see changes of os.environ, so Python
// passes its variables to Load. The command line and Go tests pass Environ. An argument of a call overrides the
// knob. An invalid value causes a warning, and the default is used.
//
// Load and the getters are safe for concurrent use.
package knob

import (
	"fmt"
	"maps"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"

	"github.com/overwire/overwire/gosrc/internal/near"
)

// A Knob is one setting. T is string, int or bool.
type Knob[T any] struct {
	entry
	def   T
	parse func(string) (T, error)
	val   atomic.Pointer[setting[T]]
}

type setting[T any] struct {
	val  T
	from string // the variable that set it; "" means the default
}

// An entry is one row of the table.
type entry struct {
	name, kind string
	page, doc  string // page in docs/ with details
	aliases    []alias
}

// An alias is another name for a knob. to translates its value ("" means not set); nil means that no translation is
// needed. A shared alias is also used by unrelated programs (DEBUG), so an invalid value causes no warning.
type alias struct {
	name   string
	to     func(string) string
	shared bool
}

// Get returns the value that the last Load set, or the default.
func (k *Knob[T]) Get() T {
	if s := k.val.Load(); s != nil {
		return s.val
	}
	return k.def
}

// Check returns an error if text is not a valid value of the knob. The empty text is valid and stands for the
// current value.
func (k *Knob[T]) Check(text string) error {
	if text == "" {
		return nil
	}
	_, err := k.parse(text)
	return err
}

// Name returns the variable's main name.
func (k *Knob[T]) Name() string { return k.name }

// load sets the knob from env. An empty variable counts as not set.
func (k *Knob[T]) load(env map[string]string) (warning string) {
	k.val.Store(nil)
	for _, a := range append([]alias{{name: k.name}}, k.aliases...) {
		text := strings.TrimSpace(env[a.name])
		raw := text
		if a.to != nil && text != "" {
			text = a.to(text)
		}
		if text == "" {
			continue
		}
		v, err := k.parse(text)
		if err == nil {
			k.val.Store(&setting[T]{v, a.name})
			return ""
		}
		if !a.shared {
			return fmt.Sprintf("%s=%q ignored: %v; using the default, %s", a.name, raw, err, shown(k.def))
		}
	}
	return ""
}

func (k *Knob[T]) row() Row {
	r := Row{Name: k.name, Type: k.kind, Default: shown(k.def), Value: shown(k.Get()), Doc: k.doc, Page: k.page}
	if s := k.val.Load(); s != nil {
		r.From = s.from
	}
	for _, a := range k.aliases {
		r.Aliases = append(r.Aliases, a.name)
	}
	return r
}

// A Row is one knob in the form that `overwire doctor --env` shows.
type Row struct {
	Name    string   `json:"name"`
	Type    string   `json:"type"`
	Default string   `json:"default"`
	Value   string   `json:"value"`
	From    string   `json:"from,omitempty"` // the variable that set the value
	Aliases []string `json:"aliases,omitempty"`
	Doc     string   `json:"doc"`
	Page    string   `json:"page"` // page and heading in docs/ with details
}

// Load sets every knob from env and returns warnings for the user: values that were ignored, and OVERWIRE_
// names that are not settings.
func Load(env map[string]string) []string {
	var warnings []string
	names := map[string]bool{}
	for _, k := range table {
		if w := k.load(env); w != "" {
			warnings = append(warnings, w)
		}
		names[k.row().Name] = true
	}
	for name := range env {
		if strings.HasPrefix(name, prefix) && !names[name] && !strings.HasPrefix(name, prefix+"TEST_") {
			hint := "see: overwire doctor --env"
			if best := near.Best(strings.TrimPrefix(name, prefix), settingNames(names)); best != "" {
				hint = "did you mean " + prefix + best + "? " + hint
			}
			warnings = append(warnings, name+" is not a setting of this version ("+hint+")")
		}
	}
	slices.Sort(warnings)
	return warnings
}

// settingNames lists the settings' names without their common prefix, sorted.
func settingNames(names map[string]bool) (short []string) {
	for _, name := range slices.Sorted(maps.Keys(names)) {
		short = append(short, strings.TrimPrefix(name, prefix))
	}
	return short
}

// Environ returns the environment with which this process started.
func Environ() map[string]string {
	env := map[string]string{}
	for _, kv := range os.Environ() {
		if name, value, ok := strings.Cut(kv, "="); ok {
			env[name] = value
		}
	}
	return env
}

// Table returns every knob with its current value.
func Table() []Row {
	rows := make([]Row, len(table))
	for i, k := range table {
		rows[i] = k.row()
	}
	return rows
}

func text(name, def, page, doc string, aliases ...alias) *Knob[string] {
	return &Knob[string]{
		entry: entry{name, "text", page, doc, aliases}, def: def,
		parse: func(s string) (string, error) { return s, nil },
	}
}

func choice(name, page, doc string, choices []string, aliases ...alias) *Knob[string] {
	return &Knob[string]{
		entry: entry{name, strings.Join(choices, "|"), page, doc, aliases}, def: choices[0],
		parse: func(s string) (string, error) {
			s = strings.ToLower(s)
			if !slices.Contains(choices, s) {
				return "", fmt.Errorf("expected one of %s", strings.Join(choices, ", "))
			}
			return s, nil
		},
	}
}

func number(name string, lo, hi, def int, page, doc string, aliases ...alias) *Knob[int] {
	return &Knob[int]{
		entry: entry{name, fmt.Sprintf("number %d..%d", lo, hi), page, doc, aliases}, def: def,
		parse: func(s string) (int, error) {
			n, err := strconv.Atoi(s)
			if err != nil || n < lo || n > hi {
				return 0, fmt.Errorf("expected a number from %d to %d", lo, hi)
			}
			return n, nil
		},
	}
}

func flag(name, page, doc string, aliases ...alias) *Knob[bool] {
	return &Knob[bool]{
		entry: entry{name, "yes|no", page, doc, aliases},
		parse: truth,
	}
}

// truth parses the common spellings of yes and no.
func truth(s string) (bool, error) {
	switch strings.ToLower(s) {
	case "1", "true", "yes", "on", "y", "t":
		return true, nil
	case "0", "false", "no", "off", "n", "f":
		return false, nil
	}
	return false, fmt.Errorf("expected yes or no")
}

// whenTrue translates yes to value and no to "". It returns any other text unchanged, and the knob then refuses it.
func whenTrue(value string) func(string) string {
	return func(s string) string {
		yes, err := truth(s)
		switch {
		case err != nil:
			return s
		case yes:
			return value
		}
		return ""
	}
}

func shown(v any) string {
	switch v := v.(type) {
	case bool:
		if v {
			return "yes"
		}
		return "no"
	case string:
		if v == "" {
			return "(none)"
		}
		return v
	}
	return fmt.Sprint(v)
}

// RuntimeFolder returns the folder for the user's sockets, as it was when this process started; "" if the system has
// none.
func RuntimeFolder() string { return os.Getenv("XDG_RUNTIME_DIR") }

// Workers returns the number of workers: asked if that is positive, otherwise the setting, otherwise one per
// CPU. It is at most 256.
func Workers(asked int) int {
	if asked <= 0 {
		asked = Threads.Get()
	}
	if asked <= 0 {
		asked = runtime.GOMAXPROCS(0)
	}
	return min(asked, 256)
}
