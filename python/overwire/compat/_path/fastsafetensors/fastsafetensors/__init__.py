"""Replaces itself in sys.modules with overwire's fastsafetensors; see `overwire.compat.path`."""

import overwire.compat

overwire.compat.install("fastsafetensors")
