"""Reads each object from its store once for all nodes of a Ray cluster."""
