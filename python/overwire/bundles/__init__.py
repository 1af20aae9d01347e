"""Saves any Python object with tensors as a small pickle and a container next to it."""
