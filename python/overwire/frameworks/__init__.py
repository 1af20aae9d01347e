"""Makes and describes tensors of torch and numpy, and plain bytes."""
