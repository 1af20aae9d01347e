"""Tests that certain habits of writing become rarer."""

from __future__ import annotations

import prose
import pytest


def test_every_habit_is_below_its_ceiling() -> None:
    """In no scope is a habit more frequent, per 1,000 words, than tests/house/prose.json allows."""
    texts = prose.collect()
    assert all(len(texts[scope]) > 500 for scope in prose.SCOPES)
    assert prose.excesses({scope: prose.rate(texts[scope]) for scope in prose.SCOPES}, prose.read_table()) == []


@pytest.mark.parametrize(
    ("habit", "text", "count"),
    [
        ("beside", "It stands Beside the file, besides being short.", 1),
        ("alone", "Headers alone are read; leave it alone, let alone that, a standalone tool.", 1),
        (", too", "Plain files, too. Not, too many; and files, too, which load.", 2),
        ("behind", "The bytes behind it. A server behind a proxy prints nothing behind the caller's back.", 1),
        ("whose, of which", "A file whose header, of which more, is long. Which of them?", 2),
        ("opening", "What loads into modules.", 1),
        ("opening", "`Where` it runs. What does it do?", 1),
        ("opening", "What does it do?", 0),
        ("opening", "Loads what is there.", 0),
        ("this file", "This file has the readers.", 1),
    ],
)
def test_habits_are_recognised(habit: str, text: str, count: int) -> None:
    """Each habit's pattern finds the habit, but not other uses of the same words."""
    assert len(prose.HABITS[habit].findall(text)) == count


GO = """// What a plan
// is.
func f() { // who calls it
\ts := "a // beside" + `which four words there`
\tr := '"' /* where */
}
"""
PY = '''"""What it does."""
def f():
    """
    Loads.
    """
    a = "no # comment", f"{a} which has five words"  # where
    # one
    # block
    return """a text of four words"""
'''


@pytest.mark.parametrize(
    ("path", "text", "found"),
    [
        ("gosrc/x/x.go", GO, [("go", "What a plan\nis."), ("go", "who calls it"),
                              ("messages", "which four words there"), ("go", "where")]),
        ("python/overwire/x.py", PY, [("python", "What it does."), ("python", "Loads."),
                                      ("messages", 'f"{a} which has five words'), ("python", "where"),
                                      ("python", "one\nblock"), ("messages", "a text of four words")]),
        ("tests/x.py", PY, [("tests", text) for text in ("What it does.", "Loads.", "where", "one\nblock")]),
    ],
)  # fmt: skip
def test_comments_and_messages_are_found(path: str, text: str, found: list[tuple[str, str]]) -> None:
    """Comment blocks, docstrings and literals of each language are found. Short literals are not messages."""
    assert [(scope, words.strip()) for scope, words in prose.comments(path, text)] == found


def test_pages_are_read_without_code() -> None:
    """Paragraphs, list items and table cells are separate texts. Code, headings and links are left out."""
    page = "# Where it runs\n\nA page\nof [words](beside.md).\n\n```sh\necho alone\n```\n\n- What it does\n\n| a | b |\n"
    parts = [" ".join(part.split()) for part in prose.paragraphs(page)]
    assert [part for part in parts if part] == ["A page of [words .", "What it does", "a", "b"]


def test_ceilings_only_fall() -> None:
    """A lower rate lowers its ceiling, which is rounded up. A higher rate is reported, with a command that lists the
    occurrences."""
    table = prose.lower({"go": {"beside": 0.52}}, {})
    assert table == {"go": {"beside": 0.55}}
    assert prose.lower({"go": {"beside": 0.31}}, table) == {"go": {"beside": 0.35}}
    assert prose.lower({"go": {"beside": 0.9}}, table) == table
    assert prose.lower({"go": {"beside": 0.0}}, table) == {"go": {"beside": 0.05}}
    assert prose.lower({"go": {"opening": 0.0}}, {}) == {"go": {"opening": 0.3}}
    assert prose.excesses({"go": {"beside": 0.55}}, table) == []
    (sentence,) = prose.excesses({"go": {"beside": 0.9}}, table)
    assert "`beside` 0.90 times" in sentence and "--show go" in sentence
