"""Proofs that a parallel model computes what the model on one device computes, rank by rank.

    verify -> compare -> judge -> faults -> infer -> evidence
    verify, compare -> runs -> record, randomness
    runs -> bound, modes
    modes -> infer, bound, record, report
    judge, randomness -> report
    training -> judge, bound
    steps -> judge, infer, record, bound, modes
    verify, runs -> steps.mutants
    runs, compare, training -> steps.updates

`runs` has both runs, `modes` what they do otherwise than the program says, `record` what goes through their modules,
`bound` how far rounding can move it. `infer` finds the layouts that explain the local tensors, `faults` the causes
where none does, `judge` the verdict and its place. `training` does the same for a run of the trainer, `steps` for a
training step of one's own.
"""
