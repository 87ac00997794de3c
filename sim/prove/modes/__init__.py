"""Modes under which the models of a proof compute, the same on one device and on the ranks.

    choices -> infer, evidence
    draws -> randomness, infer, evidence, values, report, steps.names
    precision -> bound
    values -> report

`precision` computes in the dtype of the proof what asks for fewer bits, `choices` records what `topk` and its like take
and takes it again, `values` moves parameters of which all elements are equal and makes inputs of a second step, and
`draws` finds each rank's part of the random numbers that both sides share.
"""
