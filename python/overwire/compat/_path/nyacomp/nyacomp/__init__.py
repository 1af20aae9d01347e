"""Replaces itself in sys.modules with overwire's nyacomp; see `overwire.compat.path`."""

import overwire.compat

overwire.compat.install("nyacomp")
