"""Replaces nyacomp's extension when its folder is on PYTHONPATH."""

import overwire.compat

overwire.compat.install("nyacomp_core")
