"""Counts seven habits of writing per 1,000 words, and checks that each stays below a ceiling that only falls.

    python tests/house/prose.py            print the rates and the exceeded ceilings; exit with 1 if there are any
    python tests/house/prose.py --write    lower the ceilings in tests/house/prose.json to today's rates
    python tests/house/prose.py --show SCOPE HABIT    list the occurrences, e.g. --show pages beside

The scopes are the pages, the comments of Go and C, the comments and docstrings of Python, the messages (literals of the
product with four words or more), and the comments of tests.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import counts

TABLE = counts.ROOT / "tests" / "house" / "prose.json"

# CONTRIBUTING.md lists replacements in "How to write".
HABITS = {
    "beside": re.compile(r"\bbeside\b", re.I),
    "alone": re.compile(r"(?<!\blet )(?<!\bleave )(?<!\bleft )(?<!\bleave it )\balone\b", re.I),
    ", too": re.compile(r", too\b(?! (?:many|much|few|large|big|small|long|short|old|new|late|early|slow|deep|high|low)\b)", re.I),
    "behind": re.compile(r"\bbehind\b(?! (?:an? |the )?(?:\w+ )?(?:proxy|proxies|balancer|firewall)| (?:the|a) caller)", re.I),
    "whose, of which": re.compile(r"\bwhose\b|\bof which\b", re.I),
    "opening": re.compile(r"\A\W*(?:what|which|whose|where|who)\b(?![^.]*\?)", re.I),
    "this file": re.compile(r"\AThis file (?:has|gives|tells|is|holds|says)\b"),
}
SCOPES = ("pages", "go", "python", "messages", "tests")

# Ceilings are rounded up to this step, so that deleting clean text does not exceed a ceiling. No ceiling falls below
# its aim.
STEP = 0.05
AIMS = {"whose, of which": 0.3, "opening": 0.3, "behind": 0.1}  # STEP for the others

GO = re.compile(r"""(?P<literal>`[^`]*`|"(?:\\.|[^"\\\n])*")|'(?:\\[^\n]{1,9}|[^'\\\n])'|(?P<block>/\*.*?\*/)|"""
                r"""(?P<line>(?:^[ \t]*//[^\n]*\n)+|//[^\n]*)""", re.S | re.M)  # fmt: skip
PYTHON = re.compile(r"""(?P<doc>^[ \t]*(?:r|R)?(?:\"{3}.*?\"{3}|'{3}.*?'{3}))|(?P<literal>\b[rRbBfFuU]{0,2}(?:\"{3}.*?\"{3}|'{3}.*?'{3}|"""
                    r""""(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'))|(?P<literal2>\"{3}.*?\"{3}|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')|"""
                    r"""(?P<line>(?:^[ \t]*\#[^\n]*\n)+|\#[^\n]*)""", re.S | re.M)  # fmt: skip
MARKS = re.compile(r"^[ \t]*(?://|\#)[:!]?[ \t]?", re.M)
CODE = re.compile(r"^```.*?^```[ \t]*$|<[^<>\n]*>|\]\([^)\s]*\)", re.M | re.S)
WORD = re.compile(r"[A-Za-z][A-Za-z'-]*")

Texts = dict[str, list[tuple[str, str]]]  # keyed by scope: file and text
Table = dict[str, dict[str, float]]


def comments(path: str, text: str) -> Iterator[tuple[str, str]]:
    """Yields each comment, docstring and literal of a source file with its scope. Adjacent comment lines count as one
    comment."""
    scope = "tests" if counts.is_test(path) else "python" if path.endswith(".py") else "go"
    for found in (PYTHON if path.endswith(".py") else GO).finditer(text):
        kind, words = found.lastgroup, found[0].strip()
        if kind is None:
            continue
        if kind.startswith("literal"):
            if scope != "tests" and len(WORD.findall(words)) > 3:
                yield "messages", words.strip("`\"'")
        elif kind == "line":
            yield scope, MARKS.sub("", words)
        else:
            yield scope, words.removeprefix("/*").removesuffix("*/").strip("\"' \n*rR")


def paragraphs(text: str) -> Iterator[str]:
    """Yields the paragraphs, list items and table cells of a page, without its code, headings and links."""
    for block in re.split(r"\n\s*\n|\n(?=[ \t]*(?:[-*]|\d+\.) )|\n(?=\|)", CODE.sub(" ", text)):
        if not block.lstrip().startswith("#"):
            yield from re.sub(r"^[ \t]*(?:[-*]|\d+\.) ", "", block).split("|")


def collect(root: Path = counts.ROOT) -> Texts:
    """Returns all texts of the repository by scope."""
    texts: Texts = {scope: [] for scope in SCOPES}
    for path, text in counts.sources(root).items():
        for scope, comment in comments(path, text):
            texts[scope].append((path, " ".join(comment.split())))
    for page in sorted([*root.glob("*.md"), *(root / "docs").rglob("*.md"), *(root / "changes").glob("*.md")]):
        name = page.relative_to(root).as_posix()
        texts["pages"] += [(name, " ".join(part.split())) for part in paragraphs(page.read_text(encoding="utf-8"))]
    return texts


def rate(texts: Iterable[tuple[str, str]]) -> dict[str, float]:
    """Returns how often each habit occurs in texts, per 1,000 words."""
    found, words = dict.fromkeys(HABITS, 0), 0
    for _, text in texts:
        words += len(text.split())
        for habit, pattern in HABITS.items():
            found[habit] += len(pattern.findall(text))
    return {habit: 1000 * count / max(1, words) for habit, count in found.items()}


def excesses(rates: Table, table: Table) -> list[str]:
    """Returns every rate over its ceiling, each as a sentence."""
    return [
        f"{scope}: `{habit}` {value:.2f} times in 1,000 words; at most {table[scope][habit]:.2f} "
        f"(python tests/house/prose.py --show {scope} '{habit}')"
        for scope, row in rates.items()
        for habit, value in row.items()
        if value > table[scope][habit] + 1e-9
    ]


def lower(rates: Table, table: Table) -> Table:
    """Returns the table with each ceiling lowered to today's rate."""
    result: Table = {}
    for scope, row in rates.items():
        ceilings = {}
        for habit, value in row.items():
            rounded = round(math.ceil(value / STEP - 1e-9) * STEP, 2)
            old = table.get(scope, {}).get(habit, math.inf)
            ceilings[habit] = min(old, max(AIMS.get(habit, STEP), rounded))
        result[scope] = ceilings
    return result


def read_table() -> Table:
    table: Table = json.loads(TABLE.read_text(encoding="utf-8"))
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="lower the ceilings to today's rates")
    parser.add_argument("--show", nargs=2, metavar=("SCOPE", "HABIT"), help="list the occurrences of a habit")
    options = parser.parse_args()
    texts = collect()
    if options.show:
        scope, habit = options.show
        for path, text in texts[scope]:
            for hit in HABITS[habit].finditer(text):
                print(f"{path}: {text[max(0, hit.start() - 60) : hit.end() + 60]}")
        return 0
    rates = {scope: rate(texts[scope]) for scope in SCOPES}
    if options.write:
        rows = lower(rates, read_table() if TABLE.exists() else {})
        body = ",\n".join(f"  {json.dumps(scope)}: {json.dumps(row)}" for scope, row in rows.items())
        TABLE.write_text("{\n" + body + "\n}\n", encoding="utf-8")
    for scope, row in rates.items():
        print(f"{scope}: " + ", ".join(f"{habit} {value:.2f}" for habit, value in row.items()))
    over = excesses(rates, read_table())
    print(*over, sep="\n", end="\n" if over else "")
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
