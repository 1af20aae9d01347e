"""Reads objects in stores once for all nodes of a Ray cluster: the directory of shared pieces, and their supplier."""
