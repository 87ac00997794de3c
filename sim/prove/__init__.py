"""Proofs: which layout explains what the ranks hold, how far rounding can move it, and where a parallel model errs."""
