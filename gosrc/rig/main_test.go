package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/measure"
)

// What is measured may stand before or behind the options.
func TestParse(t *testing.T) {
	for _, argv := range [][]string{
		{"net", "--size", "1GB", "--repeat=5", "--dir", "/dev/shm", "-json"},
		{"--size", "1GB", "--repeat", "5", "--dir", "/dev/shm", "--json", "net"},
	} {
		opt, asJSON, err := parseOptions(argv, &bytes.Buffer{})
		if err != nil || opt.What != "net" || opt.Size != 1e9 || opt.Repeat != 5 || opt.Dir != "/dev/shm" || !asJSON {
			t.Errorf("%q: %+v, %v, %v", argv, opt, asJSON, err)
		}
	}
	opt, _, err := parseOptions([]string{"--device", "cuda", "--only", "bf16,many", "--limit", "220", "--out", "o",
		"--trace", "t", "--threads", "3"}, &bytes.Buffer{})
	if err != nil || opt.Device != "cuda" || strings.Join(opt.Only, ",") != "bf16,many" ||
		opt.Limit != 220*time.Second || opt.Size != 16_060_000_000 ||
		opt.Out != "o" || opt.Trace != "t" || opt.Threads != 3 {
		t.Errorf("%+v, %v", opt, err)
	}
}

// A command line that makes no sense is an argument error; help shows every option.
func TestParseRefuses(t *testing.T) {
	for _, text := range []string{
		"speed", "codec load", "codec --size none", "--size 0", "--repeat x", "--repeat -1", "--threads -1",
		"--only bf16", "--limit 3",
		"--device cuda --only all", "--device cuda codec", "--fast", "--device cpu --limit -1",
	} {
		if _, _, err := parseOptions(strings.Fields(text), &bytes.Buffer{}); !errors.Is(err, errs.ErrArgument) {
			t.Errorf("%s: %v", text, err)
		}
	}
	var text bytes.Buffer
	if _, _, err := parseOptions([]string{"--help"}, &text); !errors.Is(err, flag.ErrHelp) ||
		!strings.Contains(text.String(), "-limit") || !strings.Contains(text.String(), "kinds") {
		t.Errorf("%v: %s", err, text.String())
	}
}

// A command shows rows as a table or one JSON document.
func TestCommand(t *testing.T) {
	var text, document bytes.Buffer
	argv := []string{"codec", "--size", "1MB", "--repeat", "1", "--dir", t.TempDir()}
	if err := runCommand(t.Context(), argv, &text, &text); err != nil ||
		!strings.Contains(text.String(), "codec\n  generated bf16: stored / original") {
		t.Errorf("%v: %s", err, text.String())
	}
	var rep measure.Report
	if err := runCommand(t.Context(), append(argv, "--json"), &document, &text); err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(document.Bytes(), &rep); err != nil || len(rep.Rows) < 10 ||
		rep.Rows[0].Value == 0 {
		t.Errorf("%v: %s", err, document.String())
	}
	text.Reset()
	failing := []string{"--device", "cpu", "--size", "1MB", "--repeat", "1", "--dir", t.TempDir(), "--trace",
		"/no/such/folder/trace", "--only", "bf16", "--json"}
	err := runCommand(t.Context(), failing, &text, &text)
	if err == nil || !strings.Contains(text.String(), `"failures"`) || !strings.Contains(text.String(), "FAILED: ") {
		t.Errorf("%v: %s", err, text.String())
	}
}

// Every command that the pages of figures name is one that the rig takes.
func TestCommandsOfThePages(t *testing.T) {
	var pages []byte
	for _, pattern := range []string{"*.md", "log/*.md"} {
		paths, err := filepath.Glob(filepath.Join("../../docs/benchmarks", pattern))
		if err != nil {
			t.Fatal(err)
		}
		for _, path := range paths {
			page, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			pages = append(pages, page...)
		}
	}
	found := 0
	for _, m := range regexp.MustCompile("overwire-rig([^`#\n]*)").FindAllStringSubmatch(string(pages), -1) {
		argv, _, _ := strings.Cut(m[1], ">") // what a shell takes away
		if _, _, err := parseOptions(strings.Fields(argv), &bytes.Buffer{}); err != nil {
			t.Errorf("overwire-rig%s: %v", m[1], err)
		}
		found++
	}
	if found < 8 {
		t.Errorf("%d commands", found)
	}
}
