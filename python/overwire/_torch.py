"""Implements `overwire compress` and `overwire convert` for torch.save files.

It writes the sources as temporary plain files, and then runs the engine's command on them in
another process.
"""

from __future__ import annotations

import signal
import subprocess
import sys

from .errors import OverwireError
from .paths import without_scheme
from .plumbing import code_command, is_torch_model, local, plain_models

# Exit statuses of the command line.
_STATUSES = {
    "FormatError": 1,
    "CorruptError": 1,
    "UntrustedPickleError": 1,
    "NotFoundError": 3,
    "AccessError": 3,
    "NotSupportedError": 5,
}
_FAILED, _INTERRUPTED = 4, 130


def main(words: list[str]) -> int:
    """Runs a command line and returns its exit status."""
    words = [without_scheme(word) for word in words]
    outputs = [word for before, word in zip(words, words[1:], strict=False) if before in ("-o", "--output")]
    outputs += [word.partition("=")[2] for word in words if word.startswith(("--output=", "-o="))]
    try:
        sources = [
            at
            for at, word in enumerate(words)
            if at and words[at - 1] not in ("-o", "--output") and is_torch_model(word)
        ]
        if not sources or not outputs:  # the engine reports what is missing
            return _run_engine(words, [])
        with plain_models([words[at] for at in sources], local(outputs[0])) as (plain, remainder):
            for at, path in zip(sources, plain, strict=True):
                words[at] = path
            return _run_engine(words, remainder)
    except OverwireError as error:
        sys.stderr.write(f"{error}\n")
        return _STATUSES.get(type(error).__name__, _FAILED)
    except KeyboardInterrupt:
        sys.stderr.write("overwire: interrupted; nothing was written\n")
        return _INTERRUPTED


def _run_engine(words: list[str], left: list[str]) -> int:
    # Ctrl-C reaches both processes: this one waits while the other cleans up.
    engine = "import sys; from overwire._engine import cli; sys.exit(cli(sys.argv[1:]))"
    with subprocess.Popen(code_command(engine, *words)) as process:
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
