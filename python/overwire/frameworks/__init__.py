"""Makes and describes torch tensors, numpy arrays and plain bytes."""
