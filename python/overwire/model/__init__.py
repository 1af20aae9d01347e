"""Opens models: their sources, tensor tables, selections, plans, and loads."""
