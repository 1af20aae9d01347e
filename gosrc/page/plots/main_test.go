package main

import (
	"bytes"
	"encoding/xml"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

const folder = "../../../docs/plots"

func committed(t *testing.T) []plot {
	t.Helper()
	all, err := read(folder)
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// Promise: the committed plots are those that `make plots` draws from the committed
// figures, and no other file lies beside them.
func TestCommitted(t *testing.T) {
	want := []string{"figures.json"}
	for _, p := range committed(t) {
		want = append(want, p.File)
		text, err := os.ReadFile(filepath.Join(folder, p.File))
		if err != nil {
			t.Fatal(err)
		}
		if string(text) != p.draw() {
			t.Errorf("%s: run make plots", p.File)
		}
	}
	entries, err := os.ReadDir(folder)
	if err != nil {
		t.Fatal(err)
	}
	var have []string
	for _, e := range entries {
		have = append(have, e.Name())
	}
	slices.Sort(want)
	if !slices.Equal(have, want) {
		t.Errorf("%v, want %v", have, want)
	}
}

// Promise: each number of figures.json stands in docs/benchmarks.md, in the one line
// that the figure names, and so does the command that measured it.
func TestFiguresStandInTheBenchmarks(t *testing.T) {
	text, err := os.ReadFile("../../../docs/benchmarks.md")
	if err != nil {
		t.Fatal(err)
	}
	numeral := regexp.MustCompile(`[0-9]+(\.[0-9]+)?`)
	for _, p := range committed(t) {
		if p.Title == "" || p.About == "" || p.Unit == "" || len(p.Bars) == 0 {
			t.Errorf("%s: something is empty", p.File)
		}
		for _, word := range strings.Fields(p.How) {
			if word != "with" && !bytes.Contains(text, []byte(word)) {
				t.Errorf("%s: how it was measured: %s is not in the benchmarks", p.File, word)
			}
		}
		for _, f := range p.figures() {
			var lines []string
			for line := range strings.Lines(string(text)) {
				if strings.Contains(line, f.Line) {
					lines = append(lines, line)
				}
			}
			if f.Line == "" || len(lines) != 1 {
				t.Errorf("%s: %s: %d lines have %q", p.File, f.Name, len(lines), f.Line)
				continue
			}
			has := numeral.FindAllString(lines[0], -1)
			for _, n := range append(numeral.FindAllString(f.Note, -1), texts(f.numbers())...) {
				if !slices.Contains(has, n) {
					t.Errorf("%s: %s: %s is not in %q", p.File, f.Name, n, lines[0])
				}
			}
		}
	}
}

func texts(all []number) (out []string) {
	for _, n := range all {
		out = append(out, string(n))
	}
	return out
}

// Promise: a plot is well-formed XML with a title and every figure in its
// description, and asks for nothing.
func TestPlotsAreWellFormed(t *testing.T) {
	for _, p := range committed(t) {
		text := p.draw()
		d := xml.NewDecoder(strings.NewReader(text))
		for {
			if _, err := d.Token(); err == io.EOF {
				break
			} else if err != nil {
				t.Fatalf("%s: %v", p.File, err)
			}
		}
		_, rest, _ := strings.Cut(text, "<desc")
		desc, _, _ := strings.Cut(rest, "</desc>")
		for _, f := range p.Bars {
			if !strings.Contains(desc, string(f.Value)) {
				t.Errorf("%s: %s is not described", p.File, f.Name)
			}
		}
		if n := strings.Count(text, "http"); n != 1 { // the name space
			t.Errorf("%s: %d addresses", p.File, n)
		}
	}
}

// Promise: figures that are no numbers and keys that mean nothing are refused.
func TestBadFigures(t *testing.T) {
	for _, text := range []string{
		`{"plots":[{"file":"x.svg","bars":[{"name":"a","value":"fast"}]}]}`,
		`{"plots":[{"file":"x.svg","bars":[{"name":"a","value":"1","lines":"a"}]}]}`,
		`{`,
	} {
		dir := t.TempDir()
		if err := os.WriteFile(filepath.Join(dir, "figures.json"), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if run(dir) == nil {
			t.Errorf("%s is drawn", text)
		}
	}
}
