package cli

// This file parses argument lists into commands, options, arguments and keys, and builds the help texts.

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/dustin/go-humanize"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/near"
	"github.com/overwire/overwire/gosrc/internal/rawjson"
	"github.com/overwire/overwire/gosrc/internal/regular"
	"github.com/overwire/overwire/gosrc/knob"
	"github.com/overwire/overwire/gosrc/tensorizer"
)

// option describes one option of a command. An option without a value is a switch.
type option struct {
	name  string // --name
	short string // -n, or ""
	value string // name of the value in help, e.g. "N"; "" for a switch
	doc   string
	words []string // values that completion offers; nil: file names
	// If hi is above 0, the value is an integer from lo to hi. If size is set, it is a size in bytes.
	lo, hi int
	size   bool
	none   bool // a size of 0 is allowed
}

// A verb is a command, such as compress in `overwire compress`.
type verb struct {
	name    string
	words   [][]string // words that completion offers for the first arguments; nil: file names
	args    string     // the arguments, as printed by help: "SRC... -o OUT"
	least   int        // minimum number of arguments
	most    int        // maximum number of arguments; -1: no limit
	short   string     // one line
	long    string     // a paragraph, for --help
	example string
	options []option
	run     func(*call) error
}

var jsonOption = option{name: "json", doc: "print the result as one JSON document"}

var threadsOption = option{name: "threads", short: "j", value: "N", lo: 1, hi: 1024, doc: "cores to use (default: all)"}

var storageOption = option{name: "storage", value: "JSON",
	doc: `options for remote stores, e.g. {"timeout": 10} (storage_options in Python)`}

// storageTexts parses --storage. Numbers and booleans become strings.
func storageTexts(text string) (map[string]string, error) {
	var values map[string]any
	err := rawjson.Unmarshal(text, &values)
	texts := make(map[string]string, len(values))
	for name, value := range values {
		switch v := value.(type) {
		case string:
			texts[name] = v
		case bool:
			texts[name] = strconv.FormatBool(v)
		case float64:
			texts[name] = strconv.FormatFloat(v, 'f', -1, 64)
		default:
			return nil, usage("--storage: %s: expected a string, a number, true or false", strconv.Quote(name))
		}
	}
	if err != nil || values == nil {
		return nil, usage(`--storage: expected a JSON object, e.g. {"timeout": 10}`)
	}
	return texts, nil
}

// verbGroups lists the commands in the order that help prints them. It is a function, not
// a variable, to avoid an initialization cycle: the commands refer to it through help.
func verbGroups() []verbGroup {
	return []verbGroup{
		{"files", []*verb{compressVerb, decompressVerb, convertVerb, inspectVerb, verifyVerb, diffVerb}},
		{"programs and stores", []*verb{loadVerb, runVerb, fetchVerb, cacheVerb, hostVerb}},
		{"this machine", []*verb{doctorVerb, benchVerb, serveVerb, completionVerb}},
	}
}

type verbGroup struct {
	title string
	verbs []*verb
}

// verbs lists the commands in the order that help prints them.
func verbs() []*verb {
	var all []*verb
	for _, group := range verbGroups() {
		all = append(all, group.verbs...)
	}
	return all
}

func findVerb(name string) *verb {
	for _, v := range verbs() {
		if v.name == name {
			return v
		}
	}
	return nil
}

// elsewhere maps words that people try as commands to the text that they should write instead.
var elsewhere = map[string]string{
	"apply":     "overwire.apply_delta in Python",
	"benchmark": "overwire bench",
	"delta":     "overwire diff A B, or overwire.save_delta in Python",
	"digest":    "overwire inspect SRC --digests",
	"download":  "overwire fetch URL -o OUT",
	"info":      "overwire inspect SRC",
	"ls":        "overwire inspect SRC",
	"merge":     "overwire.merge_deltas in Python",
	"plan":      "overwire load SRC --plan",
	"presign":   "overwire fetch s3://BUCKET/KEY --presign SECONDS",
	"split":     "overwire convert SRC -o OUT --shard SIZE",
	"trace":     "overwire inspect TRACE.json --html PAGE.html",
	"version":   "overwire --version",
}

// Help is the text of `overwire --help`.
func Help() string {
	var b strings.Builder
	b.WriteString("overwire compresses model weights without loss and loads them back fast.\n\nusage: overwire " +
		"COMMAND ...\n\n")
	for _, group := range verbGroups() {
		fmt.Fprintf(&b, "%s:\n", group.title)
		for _, v := range group.verbs {
			fmt.Fprintf(&b, "  %-11s %s\n", v.name, v.short)
		}
		b.WriteString("\n")
	}
	b.WriteString("`overwire COMMAND --help` describes a command, with an example. Use -- before paths that start " +
		"with a dash.\n\n")
	return b.String() + exitText
}

// all returns the options that the command's --help lists.
func (v *verb) all() []option {
	help := option{name: "help", short: "h", doc: "print this help"}
	if v == runVerb { // run passes --json to the program
		return []option{help}
	}
	return slices.Concat(v.options, []option{jsonOption, help})
}

func (v *verb) help() string {
	var b strings.Builder
	fmt.Fprintf(&b, "usage: %s\n\n%s\n", strings.TrimSpace("overwire "+v.name+" "+v.args), paragraphs(v.long))
	b.WriteString("\noptions:\n")
	width := 0
	for _, o := range v.all() {
		width = max(width, len(o.spelling()))
	}
	for _, o := range v.all() {
		doc := strings.ReplaceAll(wrapText(o.doc, helpWidth-width-4), "\n", "\n"+strings.Repeat(" ", width+4))
		fmt.Fprintf(&b, "  %-*s  %s\n", width, o.spelling(), doc)
	}
	fmt.Fprintf(&b, "\nexample:\n  %s\n\nexit status: 0 on success; overwire --help lists the others\n",
		strings.ReplaceAll(strings.TrimSpace(v.example), "\n", "\n  "))
	return b.String()
}

// helpWidth is the number of columns of the help texts.
const helpWidth = 88

// spelling returns the option as help prints it.
func (o *option) spelling() string {
	text := strings.TrimSpace("--" + o.name + " " + o.value)
	if o.short != "" {
		return "-" + o.short + ", " + text
	}
	return text
}

// paragraphs wraps the paragraphs of a text. Lists, which are indented, stay unchanged.
func paragraphs(text string) string {
	all := strings.Split(strings.TrimSpace(text), "\n\n")
	for i, one := range all {
		if !strings.Contains(one, "\n  ") {
			all[i] = wrapText(one, helpWidth)
		}
	}
	return strings.Join(all, "\n\n")
}

// wrapText breaks a text between words into lines of at most n bytes.
func wrapText(text string, n int) string {
	var b strings.Builder
	line := 0
	for _, word := range strings.Fields(text) {
		if line > 0 && line+1+len(word) > n {
			b.WriteString("\n")
			line = 0
		} else if line > 0 {
			b.WriteString(" ")
			line++
		}
		b.WriteString(word)
		line += len(word)
	}
	return b.String()
}

// arguments are the parsed words of one command line.
type arguments struct {
	verb *verb
	args []string // the words that are not options
	opts map[string]string
}

// parse splits argv into options and arguments. Options may appear anywhere before
// "--". A value is the next word, or follows "=".
func (a *arguments) parse(argv []string) error {
	a.opts = map[string]string{}
	options := append([]option{jsonOption}, a.verb.options...)
	for i := 0; i < len(argv); i++ {
		word := argv[i]
		switch {
		case word == "--":
			a.args = append(a.args, argv[i+1:]...)
			i = len(argv)
			continue
		case word == "-h" || word == "--help":
			return errHelp
		case len(word) < 2 || word[0] != '-':
			a.args = append(a.args, word)
			continue
		}
		name, value, hasValue := strings.Cut(word, "=")
		k := slices.IndexFunc(options, func(o option) bool {
			return name == "--"+o.name || o.short != "" && name == "-"+o.short
		})
		if k < 0 {
			return usage("%s has no option %s%s; see: overwire %s --help (use -- before paths that start with a dash)",
				a.verb.name, name, nearName(name, optionNames(options)), a.verb.name)
		}
		o := &options[k]
		switch {
		case o.value == "" && hasValue:
			return usage("--%s takes no value", o.name)
		case o.value == "":
			value = "yes"
		case !hasValue:
			if i++; i == len(argv) || len(argv[i]) > 1 && argv[i][0] == '-' {
				return usage("--%s needs a value: --%s %s (write --%s=VALUE if it starts with a dash)", o.name,
					o.name, o.value, o.name)
			}
			value = argv[i]
		}
		if _, twice := a.opts[o.name]; twice {
			return usage("--%s is given twice", o.name)
		}
		a.opts[o.name] = value
	}
	// Check values last: --json decides how errors are printed and may be the last word. Check options before
	// arguments: if a value is missing, the option may have taken an argument instead.
	for i := range options {
		if value, isGiven := a.opts[options[i].name]; isGiven {
			if err := options[i].check(value); err != nil {
				return err
			}
		}
	}
	return a.checkArgs()
}

// checkArgs refuses a wrong number of arguments, and arguments that cannot be file names.
func (a *arguments) checkArgs() error {
	if n := len(a.args); n < a.verb.least || a.verb.most >= 0 && n > a.verb.most {
		return usage("wrong number of arguments; write: overwire %s %s", a.verb.name, a.verb.args)
	}
	for _, word := range a.args {
		if word == "" || strings.ContainsRune(word, 0) {
			return usage("an argument is empty or contains a NUL character")
		}
		if word == "-" {
			return usage("%s cannot read standard input: name a file (write ./- for a file called -)", a.verb.name)
		}
	}
	if a.opts["output"] == "-" && a.verb.name != fetchVerb.name {
		return usage("%s cannot write to standard output: name a file (write ./- for a file called -)", a.verb.name)
	}
	return nil
}

// optionNames lists the options with their dashes.
func optionNames(known []option) []string {
	var all []string
	for _, o := range known {
		all = append(all, "--"+o.name)
	}
	return all
}

// nearName returns " (did you mean X?)" with the name closest to word, or "".
func nearName(word string, names []string) string {
	if best := near.Best(word, names); best != "" {
		return " (did you mean " + best + "?)"
	}
	return ""
}

func (a *arguments) is(name string) bool { return a.opts[name] == "yes" }

// check refuses values that the option does not accept.
func (o *option) check(text string) error {
	if o.value != "" && text == "" {
		return usage("--%s is empty: write --%s %s, or omit it", o.name, o.name, o.value)
	}
	n, err := strconv.Atoi(text)
	if o.hi > 0 && (err != nil || n < o.lo || n > o.hi) {
		return usage("--%s %s: expected a number from %d to %d: write --%s "+
			"%s", o.name, text, o.lo, o.hi, o.name, o.value)
	}
	size, err := humanize.ParseBytes(text)
	if o.size && (err != nil || size == 0 && !o.none || size > 1<<50) {
		return usage("--%s %s: expected a size, such as 4GB or 512MiB", o.name, text)
	}
	if _, bare := strconv.ParseFloat(text, 64); o.size && bare == nil && size > 0 && size < 1e6 {
		return usage("--%s %s: this would be %s bytes; add the unit: %sGB (or %sB)", o.name, text, text, text, text)
	}
	return nil
}

// number returns the value of a numeric option, or def if it is not given.
func (a *arguments) number(name string, def int) int {
	if text, ok := a.opts[name]; ok {
		def, _ = strconv.Atoi(text) // parse has checked it
	}
	return def
}

// size returns the value of an option in bytes, or 0 if it is not given.
func (a *arguments) size(name string) int64 {
	n, _ := humanize.ParseBytes(a.opts[name]) // parse has checked it
	return int64(n)
}

// threads returns --threads, or OVERWIRE_THREADS; 0 means all cores.
func (a *arguments) threads() int { return a.number("threads", knob.Threads.Get()) }

// These options name the file or variable that holds a key or password. They never contain the secret itself, because
// other users of the machine can read command lines.
var (
	decryptOptions = []option{
		{name: "decrypt-key", value: "FROM",
			doc: "key of encrypted .tensors files (32 bytes or 64 hex digits): file:PATH or env:NAME"},
		{name: "decrypt-password", value: "FROM", doc: "password of encrypted .tensors files: file:PATH or env:NAME"},
	}
	encryptOptions = []option{
		{name: "encrypt-key", value: "FROM", doc: "key to encrypt the .tensors file with: file:PATH or env:NAME"},
		{name: "encrypt-password", value: "FROM",
			doc: "password to encrypt the .tensors file with: file:PATH or env:NAME"},
	}
)

// keys reads the key or password named by the options with this prefix, and returns it as engine settings.
func (a *arguments) keys(prefix string, secrets map[string]string) (map[string]string, error) {
	name, wrong, read := prefix+"-key", "must contain 32 bytes or 64 hex digits", tensorizer.KeySettings
	from, isGiven := a.opts[name]
	if password, also := a.opts[prefix+"-password"]; also {
		if isGiven {
			return nil, usage("--%s-key and --%s-password cannot be combined", prefix, prefix)
		}
		name, wrong, read = prefix+"-password", "is empty", tensorizer.PasswordSettings
		from, isGiven = password, true
	}
	if !isGiven {
		return nil, nil
	}
	b, err := readSecret(name, from, secrets)
	if err != nil {
		return nil, err
	}
	settings, ok := read(b)
	if !ok {
		return nil, usage("--%s: %s %s", name, from, wrong)
	}
	return settings, nil
}

// readSecret reads the content of file:PATH or env:NAME.
func readSecret(name, from string, secrets map[string]string) ([]byte, error) {
	const most = 64 << 10
	kind, rest, _ := strings.Cut(from, ":")
	switch {
	case kind == "file" && rest != "":
		b, err := regular.Read(rest, most)
		if errors.Is(err, errs.ErrFormat) {
			return nil, usage("--%s: %s has more than %d bytes", name, rest, most)
		}
		if err != nil {
			return nil, errs.In("read", rest, err)
		}
		return b, nil
	case kind == "env" && rest != "":
		text, ok := secrets[rest]
		if !ok {
			return nil, usage("--%s: the variable %s is not set", name, rest)
		}
		return []byte(text), nil
	}
	return nil, usage("--%s: write file:PATH or env:NAME; a secret on the command line would show in the list of "+
		"processes", name)
}
