"""Other libraries' names over overwire's verbs, one module each.

Each translates names and nothing more: `overwire.compat.nyacomp`.
"""
