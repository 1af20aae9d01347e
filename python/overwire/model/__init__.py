"""Opens models, and selects and loads their tensors."""
