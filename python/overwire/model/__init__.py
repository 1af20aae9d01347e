"""An opened model: its sources, table, selection, plan, and loads of it."""
