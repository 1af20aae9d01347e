"""Runs models that are larger than their device. Weights stay compressed in host memory, and the weights of a block are
on the device only while it runs. `offload` is the entry point, and `ring` loads the blocks."""
