"""Runs models that are larger than their device: weights stay compressed in host memory, and each block's are
loaded while it runs. `offload` is the entry point; `ring` moves the bytes."""
