"""Contains the functions that users call to load, save, pin, preload and inspect models."""
