package main

// This file writes the Python functions of the verbs, and the types of their requests.

import (
	"fmt"
	"path"
	"reflect"
	"regexp"
	"slices"
	"strings"

	"github.com/overwire/overwire/gosrc/bind/binding"
)

// classes collects the TypedDicts that the verbs need. A class that is first used in a request has no required fields,
// because a request may omit any field.
type classes struct {
	texts map[string]string // keyed by name
	order []string          // names in order; a class comes after the classes that it uses

	names, kinds, docs map[string]string // overrides: class names, field types, docstrings
	flat               bool              // embedded structs do not become base classes
}

// of returns the Python notation of a type.
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

// class adds a struct and returns its name. Embedded structs become base classes.
func (c *classes) class(t reflect.Type, asked bool) string {
	name := strings.ToUpper(t.Name()[:1]) + t.Name()[1:]
	if pkg := path.Base(t.PkgPath()); pkg != "binding" {
		name = strings.ToUpper(pkg[:1]) + pkg[1:] + name
	}
	if public := c.names[name]; public != "" {
		name = public
	}
	if _, isKnown := c.texts[name]; isKnown {
		return name
	}
	c.texts[name] = "" // the struct may contain itself
	bases, fields, keyword := c.fieldsOf(name, t, asked)
	c.texts[name] = writeClass(name, c.docs[name], bases, fields, asked, keyword)
	c.order = append(c.order, name)
	return name
}

// fieldsOf returns the base classes and the fields of a struct, and whether the name of a field is a Python keyword.
func (c *classes) fieldsOf(name string, t reflect.Type, asked bool) (bases, fields []string, keyword bool) {
	for i := range t.NumField() {
		f := t.Field(i)
		tag := f.Tag.Get("json")
		if f.Anonymous && c.flat {
			_, own, _ := c.fieldsOf(name, f.Type, asked)
			fields = append(fields, own...)
		} else if f.Anonymous {
			bases = append(bases, c.class(f.Type, asked))
		}
		if f.Anonymous || !f.IsExported() || tag == "-" {
			continue
		}
		key, rest, _ := strings.Cut(tag, ",")
		if key == "" {
			key = f.Name
		}
		kind, isNarrowed := c.kinds[name+"."+key]
		if isNarrowed && kind == "" {
			continue
		}
		if full := c.of(f.Type, asked); !isNarrowed {
			kind = full
			if !asked && strings.HasPrefix(rest, "omit") {
				kind = "NotRequired[" + kind + "]"
			}
		}
		fields = append(fields, key+": "+kind)
		keyword = keyword || key == "from"
	}
	return bases, fields, keyword
}

// writeClass writes a TypedDict. keyword means that the name of a field is a Python keyword.
func writeClass(name, doc string, bases, fields []string, asked, keyword bool) string {
	var b strings.Builder
	if keyword {
		if b.WriteString("\n\n"); doc != "" {
			fmt.Fprintf(&b, "#: %s\n", doc)
		}
		fmt.Fprintf(&b, "%s = TypedDict(\n    %q,\n    {\n", name, name)
		for _, f := range fields {
			key, kind, _ := strings.Cut(f, ": ")
			fmt.Fprintf(&b, "        %q: %q,\n", key, kind)
		}
		fmt.Fprintf(&b, "    },\n%s)\n", map[bool]string{true: "    total=False,\n"}[asked])
		return b.String()
	}
	if len(bases) == 0 {
		bases = []string{"TypedDict"}
	}
	if asked {
		bases = append(bases, "total=False")
	}
	fmt.Fprintf(&b, "\n\nclass %s(%s):\n", name, strings.Join(bases, ", "))
	if doc != "" {
		if strings.Contains(doc, "\n") {
			doc = strings.ReplaceAll(strings.ReplaceAll(doc+"\n", "\n", "\n    "), "\n    \n", "\n\n")
		}
		fmt.Fprintf(&b, "    \"\"\"%s\"\"\"\n\n", doc)
	}
	for _, f := range fields {
		fmt.Fprintf(&b, "    %s\n", f)
	}
	if len(fields) == 0 {
		b.WriteString("    pass\n")
	}
	return b.String()
}

// table returns the types of all verbs, and their functions.
func table() (*classes, string) {
	c := &classes{texts: map[string]string{}}
	var functions strings.Builder
	for _, v := range binding.Table() {
		functions.WriteString(function(c, v))
		if v.Name == "load" { // part of the public jobs.LastReport
			stages, _ := v.Result.FieldByName("Stages")
			c.of(stages.Type, false)
		}
	}
	return c, functions.String()
}

// types writes the module of requests and results, which only type checkers use.
func types() string {
	c, _ := table()
	var b strings.Builder
	b.WriteString(head + `"""Requests and results of the engine's verbs: Go structs as JSON. Fields that a request
omits have their zero value."""

from __future__ import annotations

from typing import TypedDict

from typing_extensions import NotRequired
`)
	for _, name := range c.order {
		b.WriteString(c.texts[name])
	}
	return b.String()
}

func verbs() string {
	_, functions := table()
	return head + `# mypy: disable-error-code="no-any-return"
"""Calls the engine's verbs. The argument ` + "`numbers`" + ` comes last. It has int64
values packed by ` + "`array`" + ` or ` + "`struct`" + `.

A function that uses ` + "`" + `core().call` + "`" + ` returns at once.
A function that uses ` + "`" + `core().run` + "`" + ` waits. After Ctrl-C, its verb is cancelled and no longer
uses the caller's memory. A JobNumber identifies a running verb. See jobs.py.
"""

from __future__ import annotations

from json import dumps, loads
from struct import pack

from ._engine import core, handle
from ._order import await_saves

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from . import _requests
    from ._core import Result
    from ._engine import JobNumber


def _number(made: Result) -> int:
    return int.from_bytes(made[1], "little", signed=True)


def _encode_request(request: Any) -> str:
    return dumps(request) if request else ""
` + functions
}

// function returns the Python function of a verb.
func function(c *classes, v *binding.Verb) string {
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
			params, text = append(params, "request: "+c.named(c.of(q, true))), "_encode_request(request)"
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
	if v.WritesPath() {
		line = "await_saves(request)\n    " + line
	}
	return fmt.Sprintf("\n\ndef %s(%s) -> %s:\n    \"\"\"%s\"\"\"\n    %s\n", v.Name, strings.Join(params, ", "),
		result, wrapped(doc), line)
}

// result returns a function's return type and its last line.
func result(c *classes, v *binding.Verb, call string) (kind, line string) {
	switch r := v.Result; {
	case v.Kind == binding.Started:
		return "JobNumber", "return " + call
	case r == nil:
		return "None", call
	case r == reflect.TypeFor[int64]():
		return "int", "return _number(" + call + ")"
	case r == reflect.TypeFor[*binding.Result]():
		return "Result", "return " + call
	default:
		return c.named(c.of(r, false)), "return loads(" + call + "[0])"
	}
}

// named returns a type as the generated verbs module writes it: classes get the prefix _requests.
func (c *classes) named(kind string) string {
	return regexp.MustCompile(`\w+`).ReplaceAllStringFunc(kind, func(word string) string {
		if c.texts[word] != "" {
			return "_requests." + word
		}
		return word
	})
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
