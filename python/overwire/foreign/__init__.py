"""Converts files of other libraries to plain safetensors files, without running code from them."""
