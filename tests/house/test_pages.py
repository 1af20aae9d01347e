"""Tests the pages that `overwire inspect --html` writes for a model and a trace, in a browser.

The tests use mouse, keyboard and screen reader names, in light and dark themes and in wide and narrow windows. The
pictures stay in the test's folder.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import chromium
import numpy
import overwire as ow
import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(chromium.PROGRAM is None, reason="no Chromium here: apt-get install chromium"),
]

HOSTILE = ["</script><img src=x onerror=alert(1)>", "<!--", "__proto__.constructor", "a\"b'c\\\u2028", "." * 500]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[chromium.Chromium]:
    with chromium.Chromium(tmp_path_factory.mktemp("profile")) as one:
        yield one


def run(*argv: str) -> str:
    done = subprocess.run([sys.executable, "-m", "overwire", *argv], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def alone(browser: chromium.Chromium, page: Path) -> None:
    """Asserts that the page's script has run, that the page has requested nothing but itself, and that no text became
    an element."""
    assert browser.run("document.body.dataset.ready") == "1"
    assert browser.requests == [page.resolve().as_uri()] and browser.errors == []
    assert browser.run("document.querySelectorAll('img, iframe, object, link, svg script').length") == 0


def pictures(browser: chromium.Chromium, page: Path) -> None:
    """Asserts that the light and dark pages differ, and that a narrow window needs no horizontal scrolling."""
    taken = set()
    for width, height in ((1280, 900), (400, 800)):
        for dark in (False, True):
            browser.view(width, height, dark=dark)
            browser.open(page)
            taken.add(browser.picture(page.with_name(f"{page.stem}-{width}{'-dark' if dark else ''}.png")))
            assert browser.run("document.documentElement.scrollWidth <= innerWidth")
    assert len(taken) == 4
    browser.view()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes the page of a model with 18,867 tensors. Some of their names try to inject HTML."""
    folder = tmp_path_factory.mktemp("model")
    parts = ("gate", "up", "down")
    names = [f"model.layers.{i // 384}.mlp.experts.{i // 3 % 128}.{parts[i % 3]}_proj.weight" for i in range(18_867 - len(HOSTILE))]
    tensor = numpy.zeros((2, 8), "float16")
    ow.save_file(dict.fromkeys(names + HOSTILE, tensor), folder / "model.safetensors")
    run("inspect", str(folder / "model.safetensors"), "--html", str(folder / "model.html"))
    return folder / "model.html"


def test_model(browser: chromium.Chromium, model: Path) -> None:
    """The page for 18,867 tensors has at most 3 MB. Keys open and close groups, the filter finds every name, and a
    screen reader can read the names."""
    assert model.stat().st_size <= 3e6
    browser.view()
    seconds = browser.open(model)
    print(f"{model.stat().st_size} bytes, {seconds:.3f} s until its scripts have run")
    alone(browser, model)
    path = "[...document.querySelectorAll('#path button')].map(b => b.textContent).join('/')"
    browser.run("document.querySelector('#map button').focus()")
    first = browser.run("document.activeElement.title")
    browser.press("ArrowRight")
    assert browser.run("document.activeElement.title") != first
    browser.press("ArrowLeft")
    browser.press("Enter")
    assert browser.run(path).startswith("model/") and browser.run("document.activeElement.className") == "tile"
    browser.press("Escape")
    assert browser.run(path) == "model"
    for name in HOSTILE:
        browser.run(f"(at('filter').value = {json.dumps(name)}, at('filter').oninput(), 0)")
        found = browser.run("[...document.querySelectorAll('#rows td:first-child')].map(e => e.textContent)")
        assert name in found
    browser.run("(at('filter').value = '', at('filter').oninput(), 0)")
    names = browser.names()
    assert any(role == "button" and "18,862 tensors" in name for role, name in names)
    pictures(browser, model)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trace")
    plain, small, trace = (str(folder / name) for name in ("plain.safetensors", "small.safetensors", "t.json"))
    run("bench", "gen", "llama-bf16", plain, "--size", "32MB")
    run("compress", plain, "-o", small)
    run("load", small, "--threads", "2", "--trace", trace)
    run("inspect", trace, "--html", str(folder / "t.html"))
    return folder / "t.html"


def test_trace(browser: chromium.Chromium, trace: Path) -> None:
    """Keys move between spans and show details. Wheel, drag and keys zoom and pan. The tables list every stage."""
    browser.view()
    browser.open(trace)
    alone(browser, trace)
    rows = browser.run("[...document.querySelectorAll('#rows td:first-child')].map(e => e.textContent)")
    assert rows[0] == "load" and "worker 0" in rows
    stages = browser.run("[...document.querySelectorAll('#stages td:first-child')].map(e => e.textContent)")
    assert {"read", "check", "decode"} <= set(stages)

    browser.run("at('time').focus()")
    said, heard = "at('said').textContent", []
    browser.press("ArrowRight")
    for _ in range(12):
        browser.press("ArrowDown" if not heard else "ArrowRight")
        heard.append(browser.run(said))
    assert any("worker" in text and "decode, at " in text and " GB/s" in text and "B, " in text for text in heard), heard
    assert len(set(heard)) > 6

    span = "to - from"
    whole = browser.run(span)
    browser.press("+")
    assert browser.run(span) == pytest.approx(whole * 0.6)
    browser.press("0")
    assert browser.run("from") == 0 and browser.run(span) == whole
    box = browser.run("(({x, y, width, height}) => [x, y, width, height])(at('time').getBoundingClientRect())")
    x, y = box[0] + box[2] / 2, box[1] + 24 + 30
    browser.mouse("mouseWheel", x, y, deltaX=0, deltaY=-60)
    browser.settle()
    near = browser.run(span)
    assert near < whole and browser.run("from") > 0
    start = browser.run("from")
    browser.mouse("mousePressed", x, y, button="left", clickCount=1)
    browser.mouse("mouseMoved", x - 80, y, button="left")
    browser.mouse("mouseReleased", x - 80, y, button="left", clickCount=1)
    assert browser.run("from") > start and browser.run(span) == pytest.approx(near)

    browser.press("0")
    at = browser.run("(() => { const s = data.rows[1].spans.reduce((a, b) => b.end - b.begin > a.end - a.begin ? b : a);"
                     " return x((s.begin + s.end) / 2); })()")
    y = box[1] + browser.run("data.rows[1].lanes[0].y") + 10
    browser.mouse("mouseMoved", box[0] + at, y)
    assert browser.run("at('tip').style.display") == "block" and "worker" in browser.run("at('tip').textContent")
    roles = dict(browser.names())
    assert "application" in roles and "table" in roles and "Timeline" in roles["application"]
    pictures(browser, trace)


def test_traces_of_a_gpu_and_hostile_names(browser: chromium.Chromium, tmp_path: Path) -> None:
    """The page for a trace with 100,000 spans of workers, copies and kernels works, even with hostile names."""
    events: list[dict[str, object]] = []
    for pid, tid, name in [(1, 0, "load"), *((1, n + 1, f"worker {n}") for n in range(16)), (2, 0, "copies"), (2, 1, HOSTILE[0])]:
        events.append({"name": "thread_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}})
        verbs = {1: ["stage", "read", "check", "submit"], 2: ["copy"] if tid == 0 else ["decode", HOSTILE[0]]}[pid]
        span = {"ph": "X", "pid": pid, "tid": tid, "dur": 38.0, "args": {"bytes": 1 << 20}}
        events += [span | {"name": verbs[i % len(verbs)], "ts": i * 40.0} for i in range(5300)]
    path = tmp_path / "gpu.json"
    path.write_text(json.dumps({"traceEvents": events}))
    page = path.with_suffix(".html")
    run("inspect", str(path), "--html", str(page))
    browser.view()
    seconds = browser.open(page)
    print(f"{page.stat().st_size} bytes, {seconds:.3f} s until its scripts have run")
    alone(browser, page)
    assert browser.run("document.querySelector('#rows tr:last-child td').textContent") == HOSTILE[0]
    browser.run("at('time').focus()")
    for key in ["ArrowRight", "ArrowUp", *["ArrowDown"] * 17]:
        browser.press(key)
    assert browser.run("at('said').textContent").startswith("copies: copy, at ")
    pictures(browser, page)
