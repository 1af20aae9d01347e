"""Stores models after an engine has processed them, and restores them.

`check_origins` checks where a model's code comes from, `move_tensors` extracts and restores tensors, `describe_model`
describes everything else, and `keep_files` manages the files.
"""
