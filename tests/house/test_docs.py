"""Tests claims, links and tables in the documents.

test_guides.py runs the code in them. `make docs` builds the site and checks every reference again.
"""

from __future__ import annotations

import html
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import overwire
import pytest
from conftest import ROOT
from test_guides import blocks

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
FIGURES = [ROOT / "docs/benchmarks.md", *sorted((ROOT / "docs/benchmarks").rglob("*.md"))]
ERRORS = {name for name in overwire.errors.__all__ if not name.startswith("_")}


def prose(page: Path) -> str:
    """Returns a page without its code."""
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S))


def places(page: Path) -> set[str]:
    """Returns the anchors of a page's headings, as on GitHub and on the site."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", line) for line in re.findall(r"^#+ (.*)$", text, re.M)]
    return {re.sub(r"[^\w\- ]", "", line.lower()).strip().replace(" ", "-") for line in plain}


def test_links_of_pages_exist() -> None:
    """Links lead to existing files, pictures and headings."""
    for page in PAGES:
        for target, place in re.findall(r"\]\(([^)#:\s]*)(?:#([^)\s]*))?\)", prose(page)):
            to = page.parent / target if target else page
            assert to.exists(), f"{page.name} links to {target}"
            assert not place or place in places(to), f"{page.name} links to {target}#{place}"


def test_the_site_has_every_page() -> None:
    """Each page of docs/ is in one table of contents, and each entry is a page."""
    listed = []
    for page in PAGES:
        for block in re.findall(r"^```{toctree}\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S):
            listed += [(page.parent / f"{line}.md").resolve() for line in block.splitlines() if line and not line.startswith(":")]
    there = {path for path in PAGES if path.name not in ("README.md", "index.md") or path.parent.name == "api"}
    assert len(listed) == len(set(listed)) and set(listed) == there, set(listed) ^ there


def test_every_public_name_is_in_the_api_pages() -> None:
    """Each public name and module is in the API pages once, with the directive of its kind."""
    text = "".join(page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs/api").glob("*.md")))
    found = re.findall(r"^\.\. auto(\w+):: overwire\.(\w+)$", text, re.M)
    names = [name for _, name in found]
    assert len(names) == len(set(names))
    assert set(names) == set(overwire.__all__) - {"__version__", "errors"} | {"checkpoints", "gpu", "records", "stores"}
    for kind, name in found:
        if kind in ("function", "class", "exception"):
            thing = getattr(overwire, name)
            assert (kind == "function") == (not isinstance(thing, type)) and (kind == "exception") == (name in ERRORS), name
            assert len(thing.__doc__) > 20, name


def test_functions_document_their_errors() -> None:
    """A function's docstring says which errors the function raises, or refers to a docstring that does."""
    for name in sorted(set(overwire.__all__)):
        thing = getattr(overwire, name)
        if callable(thing) and not isinstance(thing, type):
            assert re.search(r"\b[Rr]aise[sd]?\b|errors are those of `|[Tt]he same as `|: see `", thing.__doc__), name


def test_every_error_has_its_help() -> None:
    """Each error has one section in the documentation that says what it means, what its built-in base class is, and
    what to do."""
    text = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    sections = dict(re.findall(r"^### (\w+)\n(.*?)(?=^##)", text, re.M | re.S))
    assert set(sections) == ERRORS
    for name, section in sections.items():
        assert re.search(r"^\*\*Means:\*\* .*\n\n\*\*Do:\*\* ", section, re.M), name
        for base in getattr(overwire, name).__bases__:
            assert base in (overwire.OverwireError, Exception) or f"`{base.__name__}`" in section or base.__name__ in section, (name, base)


def test_exit_statuses_equal_the_commands() -> None:
    """The table of exit statuses in docs/troubleshooting.md equals the engine's table."""
    text = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| (.*) \|$", text, re.M)
    said = {name: status for status, row in rows for name in re.findall(r"\w+(?:Error|Failure)", row)}
    errs, cli = ((ROOT / "gosrc" / path).read_text() for path in ("errs/errs.go", "cli/cli.go"))
    numbers = dict(re.findall(r"^\t(Exit\w+) += (\d+)", cli, re.M))
    exits = {kind: numbers[name] for kind, name in re.findall(r"\{errs\.(Err\w+), (Exit\w+)\}", cli)}
    kinds = re.findall(r"^\t\{(Err\w+), \"(\w+)\"", errs, re.M)
    assert len(kinds) > 10
    # The command line does not fork, so ForkedError has no row.
    assert said == {name: exits.get(kind, numbers["ExitEngine"]) for kind, name in kinds if name != "ForkedError"}


def test_every_setting_is_listed() -> None:
    """The table in docs/settings.md equals the output of `overwire doctor --env`."""
    from overwire import _verbs

    more = [f"[More]({k['page'].removeprefix('settings.md')})" for k in _verbs.knobs()]
    rows = [
        f"| `{k['name']}` | {k['type'].replace('|', ', ')} | {k['default']} | {k['doc']} {link} |"
        for k, link in zip(_verbs.knobs(), more, strict=True)
    ]
    text = (ROOT / "docs/settings.md").read_text(encoding="utf-8")
    assert [line for line in text.splitlines() if line.startswith("| `")] == rows


def text_of_figures() -> str:
    return "".join(page.read_text(encoding="utf-8") for page in FIGURES)


def test_the_readmes_figures_are_on_the_pages() -> None:
    """Each cell of the README's table has one number, which is also in docs/benchmarks.md or docs/benchmarks/ with the
    description of the measurement."""
    section = (ROOT / "README.md").read_text(encoding="utf-8").split("## Figures")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == 6
    for row in rows:
        assert len(row) == 4 and all(re.fullmatch(r"(\*\*)?\d+\.?\d*(\*\*)?", cell) for cell in row[1:3]), row
    numbers = set(re.findall(r"(?<![\w.])\d+\.\d+(?:\.\d+)*", section))
    page = set(re.findall(r"(?<![\w.])\d+(?:\.\d+)*", text_of_figures()))
    assert len(numbers) > 12 and numbers <= page, numbers - page


def test_the_badges_are_true() -> None:
    """The README's badges and their alternative texts match the Python versions, licence and dependencies in
    pyproject.toml."""
    badges = (ROOT / "docs/_site/static/badges.svg").read_text(encoding="utf-8")
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    versions = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', project)
    assert f">{versions[0]} to {versions[-1]}<" in badges and f"Python {versions[0]} to {versions[-1]};" in (ROOT / "README.md").read_text()
    assert '\nlicense = "Apache-2.0"' in project and ">Apache-2.0<" in badges
    assert "\ndependencies" not in project and ">none<" in badges


def test_the_page_of_versions_lists_the_tested_versions() -> None:
    """The versions in docs/compatibility.md are the versions that the tests install."""
    text = (ROOT / "docs/compatibility.md").read_text(encoding="utf-8").split("## Tested with")[1].split("## ")[0]
    rows = re.findall(r"^\| ([a-z_, ]+) \| (\d[\d., ]*) \|", text, re.M)
    tested = {
        name: version
        for names, versions in rows
        for name, version in zip(names.split(", "), versions.split(", "), strict=True)
    }
    pins = (ROOT / "requirements/test.txt").read_text() + (ROOT / "requirements/transformers5.txt").read_text()
    for name, version in tested.items():
        assert re.search(rf"^{name}=={re.escape(version)}\b", pins, re.M), name
    assert len(tested) >= 9


def test_plots_show_figures_of_the_benchmarks() -> None:
    """Each number in a plot is on a benchmark page, in the line that the plot's data names. The page also has the
    command that measured it. The committed SVG shows the number, a title and a description. The folder has no other
    files."""
    folder = ROOT / "docs/plots"
    text = text_of_figures()
    plots = json.loads((folder / "figures.json").read_text(encoding="utf-8"))["plots"]
    assert {path.name for path in folder.iterdir()} - {"__pycache__"} == {"draw.py", "figures.json", *(plot["file"] for plot in plots)}
    for plot in plots:
        assert [word for word in plot["how"].split() if word not in text] == [], plot["file"]
        drawn = html.unescape((folder / plot["file"]).read_text(encoding="utf-8"))
        assert plot["title"] in drawn and f"<dc:description>{plot['about'].rstrip('. ')}." in drawn
        assert "<image" not in drawn and "href=\"http" not in drawn
        panels = plot.get("panels", [plot])
        assert all(panel["title"] in drawn for panel in panels)
        for bar in [*(bar for panel in panels for bar in panel["bars"]), *([plot["limit"]] if "limit" in plot else [])]:
            (line,) = [line for line in text.splitlines() if bar["line"] in line]
            numbers = [bar[key] for key in ("value", "first", "floor") if key in bar] + re.findall(r"\d+\.?\d*", bar.get("note", ""))
            assert set(numbers) <= set(re.findall(r"\d+(?:\.\d+)?", line)), (plot["file"], bar)
            assert f"{bar['name']}: {bar['value']}" in drawn or bar["name"] in drawn and bar is plot.get("limit"), (plot["file"], bar)


def test_commands_exist() -> None:
    """Each overwire command on a page has a known name and known options."""
    verbs: dict[str, str] = {}
    shown = [block.replace("\\\n", " ") for page in PAGES for block in blocks(str(page.relative_to(ROOT)), "sh")]
    for line in "\n".join(shown).splitlines():
        words = line.split(" #")[0].split()
        if words[:1] != ["overwire"] or words[1] == "VERB":
            continue
        verb = words[1]
        if verb not in verbs:
            help_of = [sys.executable, "-m", "overwire", verb, "--help"]
            verbs[verb] = subprocess.run(help_of, capture_output=True, text=True, check=True).stdout
        for word in words[2:] if verb != "run" else []:
            if word.startswith("-"):
                assert re.search(rf"(^|[\s,]){re.escape(word)}\b", verbs[verb]), line
    assert len(verbs) >= 10


def _tests() -> set[str]:
    """Returns the names of all Python tests in tests/, and of all Go tests and fuzz targets in gosrc."""
    there: set[str] = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        there |= set(re.findall(r"^ *def (\w+)\(", path.read_text(), re.M))
    for path in (ROOT / "gosrc").rglob("*_test.go"):
        there |= set(re.findall(r"^func ((?:Test|Fuzz)\w+)\(\w+ \*testing\.[TF]\)", path.read_text(), re.M))
    return there


def _selected(path: str) -> list[str]:
    """Returns what a filter is compared with: lines with names and parameters of a Python file's tests, or names of Go
    tests in a package or, with /..., below it. `{a,b}` stands for several packages."""
    if path.startswith("tests/"):
        return [line for line in (ROOT / path).read_text().splitlines() if line.startswith(("@", "def test_"))]
    first, middle, last = re.fullmatch(r"([^{]*)(?:\{(.*)\})?(.*)", path.removesuffix("/...")).groups("")  # type: ignore[union-attr]
    deep = "**/" * path.endswith("/...")
    files = [file for name in middle.split(",") for file in (ROOT / (first + name + last)).glob(f"{deep}*_test.go")]
    return re.findall(r"^func ((?:Test|Fuzz)\w+)", "".join(file.read_text() for file in files), re.M)


def test_every_filter_selects_a_test() -> None:
    """Each name after -k selects a test in each named file, and each name after -run a test in the named packages. Go
    tests and soak loops that docs/reliability.md names exist."""
    texts = {path: path.read_text() for path in [*PAGES, ROOT / "Makefile", ROOT / ".ci/check", *(ROOT / "bench").rglob("*.sh")]}
    commands = [line for text in texts.values() for line in re.findall(r"(?:pytest|go test)\b[^`\n]* -(?:k|run) [^`\n]*", text)]
    assert len(commands) > 20
    for command in commands:
        words = shlex.split(command.replace("\\|", "|"))
        pattern = words[words.index("-k" if "-k" in words else "-run") + 1]
        paths = [word for word in words if word.startswith(("tests/", "./gosrc"))]
        names = [name for name in re.split(r"\||\bor\b", pattern) if name.strip()]
        groups = [_selected(path) for path in paths] if "-k" in words else [sum(map(_selected, paths), [])]
        for name in names if "-bench" not in words else []:
            assert all(any(re.search(name.strip(), test) for test in group) for group in groups), (command, name)
    all_names, page = " ".join(_tests()), texts[ROOT / "docs/reliability.md"]
    named = set(re.findall(r"\b(?:Test|Fuzz)[A-Z]\w+", page))
    assert [name for name in named if name not in all_names] == []
    loops = (ROOT / "tests/soak/loops.py").read_text()
    assert all(f'"{name}":' in loops for name in re.findall(r"tests/soak --only ([\w-]+)", page))


@pytest.mark.parametrize("page, least", [("fastsafetensors", 30), ("nyacomp", 50)])
def test_each_row_names_its_tests(page: str, least: int) -> None:
    there = _tests()
    section = (ROOT / "docs/parity.md").read_text().split(f"## {page}\n")[1].split("\n## ")[0]
    rows = [line for line in section.split("| tests |\n", 1)[1].splitlines() if line.startswith("| ")]
    assert len(rows) > least
    for row in rows:
        names = re.findall(r"\b[Tt]est_?\w+", row.rsplit("|", 2)[1])
        assert names, row
        assert set(names) <= there, (row, set(names) - there)


def test_slow_tests_are_marked_as_such() -> None:
    """On the parity page, a * marks exactly the tests that `make test` does not run."""
    slow = set()
    for path in (ROOT / "tests").rglob("test_nyacomp*.py"):
        slow |= set(re.findall(r"^@pytest\.mark\.slow\n(?:@.*\n)*def (test_\w+)", path.read_text(), re.M))
    page = (ROOT / "docs/parity.md").read_text().split("## nyacomp\n")[1].split("\n## ")[0]
    named = set(re.findall(r"\b(test_\w+)", page)) - {"test_"}
    assert set(re.findall(r"\b(test_\w+)\*", page)) == slow & named
