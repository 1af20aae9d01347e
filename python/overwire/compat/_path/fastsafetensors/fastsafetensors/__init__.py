"""fastsafetensors' name, on PYTHONPATH: overwire takes its place in sys.modules."""

import overwire.compat

overwire.compat.install("fastsafetensors")
