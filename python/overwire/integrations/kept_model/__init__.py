"""Stores models after an engine has processed them, and restores them.

`check_origins` checks who wrote their code, `move_tensors` extracts and restores their tensors, `describe_model`
describes everything else, and `keep_files` manages the files.
"""
