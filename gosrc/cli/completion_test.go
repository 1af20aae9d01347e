package cli

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// written writes the script for a shell and returns its path. It skips the test if the shell is not installed.
func written(t *testing.T, shell string) string {
	t.Helper()
	if _, err := exec.LookPath(shell); err != nil {
		t.Skipf("%s is not installed", shell)
	}
	path := filepath.Join(t.TempDir(), "a script")
	if err := os.WriteFile(path, []byte(must(t, "completion", shell)), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// said runs a shell and returns the words that it prints, sorted.
func said(t *testing.T, dir, shell string, argv ...string) []string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	c := exec.CommandContext(ctx, shell, argv...)
	c.Dir, c.Stderr = dir, os.Stderr
	out, err := c.Output()
	if err != nil {
		t.Fatalf("%s %q: %v: %s", shell, argv, err, out)
	}
	words := strings.Fields(string(out))
	slices.Sort(words)
	return words
}

// With the script, Bash completes commands, options, option values and fixed arguments. File names are left to Bash's
// own completion.
func TestCompletionBash(t *testing.T) {
	script := written(t, "bash")
	ask := `source "$0"; complete -p overwire >/dev/null || exit 1; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _overwire; printf '%s\n' "${COMPREPLY[@]}"`
	for _, c := range []struct{ line, want []string }{
		{[]string{"com"}, []string{"completion", "compress"}},
		{[]string{""}, append(verbNames(verbs()), "help", "--help", "--version")},
		{[]string{"load", "-"}, optionNames(loadVerb.all())},
		{[]string{"inspect", "a.safetensors", "--su"}, []string{"--summary"}},
		{[]string{"completion", "z"}, []string{"zsh"}},
		{[]string{"completion", "--j"}, []string{"--json"}},
		{[]string{"help", "doc"}, []string{"doctor"}},
		{[]string{"load", "mod"}, nil},
		{[]string{"convert", "a.safetensors", "--to", ""}, []string{"overwire", "safetensors"}},
		{[]string{"convert", "a.safetensors", "--to", "=", "s"}, []string{"safetensors"}},
		{[]string{"load", "a", "--device", "="}, devices},
		{[]string{"compress", "--level", "s"}, []string{"smaller"}},
		{[]string{"cache", ""}, []string{"clear", "list"}},
		{[]string{"bench", "gen", ""}, kindNames()},
		{[]string{"bench", "--device", "c"}, devices},
		{[]string{"bench", "gen", "uniform", ""}, nil},
		{[]string{"bench", "--size", "1GB", "g"}, []string{"gen"}},
		{[]string{"bench", "--size", "=", "1GB", "gen", "--force", "unif"}, []string{"uniform"}},
		{[]string{"cache", "--json", "l"}, []string{"list"}},
		{[]string{"verify", "--", "--j"}, nil},
		{[]string{"squash", "-"}, nil},
	} {
		slices.Sort(c.want)
		argv := slices.Concat([]string{"--norc", "-c", ask, script, "overwire"}, c.line)
		if got := said(t, t.TempDir(), "bash", argv...); !slices.Equal(got, c.want) {
			t.Errorf("%q: %q, want %q", c.line, got, c.want)
		}
	}
}

// With the script, Zsh completes overwire's command line.
func TestCompletionZsh(t *testing.T) {
	script := written(t, "zsh")
	ask := `autoload -U compinit; compinit -u -D; source "$0" && (( $+functions[_overwire] )) && print $_comps[overwire]`
	if got := said(t, t.TempDir(), "zsh", "-f", "-c", ask, script); !slices.Equal(got, []string{"_overwire"}) {
		t.Errorf("overwire is completed by %q", got)
	}
	// The script's arguments become visible: zsh's own functions, which work only in the line editor, are replaced.
	ask = `function compdef { :; }; source "$0"; function _describe { print ${(P)2%%:*}; }; function _arguments { print -l -- "$@"; }
		words=("$@"); CURRENT=$#; _overwire`
	for _, c := range []struct{ line, want []string }{
		{[]string{""}, append(verbNames(verbs()), "help")},
		{[]string{"help", ""}, append(verbNames(verbs()), "help")},
		{[]string{"completion", "z"}, []string{"--help[print", "this", "help]", "-h[print", "this", "help]", "--json[print",
			"the", "result", "as", "one", "JSON", "document]", "1:word:(bash", "zsh", "fish)"}},
		{[]string{"cache", ""}, []string{"--help[print", "this", "help]", "-h[print", "this", "help]", "--json[print",
			"the", "result", "as", "one", "JSON", "document]", "1:word:(list", "clear)", "*:file:_files"}},
	} {
		slices.Sort(c.want)
		if got := said(t, t.TempDir(), "zsh", slices.Concat([]string{"-f", "-c", ask, script, "overwire"},
			c.line)...); !slices.Equal(got, c.want) {
			t.Errorf("%q: %q, want %q", c.line, got, c.want)
		}
	}
}

// With the script, Fish completes commands, options and shells.
func TestCompletionFish(t *testing.T) {
	script := written(t, "fish")
	for _, c := range []struct {
		line string
		want []string
	}{
		{"overwire comple", []string{"completion"}},
		{"overwire inspect --summ", []string{"--summary"}},
		{"overwire completion z", []string{"zsh"}},
		{"overwire help docto", []string{"doctor"}},
		{"overwire convert --to saf", []string{"safetensors"}},
		{"overwire bench gen unif", []string{"uniform"}},
	} {
		// Each line is a word, a tab, and its description.
		ask := `source $argv[1]; complete -C $argv[2] | string replace -r '\t.*' ''; true`
		if got := said(t, t.TempDir(), "fish", "--no-config", "-c", ask, script, c.line); !slices.Equal(got, c.want) {
			t.Errorf("%q: %q, want %q", c.line, got, c.want)
		}
	}
}

// An unknown shell is refused with the names of the known ones.
func TestCompletionUnknown(t *testing.T) {
	status, out, stderr := overwire("completion", "tcsh")
	if status != ExitUsage || out != "" || !strings.Contains(stderr, "bash, fish, zsh") {
		t.Errorf("status %d, %q, %q", status, out, stderr)
	}
}
