package main

// This file writes the Python functions of the verbs, and the types of their
// requests.

import (
	"fmt"
	"maps"
	"path"
	"reflect"
	"regexp"
	"slices"
	"strings"

	"github.com/overwire/overwire/gosrc/bind/binding"
)

// classes are the TypedDicts that the verbs need, sorted by name.
type classes struct {
	fields map[string][]string // by name
	asked  map[string]bool     // part of a request: every field may be left out
}

// of is a type in Python's notation.
func (c *classes) of(t reflect.Type, asked bool) string {
	switch t.Kind() {
	case reflect.String:
		return "str"
	case reflect.Bool:
		return "bool"
	case reflect.Float32, reflect.Float64:
		return "float"
	case reflect.Pointer:
		return c.of(t.Elem(), asked) + " | None"
	case reflect.Slice, reflect.Array:
		if t.Elem().Kind() == reflect.Uint8 && t.Kind() == reflect.Slice {
			return "str" // base64
		}
		return "list[" + c.of(t.Elem(), asked) + "]"
	case reflect.Map:
		return "dict[str, " + c.of(t.Elem(), asked) + "]"
	case reflect.Struct:
		return c.class(t, asked)
	case reflect.Interface:
		return "Any"
	}
	return "int"
}

// class adds a struct and returns its name.
func (c *classes) class(t reflect.Type, asked bool) string {
	name := strings.ToUpper(t.Name()[:1]) + t.Name()[1:]
	if pkg := path.Base(t.PkgPath()); pkg != "binding" {
		name = strings.ToUpper(pkg[:1]) + pkg[1:] + name
	}
	c.asked[name] = c.asked[name] || asked
	if _, known := c.fields[name]; known {
		return name
	}
	c.fields[name] = nil // it may contain itself
	var fields []string
	for _, f := range reflect.VisibleFields(t) {
		tag := f.Tag.Get("json")
		if f.Anonymous || !f.IsExported() || tag == "-" {
			continue
		}
		key, rest, _ := strings.Cut(tag, ",")
		if key == "" {
			key = f.Name
		}
		kind := c.of(f.Type, asked)
		if !asked && strings.HasPrefix(rest, "omit") {
			kind = "NotRequired[" + kind + "]"
		}
		fields = append(fields, key+": "+kind)
	}
	c.fields[name] = fields
	return name
}

func (c *classes) names() []string { return slices.Sorted(maps.Keys(c.fields)) }

func (c *classes) String() string {
	var b strings.Builder
	for _, n := range c.names() {
		total := ""
		if c.asked[n] {
			total = ", total=False"
		}
		if slices.ContainsFunc(c.fields[n], func(f string) bool { return strings.HasPrefix(f, "from: ") }) { // a keyword
			fmt.Fprintf(&b, "\n\n%s = TypedDict(\n    %q,\n    {\n", n, n)
			for _, f := range c.fields[n] {
				key, kind, _ := strings.Cut(f, ": ")
				fmt.Fprintf(&b, "        %q: %q,\n", key, kind)
			}
			fmt.Fprintf(&b, "    },\n%s)\n", map[bool]string{true: "    total=False,\n"}[c.asked[n]])
			continue
		}
		fmt.Fprintf(&b, "\n\nclass %s(TypedDict%s):\n", n, total)
		for _, f := range c.fields[n] {
			fmt.Fprintf(&b, "    %s\n", f)
		}
	}
	return b.String()
}

func table() (*classes, string, []string) {
	c := &classes{map[string][]string{}, map[string]bool{}}
	var body strings.Builder
	var names []string
	for _, v := range binding.Table() {
		names = append(names, v.Name)
		body.WriteString(function(c, v))
	}
	return c, body.String(), names
}

// types writes the module of requests and results, which only type checkers read.
func types() string {
	c, _, _ := table()
	return head + `"""Requests and results of the engine's verbs: Go's structs as JSON. What is left out of
a request is its zero value there."""

from __future__ import annotations

from typing import TypedDict

from typing_extensions import NotRequired
` + c.String()
}

func verbs() string {
	c, body, names := table()
	var imports, all strings.Builder
	for _, n := range c.names() {
		if regexp.MustCompile(`\b` + n + `\b`).MatchString(body) {
			fmt.Fprintf(&imports, "        %s,\n", n)
		}
	}
	slices.Sort(names)
	for _, n := range names {
		fmt.Fprintf(&all, "    %q,\n", n)
	}
	return head + `"""The engine's verbs. Numbers that a verb takes beside its request, and after those that
have names, are int64 packed by ` + "`array`" + ` or ` + "`struct`" + `.

A verb that answers does not wait. One that waits can be interrupted: after Ctrl-C it is
cancelled, and no longer uses the caller's memory. A JobNumber names a verb that runs;
see jobs.py.
"""

from __future__ import annotations

from json import dumps, loads
from struct import pack

from ._engine import core, handle

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ._core import Result
    from ._engine import JobNumber
    from ._requests import (
` + imports.String() + "    )\n\n__all__ = [\n" + all.String() + "]\n" + body
}

// function writes the Python function of a verb.
func function(c *classes, v binding.Verb) string {
	var params []string
	text := `""`
	if q := v.Request; q != nil {
		switch {
		case q == reflect.TypeFor[binding.Text]():
			params, text = append(params, "word: str"), "word"
		case strings.HasPrefix(q.Name(), "Dumped["):
			c.of(q.Field(0).Type, true)
			params, text = append(params, "request: str"), "request"
		default:
			params, text = append(params, "request: "+c.of(q, true)), "dumps(request)"
		}
	}
	numbers := `b""`
	if n := len(v.Ints); n > 0 {
		values := slices.Clone(v.Ints)
		for i, name := range v.Ints {
			params = append(params, name+": int")
			if slices.Contains([]string{"model", "job", "batch"}, name) {
				values[i] = "handle(" + name + ")"
			}
		}
		numbers = fmt.Sprintf(`pack("=%dq", %s)`, n, strings.Join(values, ", "))
	}
	if v.Tail != "" {
		last := "numbers: bytes"
		if v.Name == "load" {
			last += ` = b""`
		}
		params = append(params, last)
		if len(v.Ints) > 0 {
			numbers += " + numbers"
		} else {
			numbers = "numbers"
		}
	}
	doc := v.Doc
	if v.Tail != "" {
		doc += " Numbers: " + v.Tail + "."
	}
	how := map[binding.Kind]string{binding.Answered: "call", binding.Awaited: "run", binding.Started: "start"}[v.Kind]
	call := fmt.Sprintf("core().%s(%q, %s, %s)", how, v.Name, text, numbers)
	result, line := result(c, v, call)
	return fmt.Sprintf("\n\ndef %s(%s) -> %s:\n    \"\"\"%s\"\"\"\n%s", v.Name, strings.Join(params, ", "), result, wrapped(doc), line)
}

// result is what a function returns, and its last lines.
func result(c *classes, v binding.Verb, call string) (kind, lines string) {
	switch r := v.Result; {
	case v.Kind == binding.Started:
		if r != nil && r != reflect.TypeFor[*binding.Result]() {
			c.of(r, false) // the type of its report
		}
		return "JobNumber", "    job: JobNumber = " + call + "\n    return job\n"
	case r == nil:
		return "None", "    " + call + "\n"
	case r == reflect.TypeFor[int64]():
		return "int", "    made: Result = " + call + "\n    return int.from_bytes(made[1], \"little\", signed=True)\n"
	case r == reflect.TypeFor[*binding.Result]():
		return "Result", "    made: Result = " + call + "\n    return made\n"
	default:
		kind = c.of(r, false)
		return kind, "    made: " + kind + " = loads(" + call + "[0])\n    return made\n"
	}
}

// wrapped breaks a docstring at 100 columns.
func wrapped(doc string) string {
	var lines []string
	line := ""
	for _, word := range strings.Fields(doc) {
		if len(line)+len(word) > 98 {
			lines = append(lines, line)
			line = "   "
		}
		line = strings.TrimLeft(line+" "+word, "")
		if len(lines) == 0 {
			line = strings.TrimPrefix(line, " ")
		}
	}
	return strings.Join(append(lines, line), "\n")
}
