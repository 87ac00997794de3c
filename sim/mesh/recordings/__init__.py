"""Recordings that are kept, and those of other sizes that follow from them.

library -> derive
"""
