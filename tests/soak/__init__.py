"""Tests overwire's public interface with random loops for a given time.

A seed chooses the loops. Some of them run concurrently or cause faults.

`make soak SECONDS=600 SEED=7`, or `python tests/soak`. See `__main__`.
"""
