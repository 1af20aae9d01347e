"""Replaces nyacomp's extension module if this file's folder is on PYTHONPATH."""

import overwire.compat

overwire.compat.install("nyacomp_core")
