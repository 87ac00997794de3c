"""The ways to train a model on some devices, and how to find the good ones.

search -> explore -> candidates, floors, ranking
candidates, floors -> bounds -> space
budget
"""
