"""Soak-tests overwire's public interface for a given time, with loops chosen by a seed, concurrency and faults.

`make soak SECONDS=600 SEED=7`, or `python tests/soak`. See `__main__`.
"""
