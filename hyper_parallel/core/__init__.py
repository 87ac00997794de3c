"""Layouts, redistribution, sharded parameters and parallel dimensions: the library below models and trainer."""
