"""Leaves that every package imports; `errors` does not even import torch, so that a command's help is fast.

    checks, drawing, torch_compat -> errors
    groups -> torch only
    tables -> rich only

errors          the four parts of an error message
checks          public arguments, checked against one table of kinds
drawing         pictures, drawn with matplotlib where it is installed
groups          process groups over any set of ranks, kept as long as the default group
tables          tables for people: text, colours, HTML
torch_compat    what torch's wrappers and optimizers ask of us
"""
