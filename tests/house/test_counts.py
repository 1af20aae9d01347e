"""Tests that lines and names of each package stay below their ceilings, and that they are counted correctly."""

from __future__ import annotations

import counts
import pytest

pytestmark = pytest.mark.xdist_group("house")  # one worker reads the sources once


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    return counts.sources(counts.ROOT)


@pytest.fixture(scope="module")
def rows(texts: dict[str, str]) -> counts.Counts:
    return counts.count(texts)


def test_every_package_is_below_its_ceilings(rows: counts.Counts) -> None:
    """No package has more lines, functions with one-word names or values named by participles than its ceilings
    allow."""
    assert counts.excesses(rows, counts.read_table()) == []


def test_lines_fit(texts: dict[str, str]) -> None:
    """No line of Go or Python has more than 120 columns, except lines with literals in tests."""
    assert counts.overlong(texts) == []


def test_no_name_has_a_retired_word(texts: dict[str, str]) -> None:
    """No name contains a word that docs/glossary.md has replaced, except names from other libraries."""
    assert counts.retired(texts) == []
    names = {name for path, text in texts.items() if "/compat/" in path for name in counts.identifiers(path, text)}
    assert counts.NAMES_OF_OTHERS.keys() <= names


def test_the_share_of_vague_names_is_limited(rows: counts.Counts) -> None:
    """At most 45 % of Go functions, and 35 % of Python functions outside compat, have one-word names. At most 2 % of
    values are named by participles."""
    assert counts.vague(rows) == []
    row = {"functions": 10, "one_word": 4, "values": 100, "participles": 3}
    assert counts.vague({"gosrc/x": row}) == ["gosrc, cuda: 3.0% of the values are participles; at most 2% may"]
    assert len(counts.vague({"overwire/x": row})) == 2 and counts.vague({"overwire/compat/x": row}) == []


GO = '''package x

func pad(n int) int { return n }

func (p *Plan) padToAlignment(n int) (found, size int) {
	made, size := n, 1
	var told int // far
	return made, told
}
'''
PYTHON = '''
class A:
    def __init__(self) -> None: ...
    def _tell(self): ...
    def share_of_rank(self):
        stored, rank, seed, theirs = 1, 2, 3, "borrowed"
        save_far = stored
'''
C = """/* told */
static void ow_pad(int n) {
    int far = helper(n);
}
int ow_pad_block(int n);
"""


@pytest.mark.parametrize(
    ("path", "text", "expected"),
    [
        ("gosrc/x/x.go", GO, {"functions": 2, "one_word": 1, "values": 3, "participles": 2, "lines": 9}),
        ("gosrc/x/x_test.go", GO, {"functions": 0, "one_word": 0, "participles": 0, "lines": 0}),
        ("python/overwire/a.py", PYTHON, {"functions": 2, "one_word": 1, "values": 5, "participles": 2, "lines": 7}),
        ("cuda/a.cuh", C, {"functions": 1, "one_word": 1, "lines": 5}),
        ("tests/y.py", PYTHON, {"functions": 0, "participles": 0, "lines": 0}),
    ],
)
def test_what_is_counted(path: str, text: str, expected: dict[str, int]) -> None:
    """Functions, values, identifiers and lines of each language are counted. Names in comments and literals are not."""
    row = counts.count_file(path, text)
    assert {name: row[name] for name in expected} == expected


LONG = "b" * 121
GO_LONG = f"package x\n\nconst a = `\n{LONG}`\n//{LONG}\n//{LONG[3:]}\nconst r, b = '\"', \"{LONG}\"\n"
PYTHON_LONG = f"""A = '{LONG}'  # {LONG}
def f(a):
    '''{LONG}
    {LONG}'''
    code = '''
{LONG}''' + f"{LONG}{{a}}"
    return {LONG} + "a"
import x  # noqa: {LONG}
"""


@pytest.mark.parametrize(
    ("path", "text", "lines"),
    [
        ("gosrc/x/y.go", GO_LONG, [4, 5, 7]),
        ("gosrc/x/y_test.go", GO_LONG, [5]),
        ("tests/y.py", PYTHON_LONG, [1, 3, 4, 7]),
        ("python/overwire/y.py", PYTHON_LONG, [1, 3, 4, 6, 7]),
        ("cuda/y.cu", GO_LONG, []),
    ],
)
def test_which_lines_are_long(path: str, text: str, lines: list[int]) -> None:
    """Lines with literals in tests may be long. Code, comments and docstrings may not, except for a pragma at the end
    of a line."""
    assert counts.long_lines(path, text) == lines
    assert [sentence.split(" ")[0] for sentence in counts.overlong({path: text})] == [f"{path}:{n}" for n in lines]


@pytest.mark.parametrize(
    ("path", "text", "name"),
    [("gosrc/x/x.go", GO, "told"), ("python/overwire/a.py", PYTHON, "save_far"), ("cuda/a.cuh", C, "far")],
)
def test_which_names_are_retired(path: str, text: str, name: str) -> None:
    """Every word of a name is checked in each language, except in comments, literals and tests."""
    (sentence,) = counts.retired({path: text, "tests/a.py": PYTHON})
    assert sentence.startswith(f"{path}: ") and f"`{name}`" in sentence


def test_identifiers_are_split_into_words() -> None:
    """The parts of snake_case and camelCase names, and acronyms, are separate words. C's prefix is not a word."""
    names = ("save_far", "saveFar", "HTTPServer", "_tell", "ow_pad", "x16")
    assert [counts.words_of(name) for name in names] == [
        ["save", "far"], ["save", "far"], ["http", "server"], ["tell"], ["pad"], ["x"],
    ]  # fmt: skip


def test_ceilings_only_rise_with_a_reason() -> None:
    """A lower count lowers its ceiling. A higher count is reported until its ceiling is raised, for which a reason is
    recorded."""
    row = dict.fromkeys(counts.COLUMNS, 7)
    table = counts.new_table({"gosrc/x": row}, {})
    assert table == {"gosrc/x": row | {"lines": 50}}
    assert counts.excesses({"gosrc/x": row}, table) == []
    higher = {"gosrc/x": row | {"lines": 51, "one_word": 6, "participles": 8}}
    assert [sentence.split(";")[0] for sentence in counts.excesses(higher, table)] == [
        "gosrc/x has 51 lines of the product",
        "gosrc/x has 8 values named by a participle or an adverb instead of a noun",
    ]
    assert counts.new_table(higher, table) == {"gosrc/x": row | {"lines": 50, "one_word": 6}}
    raised = counts.new_table(higher, table, "a feature")
    assert raised == {"gosrc/x": row | {"lines": 100, "one_word": 6, "participles": 8, "why": "a feature"}}
    assert counts.new_table(higher, raised) == raised
    assert counts.excesses({"gosrc/y": row}, raised) != [] and counts.excesses({}, raised) != []
