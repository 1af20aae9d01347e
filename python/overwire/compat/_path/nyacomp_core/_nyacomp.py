"""Replaces nyacomp's extension module if overwire/compat/_path is on PYTHONPATH."""

import overwire.compat

overwire.compat.install("nyacomp_core")
