"""Soak-tests overwire's public interface: loops chosen by a seed, with concurrency and faults, for a given time.

`make soak SECONDS=600 SEED=7`, or `python tests/soak`: see `__main__`.
"""
