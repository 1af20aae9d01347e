"""Passes environment variables to the engine: settings, and variables that stores read."""

from __future__ import annotations

import os

from ._tables import SETTINGS, STORES

_adopted = False

# The variables that a store may need, by their whole names. _PREFIXES has the prefixes of other names.
_NAMES = {name for name in STORES if not name.endswith("*")}
_NAMES |= {name.lower() for name in _NAMES if name.endswith("_PROXY")}
# Variables in which huggingface_hub expands ~ and $NAME.
_PATHS = ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_TOKEN_PATH", "XDG_CACHE_HOME")
_PREFIXES = tuple(name[:-1] for name in STORES if name.endswith("*"))


def engine_text(text: str) -> str:
    """Converts a command-line word or environment value to the engine's encoding: UTF-8, with
    surrogates for invalid bytes."""
    return os.fsencode(text).decode("utf-8", "surrogateescape")


def adopt_nyacomp() -> None:
    """Treats nyacomp's variables (DEBUG, NUM_THREADS ...) as settings from now on. Only nyacomp's
    drop-in calls this, because other programs also use these names."""
    global _adopted
    _adopted = True


def truth(name: str) -> bool:
    """Returns whether a variable is set to one of the engine's spellings of yes."""
    return os.environ.get(name, "").strip().lower() in ("1", "true", "yes", "on", "y", "t")


def settings() -> dict[str, str]:
    """Returns the engine's settings in the current `os.environ`."""
    return {
        name: engine_text(os.environ[name])  # os.environ encodes a name to look it up, which takes a microsecond
        for name in os.environ
        if name.startswith("OVERWIRE_") or (_adopted and name in SETTINGS)
    }


def environment() -> dict[str, str]:
    """Returns the variables for stores in the current `os.environ`."""
    variables = {name: value for name, value in os.environ.items() if name in _NAMES or name.startswith(_PREFIXES)}
    for name in _PATHS:
        if name in variables:
            variables[name] = os.path.expandvars(os.path.expanduser(variables[name]))
    return {name: engine_text(value) for name, value in variables.items()}
