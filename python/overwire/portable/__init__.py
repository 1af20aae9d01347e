"""Reads overwire's files with numpy only, for machines without the engine.

It is based only on docs/format.md, so it also serves as the engine's slow twin: tests compare
both on every golden file. The public functions are in `read`.
"""
