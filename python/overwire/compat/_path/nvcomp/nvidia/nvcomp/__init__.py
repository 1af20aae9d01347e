"""Replaces itself in sys.modules with overwire's nvCOMP; see `overwire.compat.path`.
There is no nvidia/__init__.py, because other packages share that namespace."""

import overwire.compat

overwire.compat.install("nvcomp")
