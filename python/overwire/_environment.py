"""What the engine learns of the environment: words as it has them, and what stores read."""

from __future__ import annotations

import os

__all__ = ["environment", "told"]

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


def told(text: str) -> str:
    """A word of the command line or the environment as the engine has it: by its
    bytes, whatever Python takes them for."""
    return os.fsencode(text).decode("utf-8", "surrogateescape")


def environment() -> dict[str, str]:
    """What stores read of the environment, as `os.environ` has it now."""
    names = set(_NAMES) | {name.lower() for name in _NAMES if name.endswith("_PROXY")}
    return {name: told(value) for name, value in os.environ.items() if name in names or name.startswith(_PREFIX)}
