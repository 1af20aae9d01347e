package cli

// This file generates shell completion scripts from the table of commands.

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
)

var completionVerb = &verb{
	name: "completion", args: "bash|zsh|fish", least: 1, most: 1,
	words: [][]string{{"bash", "zsh", "fish"}},
	short: "print a script that lets a shell complete commands and options",
	long: `
Prints a completion script for the named shell. After you load it, Tab completes commands,
options and file names. The script does not run overwire.

  bash  add to ~/.bashrc:                    source <(overwire completion bash)
  zsh   add to ~/.zshrc, after compinit:     source <(overwire completion zsh)
  fish  overwire completion fish > ~/.config/fish/completions/overwire.fish`,
	example: "source <(overwire completion bash)",
	run: func(c *call) error {
		script := completions[c.args[0]]
		if script == nil {
			return usage("no completion for shell %q: expected one of %s", c.args[0],
				strings.Join(slices.Sorted(maps.Keys(completions)), ", "))
		}
		if c.is("json") {
			var b strings.Builder
			script(&b, c.verbs)
			return writeJSON(c.stdout, map[string]any{"shell": c.args[0], "script": b.String()})
		}
		script(c.stdout, c.verbs)
		return nil
	},
}

var completions = map[string]func(io.Writer, []*verb){"bash": bash, "fish": fish, "zsh": zsh}

// devices are the values that completion offers for --device.
var devices = []string{"cpu", "cuda"}

func verbNames(verbs []*verb) []string {
	var names []string
	for _, v := range verbs {
		names = append(names, v.name)
	}
	return names
}

// valuedOptions returns the options that take a value, as they are typed.
func valuedOptions(verbs []*verb) []string {
	names := map[string]bool{}
	for _, v := range verbs {
		for _, o := range v.options {
			if o.value == "" {
				continue
			}
			names["--"+o.name] = true
			if o.short != "" {
				names["-"+o.short] = true
			}
		}
	}
	return slices.Sorted(maps.Keys(names))
}

// bash writes a script that completes with a function, or with file names if the function returns nothing.
func bash(w io.Writer, verbs []*verb) {
	fmt.Fprintf(w, `# bash completion of overwire
_overwire() {
	local valued=' %s'
	local word=${COMP_WORDS[COMP_CWORD]} before words= option=
	COMPREPLY=()
	[ "$word" = = ] && word= # bash splits --option= into two words
	before=${COMP_WORDS[COMP_CWORD-1]}
	[ "$before" = = ] && before=${COMP_WORDS[COMP_CWORD-2]}
	case "$valued " in *" $before "*) option=$before ;; esac
	local place=0 value= # place: of the argument, not counting options and their values
	for before in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do
		case $before in
		--) return ;;
		=) value=y ;;
		-*) value=; case "$valued " in *" $before "*) value=y ;; esac ;;
		*) [ "$value" ] || place=$((place + 1)); value= ;;
		esac
	done
	case $COMP_CWORD in
`, strings.Join(valuedOptions(verbs), " "))
	fmt.Fprintf(w, "\t1) words='%s help --help --version' ;;\n\t*)\n", strings.Join(verbNames(verbs), " "))
	fmt.Fprint(w, "\t\tcase ${COMP_WORDS[1]}$option-$place in\n")
	offer := func(place string, words []string) {
		fmt.Fprintf(w, "\t\t%s) words='%s' ;;\n", place, strings.Join(words, " "))
	}
	offer("help-1", verbNames(verbs))
	for _, v := range verbs {
		for i, words := range v.words {
			offer(fmt.Sprintf("%s-%d", v.name, i+1), words)
		}
		for _, o := range v.options {
			if o.words != nil {
				offer(v.name+"--"+o.name+"-*", o.words)
			}
		}
	}
	fmt.Fprint(w, "\t\tesac\n\t\tcase $word in\n\t\t-*)\n\t\t\tcase ${COMP_WORDS[1]} in\n")
	for _, v := range verbs {
		fmt.Fprintf(w, "\t\t\t%s) words='%s' ;;\n", v.name, strings.Join(optionNames(v.all()), " "))
	}
	fmt.Fprint(w, `			esac ;;
		esac ;;
	esac
	COMPREPLY=($(compgen -W "$words" -- "$word"))
}
complete -o default -F _overwire overwire
`)
}

// zsh writes a script that also describes the commands and options that it offers.
func zsh(w io.Writer, verbs []*verb) {
	fmt.Fprint(w, "#compdef overwire\n# zsh completion of overwire\n_overwire() {\n\tlocal -a verbs\n\tverbs=(\n")
	for _, v := range verbs {
		fmt.Fprintf(w, "\t\t%s\n", quoteForShell(v.name+":"+v.short))
	}
	fmt.Fprint(w, "\t\t'help:describe a command'\n\t)\n\tif (( CURRENT == 2 )); then\n\t\t_describe command "+
		"verbs\n\t\treturn\n\tfi\n\tlocal verb=$words[2]\n\tshift words\n\t(( CURRENT-- ))\n\tcase $verb in\n")
	fmt.Fprint(w, "\thelp) _describe command verbs ;;\n")
	for _, v := range verbs {
		fmt.Fprintf(w, "\t%s)\n\t\t_arguments", v.name)
		for _, o := range v.all() {
			doc := "[" + strings.NewReplacer("[", `\[`, "]", `\]`).Replace(o.doc) + "]"
			if o.value != "" {
				values := "_files"
				if o.words != nil {
					values = "(" + strings.Join(o.words, " ") + ")"
				}
				doc += ":" + strings.ReplaceAll(o.value, ":", `\:`) + ":" + values
			}
			fmt.Fprintf(w, " \\\n\t\t\t%s", quoteForShell("--"+o.name+doc))
			if o.short != "" {
				fmt.Fprintf(w, " \\\n\t\t\t%s", quoteForShell("-"+o.short+doc))
			}
		}
		for i, words := range v.words {
			fmt.Fprintf(w, " \\\n\t\t\t'%d:word:(%s)'", i+1, strings.Join(words, " "))
		}
		if v.most != len(v.words) {
			fmt.Fprint(w, " \\\n\t\t\t'*:file:_files'")
		}
		fmt.Fprint(w, " ;;\n")
	}
	fmt.Fprint(w, "\tesac\n}\nif [[ $funcstack[1] == _overwire ]]; then\n\t_overwire \"$@\"\nelse\n\tcompdef "+
		"_overwire overwire\nfi\n")
}

// fish writes a script with one line for each command and option.
func fish(w io.Writer, verbs []*verb) {
	fmt.Fprint(w, "# fish completion of overwire\n")
	for _, v := range verbs {
		fmt.Fprintf(w, "complete -c overwire -f -n __fish_use_subcommand -a %s -d %s\n", v.name, quoteForFish(v.short))
	}
	fmt.Fprint(w, "complete -c overwire -f -n __fish_use_subcommand -a help -d 'describe a command'\n")
	fmt.Fprintf(w, "complete -c overwire -f -n '__fish_seen_subcommand_from help' -a '%s'\n",
		strings.Join(verbNames(verbs), " "))
	for _, v := range verbs {
		seen, files := "__fish_seen_subcommand_from "+v.name, ""
		if v.most == len(v.words) {
			files = " -f" // no file names
		}
		for _, words := range v.words {
			fmt.Fprintf(w, "complete -c overwire%s -n '%s' -a '%s'\n", files, seen, strings.Join(words, " "))
			seen += "; and __fish_seen_subcommand_from " + strings.Join(words, " ")
		}
	}
	for _, v := range verbs {
		for _, o := range v.all() {
			fmt.Fprintf(w, "complete -c overwire -n '__fish_seen_subcommand_from %s' -l %s", v.name, o.name)
			if o.short != "" {
				fmt.Fprintf(w, " -s %s", o.short)
			}
			switch {
			case o.words != nil:
				fmt.Fprintf(w, " -x -a '%s'", strings.Join(o.words, " "))
			case o.value != "":
				fmt.Fprint(w, " -r")
			}
			fmt.Fprintf(w, " -d %s\n", quoteForFish(o.doc))
		}
	}
}

// quoteForShell quotes text as one word of a POSIX shell.
func quoteForShell(text string) string { return "'" + strings.ReplaceAll(text, "'", `'\''`) + "'" }

// quoteForFish quotes text as one word of fish, which interprets backslashes within quotes.
func quoteForFish(text string) string {
	return "'" + strings.NewReplacer(`\`, `\\`, "'", `\'`).Replace(text) + "'"
}
