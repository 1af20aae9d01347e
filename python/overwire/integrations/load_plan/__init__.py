"""Loads a model by slices: records the copies that the model's own loader makes, and loads exactly these, each once.

`record_copies` finds out where a model's loader copies each part, `copies` describes the copies, `open_files` opens the
files, `run_plan` runs the load, and `update_weights` loads new weights into a running model.
"""
