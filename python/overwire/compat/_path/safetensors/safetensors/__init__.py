"""Replaces safetensors if the parent folder is on PYTHONPATH: the real package takes this module's place
in sys.modules, and reads through overwire."""

import overwire.compat

overwire.compat.install("safetensors")
