"""Tests what compat.tensorizer's TensorSerializer refuses, and when its file appears."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import overwire as ow
import pytest
import tensorizer as theirs
import torch
from overwire.compat import tensorizer as ours
from overwire.compat.tensorizer import _writer
from torch.overrides import TorchFunctionMode

PARAM: Any = 0

UNREADABLE = {
    "objects": np.array([{}], dtype=object),
    "texts": np.array(["ab"]),
    "bytes": np.array([b"ab"]),
    "other byte order": np.arange(3).astype(">f4"),
    "texts of other byte order": np.array(["ab"]).astype(">U2"),
    "bfloat16": np.arange(4).astype(ml_dtypes.bfloat16),
    "float8": np.arange(4).astype(ml_dtypes.float8_e4m3fn),
    "int4": np.arange(4).astype(ml_dtypes.int4),
    "records": np.zeros(3, [("a", "i4")]),
    "raw bytes": np.zeros(3, "V4"),
    "dates": np.array(["2020"], "M8[D]"),
    "durations": np.array([1], "m8[s]"),
    "long doubles": np.arange(3, dtype=np.longdouble),
    "long complex": np.arange(3, dtype=np.clongdouble),
}


def values(path: Path) -> list[float]:
    """Returns the values of tensor "a" in a file."""
    return list(ow.load_file(path, framework="np")["a"].tolist())


def hidden(folder: Path) -> list[str]:
    return [name for name in os.listdir(folder) if name.startswith(".")]


@pytest.mark.parametrize("array", UNREADABLE.values(), ids=UNREADABLE)
def test_arrays_that_no_reader_supports_are_refused(array: np.ndarray, tmp_path: Path) -> None:
    """An array of a dtype that no reader supports is refused as in tensorizer itself, but before anything is
    written."""
    with pytest.raises((TypeError, ValueError)) as expected:
        theirs.TensorSerializer(tmp_path / "theirs").write_tensor(0, "x", theirs.TensorType.PARAM, array)
    with ours.TensorSerializer(tmp_path / "x.tensors") as serializer:
        with pytest.raises(expected.type):
            serializer.write_tensor(0, "x", PARAM, array)
        serializer.write_tensor(0, "x", PARAM, np.ones(2, "f4"))
    assert set(theirs.TensorDeserializer(str(tmp_path / "x.tensors"), device="cpu")) == {"x"}


@pytest.mark.parametrize("unnamed", [True, False])
def test_the_file_appears_when_it_is_closed(tmp_path: Path, unnamed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until a writer is closed, there is no file or the older file at its path. Then there is the complete new file,
    with the mode of the older one, and no other file in the folder. Of several writers, the last one to be closed
    wins."""
    if not unnamed:
        plain = os.open

        def refusing(path: Any, flags: int, *rest: Any, **more: Any) -> int:
            if flags & os.O_TMPFILE == os.O_TMPFILE:
                raise OSError(errno.EOPNOTSUPP, "no such files")
            return plain(path, flags, *rest, **more)

        monkeypatch.setattr(os, "open", refusing)
    path = tmp_path / "new" / "x.tensors"
    first, second = ours.TensorSerializer(path), ours.TensorSerializer(str(path))
    first.write_tensor(0, "a", PARAM, np.full(100_000, 1.0))
    second.write_tensor(0, "a", PARAM, np.full(7, 2.0))
    first.write_tensor(0, "b", PARAM, np.zeros(3))
    assert not path.exists() and len(hidden(path.parent)) == (0 if unnamed else 2)
    first.close()
    path.chmod(0o640)
    assert values(path) == [1.0] * 100_000
    second.close()
    assert values(path) == [2.0] * 7 and path.stat().st_mode & 0o777 == 0o640
    link = tmp_path / "link"
    link.symlink_to(path)
    with ours.TensorSerializer(link) as third:
        third.write_tensor(0, "a", PARAM, np.full(1, 3.0))
        assert values(path) == [2.0] * 7
    assert values(path) == [3.0] and link.is_symlink()
    assert os.listdir(path.parent) == ["x.tensors"]


def test_a_failed_write_leaves_the_older_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a `with` block raises an error or a write fails, the older file stays, and no other file is left."""
    path = tmp_path / "x.tensors"
    with ours.TensorSerializer(path) as serializer:
        serializer.write_tensor(0, "a", PARAM, np.ones(3))
    with pytest.raises(KeyError), ours.TensorSerializer(path) as serializer:
        serializer.write_tensor(0, "a", PARAM, np.zeros(3))
        raise KeyError
    serializer = ours.TensorSerializer(path)
    serializer.write_tensor(0, "a", PARAM, np.zeros(3))
    with monkeypatch.context() as patch:
        patch.setattr("overwire.compat.tensorizer._writer.write_records", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            serializer.write_tensor(1, "b", PARAM, np.zeros(3))
    with pytest.raises(ValueError, match="an earlier write has failed"):
        serializer.write_tensor(1, "c", PARAM, np.zeros(3))
    serializer.close()
    assert values(path) == [1.0] * 3 and os.listdir(tmp_path) == ["x.tensors"]


def test_open_files_stay_in_place(tmp_path: Path) -> None:
    """A file object that the caller has opened is complete after each write, as in tensorizer itself. A device is not
    replaced."""
    path = tmp_path / "x.tensors"
    with open(path, "wb+") as file:
        serializer = ours.TensorSerializer(file)
        serializer.write_tensor(0, "a", PARAM, np.ones(3))
        assert values(path) == [1.0] * 3
        serializer.close()
    with ours.TensorSerializer(os.devnull) as serializer:
        serializer.write_tensor(0, "a", PARAM, np.ones(3))
    assert not Path(os.devnull).is_file()


PROGRAM = """
import numpy as np, os, signal, sys
from overwire.compat.tensorizer import TensorSerializer
serializer = TensorSerializer("x.tensors")
serializer.write_tensor(0, "a", 0, np.full(3, 2.0))
"""


@pytest.mark.parametrize(
    ("end", "left"),
    [("", 2.0), ("os.kill(os.getpid(), signal.SIGKILL)", 1.0), ("raise KeyError", 1.0), ("os.fork() or sys.exit(); os.wait()", 2.0)],
    ids=["not closed", "killed", "exception", "forked"],
)
def test_writers_open_when_a_process_ends(
    end: str, left: float, tmp_path: Path, torch_script: Callable[..., Any]
) -> None:
    """A writer that was not closed writes its file at exit. If the process is killed or its program fails, the older
    file stays, and no other file is left. A forked child writes nothing."""
    path = tmp_path / "x.tensors"
    with ours.TensorSerializer(path) as serializer:
        serializer.write_tensor(0, "a", PARAM, np.ones(3))
    done = torch_script(PROGRAM + end, check=False)
    assert values(path) == [left] * 3 and not hidden(tmp_path), done.stderr


class _Copies(TorchFunctionMode):
    """Records the strides of copies. Ignores pin_memory, so that the test needs no GPU."""

    def __init__(self) -> None:
        self.strides: list[tuple[Any, Any]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.copy_:
            self.strides.append((args[0].stride(), args[1].stride()))
        return func(*args, **{name: value for name, value in (kwargs or {}).items() if name != "pin_memory"})


def test_a_gpu_tensor_is_copied_in_the_order_of_its_memory() -> None:
    """Even a transposed tensor is copied in the order of its memory, without a second copy on the GPU."""
    dense = torch.arange(24.0).reshape(2, 3, 4)
    for tensor in (dense, dense.transpose(0, 2), dense[0, 0, 0], dense[:0]):
        with _Copies() as seen:
            copy = _writer._copy_from_gpu(tensor)
        assert copy.is_contiguous() and torch.equal(copy, tensor)
        assert seen.strides and all(to == of for to, of in seen.strides)
