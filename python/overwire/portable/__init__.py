"""A reader of overwire's files that needs numpy alone, for machines without the engine.

Written from docs/format.md and nothing else, it is also the engine's slow twin: tests
compare the two on every golden file. `read` has the door.
"""
