"""Tests random hostile bundles. `python tests/peers/pickle_fuzz.py` runs millions of them. `make asan` also runs these
tests with AddressSanitizer."""

from __future__ import annotations

import random
import warnings
from pathlib import Path

import overwire as ow
import warm
from pickle_cases import Maker
from pickle_fuzz import touch
from test_pickle_hostile import whole_bundle


def test_random_pickles_load_or_are_refused(seed: int) -> None:
    fuzz = Path(__file__).with_name("pickle_fuzz.py")
    done = warm.fresh([fuzz, "--cases", "2000", "--seed", str(seed)], timeout=280)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert f"CASES 2000 SEED {seed}" in done.stdout and "'loaded'" in done.stdout


def test_random_bundles_in_files_load_or_are_refused(tmp_path: Path, seed: int) -> None:
    warnings.simplefilter("ignore")
    loaded = 0
    for number in range(100):
        data, blobs, _ = Maker(random.Random(f"{seed}.{number}")).case()
        path = whole_bundle(tmp_path, number, data, blobs)
        try:
            made = ow.load_compressed_pickle(path)
        except ow.OverwireError:
            continue
        touch(made)
        loaded += 1
    assert loaded
