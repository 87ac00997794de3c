"""The ways to train a model on some devices, and how to find the good ones.

explore -> bounds, candidates, ranking -> space
ranking -> search_report
advice
"""
