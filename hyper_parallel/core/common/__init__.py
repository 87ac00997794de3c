"""Leaves that every part imports: nothing of the library, nor torch, which a command's help does without."""
