"""Contains code that several integrations share.

`recording`, `copies`, `sheets` and `slices` load a model by slices. `recording` finds out where a model's loader copies
each part, `copies` describes the copies, `sheets` opens the files, and `slices` runs the load.

`origins`, `parts`, `described` and `prepared` save and restore models after an engine has processed them. `origins`
checks who wrote their code, `parts` extracts and restores their tensors, `described` describes everything else, and
`prepared` manages the files.

`updates` loads new weights into a running model.
"""
