"""What a caller says about reaching a store, in the engine's words."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from .errors import ArgumentError

__all__ = ["StorageOptions", "environment", "is_remote", "shown", "storage"]

#: Options of a store by name; see `storage`.
StorageOptions = Mapping[str, object]

# Environment variables that a store may need: gosrc/source/options.go, EnvNames.
_PREFIX = "AWS_"
_NAMES = (
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "ALL_PROXY",
    "NO_PROXY",
    "HF_TOKEN",
    "HF_ENDPOINT",
    "HF_HOME",
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
    "HOME",
    "USERPROFILE",
    "CURL_CA_BUNDLE",
    "REQUESTS_CA_BUNDLE",
    "REDISCLI_AUTH",
)


def environment() -> dict[str, str]:
    """What stores read of the environment, as `os.environ` has it now."""
    names = set(_NAMES) | {name.lower() for name in _NAMES if name.endswith("_PROXY")}
    return {name: value for name, value in os.environ.items() if name in names or name.startswith(_PREFIX)}


def is_remote(uri: str) -> bool:
    """Whether a path has a scheme that is not file://."""
    scheme, found, _ = uri.partition("://")
    return bool(found) and scheme.lower() != "file" and not set(scheme) & set("/\\.")


def shown(uri: str) -> str:
    """A URI as people may see it: without user, password, query and fragment.
    Local paths stay as they are."""
    if not is_remote(uri):
        return uri
    scheme, _, rest = uri.partition("://")
    plain, cut, _ = rest.partition("?")
    plain, cut2, _ = plain.partition("#")
    host, slash, path = plain.partition("/")
    user, at, host = host.rpartition("@")
    return f"{scheme}://{'***@' if at else ''}{host}{slash}{path}{'?***' if cut or cut2 else ''}"


def storage(options: StorageOptions | None, uris: Iterable[str]) -> dict[str, Any]:
    """The entries of a spec that say how to reach its URIs: {} for local paths.

    Values become text; None is dropped; `headers`, a mapping, becomes one entry
    a header. Which names a scheme has the engine says. ArgumentError for
    options of another kind, or beside local paths alone.
    """
    if options is not None and not isinstance(options, Mapping):
        raise ArgumentError(f"overwire: storage_options: expected a mapping, got {type(options).__name__}")
    if not any(map(is_remote, uris)):
        if options:
            raise ArgumentError("overwire: storage_options: they are for URIs; a local path takes none")
        return {}
    texts: dict[str, str] = {}
    for name, value in (options or {}).items():
        if not isinstance(name, str):
            raise ArgumentError("overwire: storage_options: a name is not a str")
        if name == "headers" and value is not None:
            if not isinstance(value, Mapping):
                raise ArgumentError("overwire: storage_options: headers: expected a mapping of names to texts")
            texts.update({f"header.{key}": _text("headers", part) for key, part in value.items()})
        elif value is not None:
            texts[name] = _text(name, value)
    if texts.get("insecure") == "true":
        _warn_once()
    return {"storage": {"storage": texts, "env": environment()}}


_warned = False


def _warn_once() -> None:
    global _warned
    if not _warned:
        _warned = True
        from .jobs import log

        log.warning("storage_options: insecure: certificates are not checked; whoever is on the way can change the weights")


def _text(name: str, value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (str, int, float)):
        return str(value)
    if isinstance(value, os.PathLike):
        return os.fsdecode(value)
    raise ArgumentError(f"overwire: storage_options: {name}: expected a text, a number or a bool, got {type(value).__name__}")
