"""The name of nyacomp's extension, on PYTHONPATH."""

import overwire.compat

overwire.compat.install("nyacomp_core")
