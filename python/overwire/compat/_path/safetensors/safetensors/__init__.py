"""safetensors' name, on PYTHONPATH: the package itself takes its place in
sys.modules, and reads through overwire."""

import overwire.compat

overwire.compat.install("safetensors")
