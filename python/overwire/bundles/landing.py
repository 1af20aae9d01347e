"""Loads the blobs of a bundle, each to its device, while the pickle is read."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from ..dtypes import nbytes
from ..errors import DeviceError, FormatError
from ..frameworks.choose import frame_for, prepare_gpu
from ..jobs import Job
from ..model.opened import Model

# Metadata keys of a container: the names of its blobs in order, one per line, and their devices, one per line or a
# single line for all. Do not change these keys, because existing files contain them.
ORDER = "overwire.blobs"
DEVICES = "overwire.devices"

# The entry for a numpy array, which has no device.
_ARRAY = "numpy"


def devices_of(blobs: Sequence[Any]) -> str:
    """Returns the value of the metadata key DEVICES: the torch device name of each storage."""
    devices = [str(blob.data.device) if hasattr(blob.data, "untyped") else _ARRAY for blob in blobs]
    return devices[0] if len(set(devices)) == 1 else "\n".join(devices)


class Landing:
    """Implements `unpickling.Blobs` for a container. It is a context manager. After the `with` block ends, nothing
    writes to the blobs' memory.

    device: the device for all storages; None puts each on the device that it was saved from.
    """

    def __init__(self, model: Model, source: str, device: str | None, watcher: Any) -> None:
        self._source = source
        self._rows = model.table
        metadata = model.metadata()
        names = metadata.get(ORDER, "").split("\n") if model.table else []
        try:
            self._places = [model.places[name] for name in names]
        except KeyError as error:
            raise FormatError(f"overwire: open {source}: its container lacks a tensor", source=source) from error
        self._targets = self._devices_of_blobs(metadata.get(DEVICES, ""), device)
        # The allocated tensors, and the capsules and addresses that have landed, by position in the table.
        self._tensors: dict[int, Any] = {}
        self._landed: dict[int, tuple[Any, int]] = {}
        self._made: dict[int, Any] = {}
        self._running: list[Job] = []  # all jobs, including those without tensors
        # For each position: the job that loads it, and all positions that the job loads, in the order of its requests
        # (None: all positions in order).
        self._jobs: dict[int, tuple[Job, list[int] | None]] = {}
        self._stack = contextlib.ExitStack()
        with contextlib.ExitStack() as stack:
            self._start_load(model, stack, watcher)
            self._stack = stack.pop_all()

    def _devices_of_blobs(self, note: str, device: str | None) -> list[str]:
        """Returns the device of each blob."""
        count = len(self._places)
        self._noted = bool(note)
        were = note.split("\n") if note else ["cpu"]
        if len(were) == 1:
            were *= count
        if len(were) != count:
            text = f"overwire: open {self._source}: its container does not list one device per tensor"
            raise FormatError(text, source=self._source)
        if device is None:
            others = sorted(set(were) - {"cpu", _ARRAY})
            for name in others:
                if name.startswith("cuda:"):
                    prepare_gpu(name)  # the engine initialises the GPU while torch does the same
            for name in others:
                self._check_device(name)
        return ["cpu" if name == _ARRAY else device or name for name in were]

    def _check_device(self, name: str) -> None:
        import torch

        if name.partition(":")[0] == "meta":
            text = f"overwire: open {self._source}: its container lists {name!r} as a device, which has no memory"
            raise FormatError(text, source=self._source)
        try:
            if name.startswith("cuda:") and int(name[5:]) >= torch.cuda.device_count():
                raise RuntimeError(f"this machine has {torch.cuda.device_count()} CUDA devices")
            torch.empty(0, device=name)
        except (RuntimeError, AssertionError, ValueError, ImportError, AttributeError) as error:
            reason = str(error).partition("\n")[0]
            text = f"its tensors were on {name!r}, which is not available ({reason}): choose a device with device=, "
            text += "for example device='cpu'"
            raise DeviceError(f"overwire: load {self._source}: {text}", source=self._source) from error

    def _start_load(self, model: Model, stack: contextlib.ExitStack, watcher: Any) -> None:
        def begin_load(job: Job, order: list[int] | None) -> None:
            self._running.append(stack.enter_context(job))
            self._jobs.update(dict.fromkeys(range(len(self._rows)) if order is None else order, (job, order)))

        groups: dict[str, list[int]] = {}
        for place, target in dict(zip(self._places, self._targets, strict=True)).items():
            # Storages for devices that the engine does not support, and blobs that may belong to an array, are loaded
            # to the host.
            groups.setdefault(target if self._noted and target.startswith("cuda:") else "cpu", []).append(place)
        if groups.keys() <= {"cpu"}:
            begin_load(model.start(None, watcher), None)
        else:
            for device, order in groups.items():
                view = model.on(device)
                load = view.begin(order, frame_for("torch"), watcher=watcher)
                self._tensors.update((order[at], tensor) for at, tensor in load.places.items())
                begin_load(load.job, order)
                watcher = None

    def __enter__(self) -> Landing:
        return self

    def __exit__(self, *exc: Any) -> None:
        self._stack.__exit__(*exc)

    def wait(self) -> None:
        """Waits until every blob is loaded. Raises the error of a blob that failed."""
        for job in self._running:
            job.wait()

    def _take_blob(self, blob: int, size: int) -> tuple[Any, int]:
        """Waits for a blob, and returns its capsule and address. Each blob can be taken once."""
        at = self._places[blob] if 0 <= blob < len(self._places) else -1
        if at < 0 or nbytes(self._rows[at][1], self._rows[at][2]) != size:
            raise self._refuse_reference()
        job, order = self._jobs[at]
        while at not in self._landed:
            news = job.next(None, True)
            if news is None or not news.capsules:
                job.wait()
                raise self._refuse_reference()  # the blob was already taken under another number
            for place, capsule, pointer in zip(news.positions, news.capsules, news.addresses, strict=True):
                self._landed[place if order is None else order[place]] = (capsule, pointer)
        return self._landed.pop(at)

    def storage(self, blob: int, size: int) -> Any:
        storage = self._made.get(blob)
        if storage is None:
            from torch.utils.dlpack import from_dlpack

            capsule, _ = self._take_blob(blob, size)
            tensor = self._tensors.pop(self._places[blob], None)
            if tensor is None:
                tensor = from_dlpack(capsule)
            if str(tensor.device) != self._targets[blob]:
                tensor = tensor.to(self._targets[blob])
            storage = self._made[blob] = tensor.untyped_storage()
        elif not hasattr(storage, "untyped") or storage.nbytes() != size:
            raise self._refuse_reference()
        return storage

    def base(self, blob: int, size: int) -> Any:
        base = self._made.get(blob)
        if base is None:
            frame_for("np")
            from ..frameworks.numpy import hold

            if self._noted and 0 <= blob < len(self._targets) and self._targets[blob].startswith("cuda:"):
                raise self._refuse_reference()  # only a storage may be in GPU memory, not an array
            capsule, pointer = self._take_blob(blob, size)
            base = self._made[blob] = hold(capsule, pointer, size)
        elif hasattr(base, "untyped") or base.nbytes != size:
            raise self._refuse_reference()
        return base

    def _refuse_reference(self) -> FormatError:
        text = f"overwire: unpickle {self._source}: a reference to a tensor does not match the container"
        return FormatError(text, source=self._source)
