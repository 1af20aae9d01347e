"""The version of tensorizer whose surface this is."""

__version__ = "2.12.1"
