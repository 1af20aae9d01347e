"""Converts overwire's docstrings, which are plain text, to reStructuredText for Sphinx.

A docstring has paragraphs, and `code` in single backticks. An argument or a field is
`name: text`, with continuation lines indented. Examples are indented and follow an empty
line. Names that are on the API pages become links.
"""

from __future__ import annotations

import inspect
import re

import overwire

# Types of other packages, and names that only annotations use. They are not on the API pages.
FOREIGN = [
    (r"py:.*", r"(torch|numpy|np|os|typing|typing_extensions|collections|contextlib|types)\..*"),
    (r"py:class", r"(overwire\..*\.)?(BinaryFile|Bytes|DeltaFile|Experts|Format|FormatAccess|Model|Shared)"),
    (r"py:class", r"(overwire\..*\.)?(PipelineStages|WorkStages|T|TensorizerDerivation|TorchName)"),
    (r"py:class", r"(overwire\..*\.)?(BundleOptions|SaveOptions|UnpickleOptions|_EncodeOptions)"),  # the functions document them
    (r"py:class", r"PathLike|(dict|tuple)\[str"),  # from the fields of a NamedTuple, which have strings as annotations
]

_MODULES = {"codecs", "compat", "distributed", "errors"}
_KINDS = {name: "exc" if name.endswith(("Error", "Failure")) else "obj" for name in dir(overwire) if name not in _MODULES}
_WORDS = re.compile(rf"(?<![\w`.~])({'|'.join(sorted((n for n, k in _KINDS.items() if k == 'exc'), key=len, reverse=True))})(?![\w`])")
_FIELD = re.compile(r"^([a-z]\w*(?:, \w+)*): (?=\S)")


def _prose(text: str) -> str:
    """Convert a line outside of examples, with links for names."""
    parts = re.split(r"(``[^`]+``|`[^`]+`)", text)
    for at, part in enumerate(parts):
        if part.startswith("``"):
            continue
        if part.startswith("`") and len(part) > 1:
            inner = part.strip("`")
            bare = inner.removeprefix("overwire.").removesuffix("()")
            parts[at] = f":py:{_KINDS[bare]}:`~overwire.{bare}`" if bare in _KINDS else f"``{inner}``"
        else:
            escaped = re.sub(r"([*|\\])", r"\\\1", part)
            escaped = re.sub(r"(\w)_(?=\W|$)", r"\1\\_", escaped)
            linked = _WORDS.sub(r":py:exc:`~overwire.\1`", escaped)
            parts[at] = re.sub(r"\b(docs/\w+)\.md\b", r":doc:`\1.md </\1>`", linked)
    for at in range(1, len(parts), 2):  # a word right after code, as in `TensorSpec`s
        parts[at] += "\\ " if parts[at + 1][:1].isalnum() else ""
    return "".join(parts)


def rst(lines: list[str]) -> list[str]:
    """Return the lines of a docstring as reStructuredText."""
    lines = re.sub(r"`[^`]+`", lambda code: " ".join(code[0].split()), "\n".join(lines)).split("\n")
    out: list[str] = []
    before, example, field = "", False, False
    for line in lines:
        indented = line.startswith("    ")
        if not line.strip():
            before = ""
            out.append("")
            continue
        if indented and not before.strip() and not field:
            if not example:
                out += ["::", ""]
            example = True
            out.append("    " + line)
        elif indented and example:
            out.append("    " + line)
        else:
            if example:
                out.append("")
            example = False
            found = _FIELD.match(line)
            if found:
                if before.strip() and not field:
                    out.append("")
                names = ", ".join(f"``{name}``" for name in found[1].split(", "))
                out += [names, "    " + _prose(line[found.end() :])]
                field = True
            elif indented:
                out.append("    " + _prose(line.strip()))
            else:
                if field and before.strip():
                    out.append("")
                field = False
                out.append(_prose(line))
        before = line
    return out


def join_overloads(overloads: list[inspect.Signature]) -> inspect.Signature:
    """Return one signature for all overloads of a function. It is the last overload with the most parameters. Flags
    become bool, a default of any overload is used, and the result is the union of all results."""
    last = max(reversed(overloads), key=lambda each: len(each.parameters))
    flags = {"Literal[True]", "Literal[False]"}
    parameters = []
    for p in last.parameters.values():
        defaults = [each.parameters[p.name].default for each in overloads if p.name in each.parameters]
        default = next((each for each in defaults if each is not p.empty), p.empty)
        parameters.append(p.replace(annotation="bool" if p.annotation in flags else p.annotation, default=default))
    results = list(dict.fromkeys(str(each.return_annotation) for each in overloads))
    result = last.return_annotation if "Any" in str(last.return_annotation) else " | ".join(results)
    return last.replace(parameters=parameters, return_annotation=result)


def convert(app: object, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Sphinx's hook: changes the lines in place. Removes Python's default docstrings of fields."""
    lines[:] = [] if lines and lines[0].startswith("Alias for field number") else [*rst(lines), ""]
