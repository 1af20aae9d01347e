"""Implements commands on files and folders of other libraries.

A command first converts the sources to temporary plain files. Then it runs the engine's command on them in another
process. The plain files are in a temporary folder for `compress` and `convert`, and in memory for other commands.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ._children import code_command
from .bundles.torchfolders import is_torch_model, names_of, plain_models
from .errors import OverwireError
from .foreign.memory import read_components, read_foreign
from .paths import local, without_scheme

if TYPE_CHECKING:
    from ._requests import VerifyCopy

# Exit statuses of the command line.
_STATUSES = {"FormatError": 1, "CorruptError": 1, "UntrustedPickleError": 1}
_STATUSES |= {"NotFoundError": 3, "AccessError": 3, "NotSupportedError": 5}
_FAILED, _INTERRUPTED = 4, 130


def main(words: list[str]) -> int:
    """Runs a command line and returns its exit status."""
    words = [without_scheme(word) for word in words]
    try:
        return _read_only(words) if words[:1] not in (["compress"], ["convert"]) else _rewrite(words)
    except OverwireError as error:
        sys.stderr.write(f"{error}\n")
        return _STATUSES.get(type(error).__name__, _FAILED)
    except KeyboardInterrupt:
        sys.stderr.write("overwire: interrupted; nothing was written\n")
        return _INTERRUPTED


def _read_only(words: list[str]) -> int:
    is_header = words[0] == "inspect" and not {"--digests", "--estimate", "-e"} & set(words) or "--plan" in words
    found = {word: read_foreign(local(word), is_header) for word in words[1:] if not word.startswith("-")}
    kept = set()
    if words[0] == "verify":
        for word in [word for word, files in found.items() if not files]:
            found[word], has_others = read_components(local(word))
            kept |= {word} if has_others else set()
    names = {one.uri: one.name for files in found.values() for one in files}
    copies = {one.uri: one.original for files in found.values() for one in files}
    plain = []
    for word in words:
        files = [one.uri for one in found.get(word) or ()]
        plain += [word, *files] if word in kept or not files else files
    numbers = [int(path.rpartition("/")[2]) for path in names]
    return _run_engine(plain, [], names, numbers, copies)


def _rewrite(words: list[str]) -> int:
    others = [0, *(at + 1 for at, word in enumerate(words) if word in ("-o", "--output"))]
    sources = [at for at, word in enumerate(words) if at not in others and is_torch_model(word)]
    outputs = [word for before, word in zip(words, words[1:], strict=False) if before in ("-o", "--output")]
    outputs += [word.partition("=")[2] for word in words if word.startswith(("--output=", "-o="))]
    if not sources or not outputs:  # the engine reports which argument is missing
        return _run_engine(words, [])
    with plain_models([words[at] for at in sources], local(outputs[0])) as (plain, remainder):
        names = names_of(plain, [words[at] for at in sources])
        for at, path in zip(sources, plain, strict=True):
            words[at] = path
        return _run_engine(words, remainder, names)


def _run_engine(
    words: list[str],
    left: list[str],
    names: dict[str, str] | None = None,
    numbers: Sequence[int] = (),
    copies: dict[str, VerifyCopy] | None = None,
) -> int:
    # names: the names that messages show for plain files. numbers: descriptors of files in memory. copies: as for
    # `program`.
    # Ctrl-C reaches both processes: this one ignores it and waits while the other cleans up.
    engine = f"import sys; from overwire._engine import cli; sys.exit(cli(sys.argv[1:], {names!r}, {copies!r}))"
    with subprocess.Popen(code_command(engine, *words), pass_fds=numbers) as process:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            status = process.wait()
        finally:
            signal.signal(signal.SIGINT, before)
    if not status:
        for what in left:
            sys.stderr.write(f"not copied: {what}\n")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
