"""Shares code between integrations: loads by slices, models as an engine holds them, new weights.

Load by slices: `recording` finds out where a model's loader copies each part, `copies`
describes the copies, `sheets` opens the files, and `slices` runs the load. Models as an engine
holds them after processing: `origins` checks who wrote their code, `parts` takes their tensors
out and puts them back, `described` describes everything else, `prepared` has the files. New
weights for a running model: `updates`.
"""
