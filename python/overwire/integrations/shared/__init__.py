"""What the integrations share: loads of a model by slices, models as an engine holds them, new weights.

A load by slices: `recording` finds out what a model's own loader copies where, `copies` says it,
`sheets` are the files that it opens, `slices` is the load. A model as an engine holds it after its
processing: `origins` says whose code it is, `parts` takes its tensors out and puts them back,
`described` is all else that it holds, `prepared` the files. New weights into a model that runs: `updates`.
"""
