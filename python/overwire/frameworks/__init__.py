"""The frameworks that tensors are made in and taken from: torch, numpy, and plain bytes."""
