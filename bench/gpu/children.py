"""Runs programs of this folder in fresh processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

# Turns off progress bars and downloads.
QUIET = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error",
    "DIFFUSERS_VERBOSITY": "error",
}


def run_child(
    program: str, folder: Path, device: str, kind: str, *, loud: bool = False
) -> tuple[dict[str, Any] | None, bool]:
    """Runs `program --child KIND` and returns the result that it prints after RESULT, or None, and whether it
    succeeded. The program's output is shown if it failed or printed no result, or if loud is set."""
    command = [sys.executable, program, "--dir", str(folder), "--device", device, "--child", kind]
    child = subprocess.run(command, env=os.environ | QUIET, capture_output=True, text=True, timeout=200)
    results = [json.loads(line[7:]) for line in child.stdout.splitlines() if line.startswith("RESULT ")]
    if child.returncode or loud or not results:
        print(child.stdout + child.stderr[-20000:] * (child.returncode != 0 or loud), flush=True)
    return (results[0] if results else None), child.returncode == 0
