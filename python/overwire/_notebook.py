"""Formats reports, plans and opened files for notebooks: a line of facts, and HTML tables.

All text from files is escaped and put in its own element. A tensor name cannot become
markup or change the direction of the text around it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, TypeVar

T = TypeVar("T")

#: Maximum number of rows in a table; more would slow the notebook down.
MOST = 200

_MARKUP = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#x27;"})
# Control characters, and bytes of file names that are not text.
_BAD = dict.fromkeys([*range(0x20), *range(0x7F, 0xA0), *range(0xD800, 0xE000), 0xFFFE, 0xFFFF], "\ufffd")
# The colours come from the notebook, in dark and light mode.
_STYLE = (
    ".overwire{overflow-x:auto}.overwire table{border-collapse:collapse;margin:4px 0 8px}"
    ".overwire caption{text-align:left;opacity:.75}.overwire th,.overwire "
    "td{padding:2px 10px;text-align:right;white-space:nowrap}"
    ".overwire th:first-child{text-align:left;white-space:normal;overflow-wrap:anywhere;min-width:18em}"
    ".overwire td.text{text-align:left;white-space:normal;overflow-wrap:anywhere;min-width:20em}.overwire tbody "
    "th{font-weight:normal}"
    ".overwire thead th{border-bottom:1px solid}"
)
_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def _cell_text(value: object) -> str:
    text = str(value)
    if len(text) > 500:
        text = text[:499] + "\u2026"
    return f"<bdi>{text.translate(_BAD).translate(_MARKUP)}</bdi>"


# Names of facts that count bytes.
_SIZES = {"bytes", "stored", "written", "total", "available", "limit", "free", "memory"}


def _format_fact(name: object, value: object) -> object:
    """Formats one value of a dict for people."""
    if isinstance(value, int) and not isinstance(value, bool):
        is_size = name in _SIZES or str(name).endswith("_bytes")
        return size(value) if is_size and value >= 0 else value
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"{value:.3g}" if isinstance(value, float) else value


def _shorten_list(values: list[object], most: int = 5) -> str:
    shown = [repr(value) for value in values[:most]]
    return f"[{', '.join(shown + [f'and {len(values) - most} more'] * (len(values) > most))}]"


def size(number: int) -> str:
    """Formats a number of bytes for people: 16.1 GB."""
    value, unit = float(number), 0
    while value >= 999.5 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{value:.0f} B" if unit == 0 else f"{value:.3g} {_UNITS[unit]}"


def largest(rows: Iterable[T], bytes_of: Callable[[T], int]) -> list[T]:
    """Returns the rows with the most bytes, at most `MOST`, in stable order."""
    return sorted(rows, key=bytes_of, reverse=True)[:MOST]


def _class_of(cell: object) -> str:
    """Returns the class for long texts, which wrap and are aligned to the left."""
    return ' class="text"' if isinstance(cell, str) and len(cell) > 40 else ""


def table(
    caption: str, head: Sequence[str], rows: Iterable[Sequence[object]], count: int | None = None, folded: bool = False
) -> str:
    """Makes an HTML table.

    head: column titles. rows: cells; the first cell of a row is its name.
    count: the total number of rows, if not all are shown.
    folded: whether the table is closed until it is clicked.
    """
    body = []
    for row in islice(rows, MOST):
        first, *others = row
        cells = "".join(f"<td{_class_of(cell)}>{_cell_text(cell)}</td>" for cell in others)
        body.append(f'<tr><th scope="row">{_cell_text(first)}</th>{cells}</tr>')
    if count is not None and count > len(body):
        body.append(f'<tr><th scope="row" colspan="{len(head)}">and {count - len(body):,} more</th></tr>')
    names = "".join(f'<th scope="col">{_cell_text(name)}</th>' for name in head)
    rest = f"<thead><tr>{names}</tr></thead><tbody>{''.join(body)}</tbody></table>"
    if folded:
        return f"<details><summary>{_cell_text(caption)}</summary><table>{rest}</details>"
    return f"<table><caption>{_cell_text(caption)}</caption>{rest}"


def tensors(order: str, rows: Iterable[tuple[str, str, Iterable[int], int, int]], count: int, *, folded: bool) -> str:
    """Makes a table of tensors. A row has a tensor's name, dtype, shape, and bytes in memory and in the file."""
    cells = ((name, dtype, list(shape), size(nbytes), size(stored)) for name, dtype, shape, nbytes, stored in rows)
    caption, head = f"{count:,} tensor{'' if count == 1 else 's'}, {order}", ("tensor", "dtype", "shape")
    return table(caption, (*head, "in memory", "stored"), cells, count, folded)


def block(title: str, facts: Iterable[tuple[str, object]], *tables: str) -> str:
    """Formats a title, a line of facts, and tables."""
    line = " \u00b7 ".join(f"{_cell_text(name)} {_cell_text(value)}" for name, value in facts)
    head = f"<style>{_STYLE}</style><strong>{_cell_text(title)}</strong>"
    return f'<div class="overwire">{head}<div>{line}</div>{"".join(tables)}</div>'


class Facts(dict[str, Any]):
    """A dict that prints as one line, and in a notebook as facts and tables. It pickles and copies as a plain dict."""

    def __init__(self, title: str, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self._title = title

    def __reduce__(self) -> tuple[type[dict[str, Any]], tuple[dict[str, Any]]]:
        return dict, (dict(self),)

    def __repr__(self) -> str:
        facts, others = [], []
        for name, value in self.items():
            if isinstance(value, dict) or isinstance(value, list) and value and isinstance(value[0], dict):
                others.append(repr(name))
            elif isinstance(value, list):
                facts.append(f"{name}={_shorten_list(value)}")
            else:
                facts.append(f"{name}={value!r}" if isinstance(value, str) else f"{name}={_format_fact(name, value)}")
        named = f" with the key{'' if len(others) == 1 else 's'} {', '.join(others)}" if others else ""
        return f"{self._title.title().replace(' ', '')}({', '.join(facts)}; a dict{named})"

    def _repr_html_(self) -> str:
        facts: list[tuple[str, object]] = []
        tables = []
        for name, value in self.items():
            if isinstance(value, dict):
                rows = [(key, _format_fact(key, one)) for key, one in value.items()]
                tables.append(table(name, ("", ""), rows, len(rows)))
            elif isinstance(value, list) and value and isinstance(value[0], dict):
                head = list(dict.fromkeys(key for row in value for key in row))
                lines = [[_format_fact(key, row.get(key, "")) for key in head] for row in value]
                tables.append(table(name, head, lines, len(lines)))
            elif value != []:
                facts.append((name, _format_fact(name, value)))
        return block(self._title, facts, *tables)
