"""Tests what Ctrl-C does while a thread is being started."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Callable
from pathlib import Path

import overwire

INTERRUPTING = """
import concurrent.futures.thread, faulthandler, os, signal, sys, threading
from overwire._imports import start_thread

faulthandler.dump_traceback_later(60, exit=True)
FILES = threading.__file__, concurrent.futures.thread.__file__
lines = at = 0

def trace_line(frame, event, argument):
    global lines
    if event == "line":
        lines += 1
        if lines == at:
            signal.raise_signal(signal.SIGINT)
    return trace_line

def trace(frame, event, argument):
    return trace_line if frame.f_code.co_filename in FILES else None

def start(call, *arguments):
    sys.settrace(trace)
    try:
        return start_thread(call, *arguments)
    finally:
        sys.settrace(None)

def run(interrupted_at, begin):
    global lines, at
    lines, at = 0, interrupted_at
    steps, was_interrupted = [], False
    try:
        begin(steps)
    except KeyboardInterrupt:
        was_interrupted = True
    assert was_interrupted == bool(interrupted_at), interrupted_at
    assert steps == [1], (interrupted_at, steps)
    assert threading.active_count() == 1

def in_pool(steps):
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        start(pool.submit, steps.append, 1)

def with_map(steps):
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        start(pool.map, steps.append, [1])

def alone(steps):
    thread = threading.Thread(target=steps.append, args=(1,))
    try:
        start(thread.start)
    finally:
        thread.join(60)

for begin in (in_pool, with_map, alone):
    run(0, begin)
    count = lines
    assert count > 20
    for number in range(1, count - 5):
        run(number, begin)
"""


def test_ctrl_c_at_the_start_of_a_thread_waits(script: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    """If Ctrl-C arrives at any line of Python's code for starting a thread, the thread still runs and does its work.
    KeyboardInterrupt is raised afterwards."""
    script(INTERRUPTING)


def test_every_thread_is_started_by_start_thread() -> None:
    """Every module that creates a thread or a pool uses `start_thread`."""
    others = []
    package = Path(overwire.__file__).parent
    for path in package.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        names = {node.id if isinstance(node, ast.Name) else node.attr
                 for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name | ast.Attribute)}  # fmt: skip
        if names & {"Thread", "ThreadPoolExecutor"} and "start_thread" not in names:
            others.append(path.relative_to(package).as_posix())
    assert others == ["_bench_saves.py"], "a separate program, so its threads end with it"
