"""Reads overwire's files with numpy only, for machines without the engine.

The package is based only on docs/format.md, so that tests can compare it with the engine on every golden file. The
public functions are in `read`.
"""
