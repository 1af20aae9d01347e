"""Any Python object with tensors in it, as a small pickle and one container beside it."""
