"""nvCOMP's name, on PYTHONPATH: overwire takes its place in sys.modules. There
is no nvidia/__init__.py: other packages share that namespace."""

import overwire.compat

overwire.compat.install("nvcomp")
