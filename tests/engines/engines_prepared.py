"""Compares models made from prepared state with vLLM's own loads, in vLLM's real code on the CPU.

    PYTHONPATH=python:build/engines python tests/engines/engines_prepared.py

Each model is loaded by vLLM itself, then by overwire, which stores the state after vLLM's processing, and then from
that state. Every parameter, buffer and attribute must be the same. Other cases are changed files and settings, damage,
refusals, reloads, pushes, and two ranks.
"""

from __future__ import annotations

import functools
import gc
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import engines_vllm as base

FP8 = {
    **base.LLAMA,
    "intermediate_size": 192,  # both ranks get whole blocks
    "quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 32]},
}


class Log:
    """Collects the log messages of overwire's loader."""

    def __init__(self) -> None:
        from overwire.integrations.vllm import prepared

        self.lines: list[str] = []
        prepared.log = self

    def info(self, words: str, *more: Any) -> None:
        self.lines.append(words % more)

    warning = info

    def take(self, words: str) -> str:
        """Returns the first line that contains the words, and clears all lines."""
        lines, self.lines[:] = list(self.lines), []
        for line in lines:
            if words in line:
                return line
        raise SystemExit(f"the log has no {words!r}: {lines}")


def start(path: Path, folder: Path, where: tuple[int, int, int], **more: Any) -> tuple[Any, Any]:
    """Starts an engine with prepared state in a folder, and waits until the state is written. more: other arguments of
    the engine."""
    from overwire.integrations.vllm import prepared

    world, rank, port = where
    model, config = base.load(path, world, rank, port, "overwire", {"prepared": str(folder)}, **more)
    prepared.begin_writing()
    prepared.finish_writing()
    return model, config


def held(model: Any) -> dict[str, Any]:
    """Returns all tensors of a model and its other attributes."""
    from overwire.integrations.kept_model.describe_model import Describer
    from overwire.integrations.kept_model.move_tensors import take_tensors
    from overwire.integrations.vllm.identity import OPAQUE

    tensors, rows, names = take_tensors(model)
    return {"names": names, "rows": rows, "modules": Describer(model, tensors, "vllm", OPAQUE).describe_modules()}


def same(what: str, model: Any, theirs: Any) -> None:
    """Compares all tensors and attributes of two models."""
    tensors, more = theirs
    wrong = base.differences(base.state(model), tensors)
    ours = held(model)
    for part in ("names", "rows", "modules"):
        keys = ours[part].keys() | more[part].keys()
        wrong += [f"{part} {key}" for key in keys if ours[part].get(key) != more[part].get(key)]
    if wrong:
        for key in wrong[:3]:
            part, _, name = key.partition(" ")
            print(key, ours.get(part, {}).get(name), more.get(part, {}).get(name), sep="\n    ")
        raise SystemExit(f"{what}: {wrong[:10]}")
    print(f"  {what}: {len(tensors)} tensors, {len(more['modules'])} modules equal vLLM's own load", flush=True)


def starts(
    name: str, path: Path, folder: Path, log: Log, where: tuple[int, int, int], **more: Any
) -> tuple[dict[str, Any], Any, Any]:
    """Compares a first and a later start with vLLM's own load. Returns the tensors of vLLM's load, and the model of the
    later start with its configuration. more: other arguments of the engine."""
    slices = base.planned()
    own, _ = base.load(path, *where, "safetensors", **more)
    theirs = base.state(own), held(own)
    slices.clear()
    first, _ = start(path, folder, where, **more)
    if not sum(slices) and where[0] == 1:
        raise SystemExit(f"{name}: not loaded by slices")
    log.take("stored prepared state in")
    same(f"{name}, first", first, (theirs[0], theirs[1] | {"modules": held(first)["modules"]}))
    later, config = start(path, folder, where, **more)
    log.take("restored prepared state")
    same(f"{name}, later", later, (base.state(first), held(first)))
    return theirs[0], later, config


def models(root: Path, log: Log, where: tuple[int, int, int], names: list[str]) -> None:
    """Tests the first start of each model, a later start, and vLLM's reload after that."""
    import vllm

    for name in names:
        if name == "experts" and where[0] > 1 and vllm.__version__.startswith("0.32."):
            theirs = base.state(base.load(root / name / "plain", *where, "safetensors")[0])
            model, _ = start(root / name / "plain", root / "prepared" / name, where)
            log.take("no prepared state: vLLM 0.32 cannot build a model on the meta device")
            if wrong := base.differences(base.state(model), theirs):
                raise SystemExit(f"{name}, the usual load differs: {wrong}")
            continue
        theirs, later, config = starts(name, root / name / "plain", root / "prepared" / name, log, where)
        if name != "mixtral" or where[0] == 1:
            base.reload(later, config, theirs)


def with_fp8() -> None:
    """Replaces vLLM's fp8 kernels, which need AMX and compiled code, with a function that only changes the layout of
    the weights."""
    from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUFp8BlockScaledMMKernel
    from vllm.model_executor.utils import replace_parameter

    def process(self: Any, layer: Any) -> None:
        replace_parameter(layer, "weight", layer.weight.t())
        replace_parameter(layer, "weight_scale_inv", layer.weight_scale_inv.t().contiguous())

    CPUFp8BlockScaledMMKernel.is_supported = classmethod(lambda *_: (True, None))
    CPUFp8BlockScaledMMKernel.can_implement = classmethod(lambda *_: (True, None))
    CPUFp8BlockScaledMMKernel.process_weights_after_loading = process


def rank_main(root: Path, world: int, rank: int, port: int, names: list[str]) -> None:
    base.without_kernels()
    with_fp8()
    log = Log()
    models(root, log, (world, rank, port), names)
    if world == 1:
        refusals(root, log, (world, rank, port))


def refusals(root: Path, log: Log, where: tuple[int, int, int]) -> None:
    """After damage, or with changed files, other settings or other code, the model is loaded as usual with the right
    weights, and the log gives the reason."""
    import torch
    from overwire.integrations.vllm import prepared

    path, folder = root / "llama/plain", root / "refused"
    first, _ = start(path, folder, where)
    log.take("stored prepared state in")
    file = next(folder.iterdir())

    def check(words: str) -> None:
        model, _ = start(path, folder, where)
        log.take(words)
        same(words, model, (base.state(first), held(first)))

    whole = file.read_bytes()
    file.write_bytes(whole[:-2000] + bytes(1000) + whole[-1000:])
    check("store its prepared state again")
    check("restored prepared state")
    file.write_bytes(whole[:100])
    check("is damaged")
    check("restored prepared state")
    os.environ["VLLM_SOMETHING"] = "1"
    check("stored prepared state in")
    del os.environ["VLLM_SOMETHING"]
    shards = sorted(path.glob("*.safetensors"))
    os.utime(shards[0], (1, 1))
    check("stored prepared state in")
    from vllm.model_executor.models.llama import LlamaForCausalLM

    own = LlamaForCausalLM.load_weights
    LlamaForCausalLM.load_weights = lambda self, weights: own(self, weights)
    check("does not match: the function")
    LlamaForCausalLM.load_weights = own
    LlamaForCausalLM.allow_patterns_overrides = ["*.safetensors"]
    check("it has allow_patterns_overrides")
    del LlamaForCausalLM.allow_patterns_overrides
    for name in folder.glob("*.safetensors"):
        name.unlink()  # also deletes the note that refuses this model
    check("stored prepared state in")
    check("restored prepared state")
    check_failed_starts(path, root / "failed", where, log, (base.state(first), held(first)))
    compare = prepared._compare_model
    for error in (MemoryError("passes"), OSError("passes"), torch.AcceleratorError("passes")):
        prepared._compare_model = functools.partial(fail, error)
        check("does not match: passes")
        prepared._compare_model = compare
        check("restored prepared state")  # the earlier file is still there
    check_hostile_records(path, root / "hostile", where, log)
    if alive := check_refused_memory(path, folder, where, log):
        raise SystemExit(f"vLLM's own load begins while a refused model still has {alive} tensors")
    print("  if prepared state does not fit, the usual load follows", flush=True)
    steps = []
    for name in ("Arriving", "fingerprint_of_load"):
        call = getattr(prepared, name)
        setattr(prepared, name, lambda *args, name=name, call=call: (steps.append(name), call(*args))[1])
    check("restored prepared state")
    os.environ["VLLM_SOMETHING"] = "2"
    check("stored prepared state in")
    if steps != ["Arriving", "fingerprint_of_load"] * 2:
        raise SystemExit(f"reading must begin once, before the fingerprint is known: {steps}")
    print("  reading of the last used file begins immediately, and ends if the file does not match", flush=True)


def fail(error: Exception, *_: Any) -> Any:
    raise error


def check_failed_starts(path: Path, folder: Path, where: tuple[int, int, int], log: Log, theirs: Any) -> None:
    """If a model is deleted before the engine is ready, its memory is freed and no state is written. If the state
    cannot be described, digested or written, the start still works."""
    from overwire.integrations.vllm import prepared

    model, _ = base.load(path, *where, "overwire", {"prepared": str(folder)})
    tensors = [weakref.ref(tensor.untyped_storage()) for tensor in model.parameters()]
    waiting = len(prepared._waiting)
    del model
    gc.collect()
    alive = sum(ref() is not None for ref in tensors)
    if not waiting or prepared._waiting or alive:
        raise SystemExit(f"a deleted model has left {alive} tensors and {prepared._waiting} to write (before: {waiting})")

    for owner, name in ((prepared, "_describe_model"), (prepared.keep_files, "keep_file")):
        own = getattr(owner, name)
        setattr(owner, name, functools.partial(fail, RecursionError("too deep")))
        model, _ = start(path, folder, where)
        setattr(owner, name, own)
        log.take("cannot store prepared state: too deep")
        same(f"{name} fails", model, theirs)


def check_hostile_records(path: Path, folder: Path, where: tuple[int, int, int], log: Log) -> None:
    """A record is refused if it would replace a method with a value, or if it names a module that the model lacks."""
    from overwire.integrations.vllm import prepared

    find, note = prepared.keep_files.find_file, prepared.keep_files.note_refusal
    start(path, folder, where)
    prepared.keep_files.note_refusal = lambda *_: None  # so that the file stays

    def find_changed(change: Callable[[dict[str, Any]], Any], *args: Any) -> Any:
        kept = find(*args)
        if kept is not None:
            change(kept.record["modules"])
        return kept

    changes = {"model.norm.forward is": lambda modules: modules["model.norm"].update(forward="1"),
               "it has no module gone": lambda modules: modules.update(gone={"": "gone"})}  # fmt: skip
    for text, change in changes.items():
        prepared.keep_files.find_file = functools.partial(find_changed, change)
        start(path, folder, where)
        log.take(f"does not match: {text}")
    prepared.keep_files.find_file, prepared.keep_files.note_refusal = find, note


def check_refused_memory(path: Path, folder: Path, where: tuple[int, int, int], log: Log) -> int:
    """Returns how many tensors of a refused model exist when vLLM's own load begins."""
    from overwire.integrations.vllm import prepared

    tensors: list[weakref.ref[Any]] = []
    alive: list[int] = []
    put, compare, load = prepared.put_tensors, prepared._compare_model, prepared.PreparedStart.load_model

    def put_tensors(*args: Any) -> dict[str, Any]:
        placed = put(*args)
        tensors.extend(map(weakref.ref, placed.values()))
        return placed

    def refuse(*_: Any) -> None:
        raise prepared.Foreign("a different model")

    def load_model(self: Any) -> Any:
        model = load(self)
        alive.append(sum(ref() is not None for ref in tensors))
        return model

    prepared.put_tensors, prepared._compare_model, prepared.PreparedStart.load_model = put_tensors, refuse, load_model
    start(path, folder, where)
    prepared.put_tensors, prepared._compare_model, prepared.PreparedStart.load_model = put, compare, load
    log.take("does not match: a different model")
    if not tensors:
        raise SystemExit("no model was made")
    return alive[0]


def make_folders(root: Path) -> None:
    """Writes the plain models to ROOT/NAME/plain."""
    for name, config in {**base.MODELS, "fp8": FP8}.items():
        tensors = base.weights(config)
        tensors = base.quantised(tensors, 16, 32) if name == "fp8" else tensors
        base.folder(root / name / "plain", config, tensors, False)


def main() -> None:
    if base.run_as_rank(rank_main):
        return
    with base.plugged_folder("overwire-prepared-") as (root, env):
        make_folders(root)
        for world, names in ((1, [*base.MODELS, "fp8"]), (2, ["llama", "experts", "fp8"])):
            base.run_ranks(__file__, root, world, names, env)
        print("prepared state equals vLLM's own loads")


if __name__ == "__main__":
    main()
