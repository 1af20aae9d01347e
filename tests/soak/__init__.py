"""Tests overwire's public interface with random data and faults, for a given time.

A loop repeats one kind of test with new random data. A seed chooses the loops and their data.

`make soak SECONDS=600 SEED=7`, or `python tests/soak`. See `__main__`.
"""
