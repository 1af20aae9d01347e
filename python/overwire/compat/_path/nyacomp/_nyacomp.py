"""Replaces itself in sys.modules with overwire's version of nyacomp's extension; see `overwire.compat.path`."""

import overwire.compat

overwire.compat.install("nyacomp_core")
