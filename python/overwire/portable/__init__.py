"""Reads overwire's files with numpy only, for machines without the engine.

It is based only on docs/format.md, so tests can compare it with the engine on every golden file. The public functions
are in `read`.
"""
