"""Replaces nvCOMP if the folder above nvidia is on PYTHONPATH: overwire takes this module's place in sys.modules.
There is no nvidia/__init__.py, because other packages share that namespace."""

import overwire.compat

overwire.compat.install("nvcomp")
