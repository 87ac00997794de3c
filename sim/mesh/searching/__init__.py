"""The ways to train a model on some devices, and how to find the good ones.

search -> explore -> bounds, candidates, ranking -> space
advice
"""
