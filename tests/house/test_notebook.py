"""Tests how reports, plans, open files and inspections are displayed: as one short line and, in notebooks, as tables.
No name can break a table."""

from __future__ import annotations

import copy
import json
import os
import pickle
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import overwire as ow
import pytest

SCRIPT = "<script>alert(1)</script>"
HOSTILE = ["</bdi></td></table><img src=x onerror=alert(1)>", "<!--", "a\"b'c&amp;\\", "\u202eevil", "\x1b[31mred\x9f", SCRIPT]
ALLOWED = {"div", "strong", "table", "caption", "thead", "tbody", "tr", "th", "td", "bdi", "details", "summary", "style"}


def test_doctors_table_wraps() -> None:
    """In a notebook, doctor's long texts wrap and leave space for the names. Byte counts have units."""
    text = ow.doctor()._repr_html_()  # type: ignore[attr-defined]
    assert re.search(r"th:first-child\{[^}]*min-width", text) and re.search(r"td\.text\{[^}]*white-space:normal", text)
    assert re.search(r'<td class="text"><bdi>Start loading this file', text)
    assert re.search(r"<bdi>available</bdi></th><td><bdi>[\d.]+ GB</bdi>", text)


def test_results_print_as_one_line(tmp_path: Path) -> None:
    """The results of `verify`, `doctor` and last_report print as one line with units, and are dicts."""
    path = tmp_path / "m.safetensors"
    ow.save_file({f"w{i}": np.zeros(10_000, "float32") for i in range(9)}, path, digests=True)
    verified, compared = ow.verify(path), ow.verify(path, tensors={"w0": np.ones(10_000, "float32")})
    ow.load_file(path, framework="np")
    for thing, words in (
        (verified, ("Verification(ok=True", "bytes=360 kB", "'files'")),
        (compared, ("Comparison(ok=False", "differ=['w0']", "missing=['w1', 'w2', 'w3', 'w4', 'w5', and 3 more]")),
        (ow.last_report(), ("LastReport(", "bytes=360 kB", "'stages'")),
        (ow.doctor(), ("Diagnosis(version=", "'machine'")),
    ):
        text = repr(thing)
        assert isinstance(thing, dict) and "\n" not in text and len(text) < 700, text
        assert all(word in text for word in words), text
        assert json.loads(json.dumps(thing)) == thing == pickle.loads(pickle.dumps(thing))
    assert "<bdi>load</bdi>" in ow.metrics()._repr_html_() and "Metrics" in checked(ow.metrics()).texts


def test_a_saved_notebook_has_no_progress_bar(tmp_path: Path) -> None:
    """A saved notebook contains no progress bar, because a saved widget could not be displayed."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel"), pytest.importorskip("ipywidgets"), pytest.importorskip("tqdm")
    ow.save_file({"a": np.ones(1000)}, tmp_path / "a.safetensors")
    code = f"import overwire as ow\nreport = ow.verify({str(tmp_path / 'a.safetensors')!r}, progress=True)"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    nbclient.NotebookClient(notebook, timeout=100, kernel_name="python3").execute()
    assert [output.data for output in notebook.cells[0].outputs] == [{"text/plain": ""}]


class Page(HTMLParser):
    """Collects elements, their attributes and texts, and checks that every element is closed."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.texts: list[str] = []
        self.other: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        self.tags.add(tag)
        self.attributes.update(name for name, _ in attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def handle_comment(self, data: str) -> None:
        self.other.append(data)

    handle_decl = handle_pi = unknown_decl = handle_comment


def checked(thing: Any) -> Page:
    text = thing._repr_html_()
    text.encode()  # a notebook file is UTF-8
    page = Page(text)
    assert not page.open and not page.other
    assert page.tags <= ALLOWED and page.attributes <= {"class", "scope", "colspan"}
    return page


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/<b>&\xe9'.safetensors"))
    ow.save_file({name: np.zeros((3, 4), "float32") for name in HOSTILE}, path)
    return path


def test_names_are_displayed_as_text(hostile: Path) -> None:
    """Hostile names of tensors and files are displayed as text, and create no element, attribute or comment."""
    report = ow.save_file({"a": np.zeros(2)}, hostile.with_suffix(".2.safetensors"))
    shown: list[Any] = [ow.inspect(hostile), ow.plan(hostile, framework="np"), report]
    with ow.safe_open(hostile, framework="np") as opened:
        shown.append(opened)
        pages = [checked(thing) for thing in shown]
    for page, kind in zip(pages, ("Inspection", "LoadPlan", "Report", "safe_open"), strict=True):
        assert kind in page.texts
        assert any("<b>&\ufffd'." in text for text in page.texts)
        if kind != "Report":
            assert {"<!--", SCRIPT, "\ufffd[31mred\ufffd"} <= set(page.texts)
    assert "closed" in checked(opened).texts


def test_lines_and_tables_are_short(tmp_path: Path) -> None:
    """A model with 5,000 tensors is printed as one short line. A notebook shows the largest tensors and counts the
    rest."""
    path = tmp_path / "m.safetensors"
    tensors = {f"layer.{i}.weight": np.zeros(i % 7 + 1, "float16") for i in range(5000)} | {"large": np.zeros(100_000, "float16")}
    report, found, plan = ow.save_file(tensors, path), ow.inspect(path), ow.plan(path, framework="np")
    with ow.safe_open(path, framework="np") as opened:
        for thing in (report, found, plan, opened):
            assert len(repr(thing)) < 250 + len(str(path)) and "5001 tensors" in repr(thing)
            assert len(thing._repr_html_()) < 100_000
        for thing in (found, plan):
            texts = checked(thing).texts
            names = [text for text in texts if text == "large" or text.startswith("layer.")]
            assert names[0] == "large" and len(names) == 200 and "and 4,801 more" in texts
            assert all(int(name.split(".")[1]) % 7 == 6 for name in names[1:])
        assert "5,001 tensors, in the order of their bytes" in checked(opened).texts


def test_an_inspection_is_a_dict(tmp_path: Path) -> None:
    """An inspection is a dict with the contents of its JSON. Pickles and copies of it are plain dicts, which can be
    read without overwire."""
    path = tmp_path / "m.safetensors"
    ow.save_file({"a": np.zeros(2)}, path)
    found = ow.inspect(path)
    assert isinstance(found, dict) and json.loads(json.dumps(found)) == found
    data = pickle.dumps(found)
    assert b"overwire." not in data
    for again in (pickle.loads(data), copy.copy(found), copy.deepcopy(found), dict(found)):
        assert type(again) is dict and again == found


def test_other_results_are_displayed_as_tables(tmp_path: Path) -> None:
    """The results of `verify`, `doctor`, last_report and `diff` are displayed as tables, and are dicts with the
    contents of their JSON. Displaying last_report does not change it."""
    path, state = tmp_path / "m.safetensors", {"a": np.arange(9.0), "b": np.zeros(2)}
    ow.save_file(state, path)
    ow.load_file(path, framework="np")
    last = ow.last_report()
    difference = ow.diff(state | {"a": np.ones(9)}, state | {"c": np.ones(1)})
    assert last and ow.last_report() == last
    for answer, word in (
        (ow.verify(path), "contents"),
        (ow.verify(path, tensors=state), "on_gpu"),
        (ow.doctor(), "decoder"),
        (last, "read_bytes"),
    ):
        assert json.loads(json.dumps(answer)) == answer and type(copy.deepcopy(answer)) is dict
        assert word in " ".join(checked(answer).texts)
    texts = checked(difference).texts
    assert "only in b" in texts and "a" in texts and "8 of 9" in texts


def test_an_empty_model_is_displayed_as_tables(tmp_path: Path) -> None:
    """A model without tensors is also displayed as tables."""
    path = tmp_path / "m.safetensors"
    report = ow.save_file({}, path)
    with ow.safe_open(path, framework="np") as opened:
        for thing in (report, ow.inspect(path), ow.plan(path, framework="np"), opened):
            checked(thing)
            assert "0 tensors" in repr(thing)


def test_one_tensor_is_singular(tmp_path: Path) -> None:
    """One tensor, file or block is named in the singular, in a line and in a notebook."""
    path, one = tmp_path / "m.safetensors", {"a": np.zeros(1)}
    answers = [ow.save_file(one, path), ow.inspect(path), ow.plan(path, framework="np"), ow.diff(one, one)]
    with ow.safe_open(path, framework="np") as opened:
        for thing in (*answers, opened, ow.stream(path, framework="np")):
            line = repr(thing)
            assert "1 tensor" in line and not re.search(r"\b1 (tensors|files|elements)", line), line
        assert "1 tensor, in the order of their bytes" in checked(opened).texts
    assert "1 tensor, the largest first" in checked(answers[1]).texts
