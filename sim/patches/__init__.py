"""Patches of Python while a world is alive; ``sim/torch_seams.py`` lists them and patches torch."""
