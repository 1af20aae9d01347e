"""Replaces itself in sys.modules with the real package, which then reads through overwire; see
`overwire.compat.path`."""

import overwire.compat

overwire.compat.install("safetensors")
