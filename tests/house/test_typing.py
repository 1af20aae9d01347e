"""Tests the types of the public names with mypy: right programs have no errors, and wrong ones do."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from conftest import ROOT

RIGHT = '''
from pathlib import Path
from typing_extensions import assert_type

import numpy as np
import overwire as ow
import torch

assert_type(ow.load_file("m"), dict[str, torch.Tensor])
assert_type(ow.load_file(filename="m", framework="pt"), dict[str, torch.Tensor])
print(ow.load_file(Path("m"), "cpu", framework="np")["a"].itemsize)
assert_type(ow.load_file(["a", "b"], torch.device("cuda:1"), framework="bytes"), dict[str, memoryview])
for name, tensor in ow.stream("m", device=0, dtype=torch.bfloat16, keys=["a"], max_memory="1GB"):
    assert_type(tensor, torch.Tensor)
with open("m", "rb") as file:
    ow.load_file(file, read="direct", mmap=False, dtype=np.float16, storage_options={"token": "t", "timeout": 3})
with ow.safe_open("m", framework="np") as opened:
    array = opened.get_tensor("a")
    array = opened.get_slice("a")[:, 1]
with ow.safe_open("m", "pt", "cuda") as tensors:
    assert_type(tensors.get_tensor("a"), torch.Tensor)
    assert_type(tensors.get_tensors(), dict[str, torch.Tensor])
    assert_type(tensors.get_slice("a")[0], torch.Tensor)
with ow.safe_open(filename="m", framework="bytes") as raw:
    assert_type(raw.get_tensor("a"), memoryview)
with ow.pin("m", device="cuda") as pinned:
    assert_type(pinned.load_file(device="cuda"), dict[str, torch.Tensor])
    assert_type(ow.load_file(pinned), dict[str, torch.Tensor])
assert_type(ow.inspect("m")["sources"][0]["tensors"][0]["stored"], int)
assert_type(ow.verify("m")["files"][0]["bytes"], int)
assert_type(ow.verify("m", original=True)["files"][0].get("original", {}).get("sha256", ""), str)
assert_type(ow.doctor()["memory"]["total"], int)
assert_type(ow.plan("m", device="cuda", filter=ow.experts(0, 2)).peak, int)
last = ow.last_report()
assert last is not None
assert_type(last["stages"]["read_bytes"], int)
ow.save_file({"a": np.zeros(1), "b": torch.ones(1), "c": ow.TensorSpec.of("F32", (1,), b"abcd")}, "m")
report = ow.save_file(tensors={"a": torch.ones(1)}, filename="m")
assert_type(report.ratio, float)
options: ow.LoadOptions = {"mmap": False, "lenient": True}
ow.load_file("m", **options)


class Settings(ow.LoadOptions, total=False):
    retries: int


settings: Settings = {"retries": 3, "mmap": True}
missing, unexpected = ow.load_model(torch.nn.Linear(1, 1), "m", max_memory=10)
held: ow.safe_open = ow.safe_open("m")
'''

# mypy reports an error in every line.
WRONG = '''
import overwire as ow

ow.load_file("m", framework="tensorflow")
ow.load_file("m", device=1.5)
ow.load_file("m", read="mapped")
ow.load_file(3)
ow.load_file(b"m")
ow.load_file("m", color="blue")
ow.load_file("m", max_memory=[1])
ow.load_file("m", storage_options={"tokn": "t"})
ow.load_file("m", dtype=8)
ow.stream("m", base=None)
ow.stream("m", framework="jax")
ow.plan("m", mmap=True)
ow.safe_open("m", framework="jax")
ow.safe_open("m", "np", read="direct")
ow.safe_open("m", framework="np").get_tensor("a").cuda()
ow.load_model(None, "m")
ow.inspect("m")["totals"]["F32"]["size"]
ow.verify(1)
ow.verify("m", original=True, tensors={})
ow.doctor()["gpus"]
ow.save_file({"a": 1}, 5)
ow.save_file({"a": 1}, "m")
ow.save_file({}, "m", level="best")
ow.save_model(None, "m", level=9)
ow.convert("a", "b", level="fast")
ow.experts(0, 2, placement="random")
ow.codecs.encode(b"", bitstream="zip")
ow.codecs.decode(b"", verify="sometimes")
(ow.last_report() or {})["colour"]
'''


def test_mypy_strict(tmp_path: Path) -> None:
    """The examples and RIGHT have no errors. Every line of WRONG has an error."""
    (tmp_path / "right.py").write_text(RIGHT)
    (tmp_path / "wrong.py").write_text(WRONG)
    examples = sorted(str(path) for path in (ROOT / "examples").glob("*.py"))
    # Uses the configuration and cache of `make lint`, which has already checked torch.
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", *examples]
    command += [str(tmp_path / "right.py"), str(tmp_path / "wrong.py")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    errors = [line for line in done.stdout.splitlines() if ": error:" in line]
    assert [line for line in errors if "wrong.py:" not in line] == [], done.stderr
    refused = {int(found[1]) for line in errors if (found := re.search(r"wrong\.py:(\d+):", line))}
    lines = WRONG.splitlines()
    assert [lines[at - 1] for at in range(4, len(lines) + 1) if at not in refused] == []
