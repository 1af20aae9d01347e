"""Models larger than their device: blocks of weights that lie compressed in host memory
and come while they run. `offload` is the door; `ring` moves the bytes."""
