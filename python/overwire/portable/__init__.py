"""Reads overwire's files with numpy only, for machines without the engine.

It is written only from docs/format.md, and so it is also the engine's slow twin: tests
compare the two on every golden file. The public functions are in `read`.
"""
