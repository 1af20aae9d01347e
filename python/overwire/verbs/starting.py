"""Starts the engine and the GPU for a load, and imports the modules for loading meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import cache, partial
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .._imports import Undisturbed
from ..errors import NotSupportedError
from ..model.options import check_options
from ..model.starting import check_source, named, start_engine

if TYPE_CHECKING:
    from .loader import Loader


def open_loader(
    verb: str, kind: Any, options: Mapping[str, Any], source: Any, device: Any, framework: Any = None,
    filename: Any = None, check: Callable[[Any], Any] = lambda _: None, parts: bool = False,
) -> Loader:  # fmt: skip
    """Checks the arguments of a call and opens the model that it loads. With a group, an error is raised on all ranks.
    Invalid sources and frameworks are refused before the engine is started, so that a program that catches the error
    can still fork.

    verb, kind: the function's name, and the type of its options. check: a function that checks other arguments. It gets
        the source, and returns the device if `device` is None. parts: see `Model`.
    """
    base, group, shard = options.get("base"), options.get("group"), options.get("shard")
    with ExitStack() as stack:
        if group is not None:
            from ..distributed.group import group_verb

            stack.enter_context(group_verb(group, device))
        check_options(verb, options, kind)
        source = named(verb, source, filename)
        default_device = check(source)
        if base is not None:
            if group is not None or shard is not None:
                text = "base= cannot be used with group= or shard=: load the base, then call apply_delta"
                raise NotSupportedError(f"overwire: load_file: {text}")
            rest = {name: value for name, value in options.items() if name != "base"}
            load_base = partial(open_loader, verb, kind, rest, base, device, framework)
            based: Loader = _import_module(".loader").BasedLoader(load_base, base, source, device, framework, rest)
            return based
        check_source(source)
        start_engine(framework)  # the Go runtime starts during the imports
        device = default_device if device is None else device
        if group is None:
            _import_module("..frameworks.choose").prepare_gpu(device)  # so does the GPU
        chosen: Loader = _import_module(".loader").choose_loader(stack, source, device, framework, options, parts)
        return chosen


@cache
def _import_module(name: str) -> ModuleType:
    with Undisturbed():  # a signal handler may call overwire
        return import_module(name, __package__)
