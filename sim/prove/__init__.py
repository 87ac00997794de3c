"""Proofs that a parallel program computes what the program on one device computes, rank by rank.

    verify, steps.api, training, sim.script.verify -> steps.proof
    steps.proof -> steps.compare, steps.mutants, steps.drawn
    verify -> compare -> judge -> faults -> infer -> evidence
    verify, compare -> runs -> record, randomness
    runs -> bound, modes
    modes -> infer, bound, record, report
    steps.compare -> judge, steps.watch, steps.names, steps.updates

`steps.proof` has the one pipeline of a proof. A program is a model with a plan (`verify`), or a loop of steps: a step
function (`steps.api`), a run of the trainer (`training`) or a script. `runs` computes a model with a plan, and `record`
what goes through its modules; `steps.watch` records a loop. `modes` has what both do otherwise than the program says,
`bound` how far rounding can move it. `infer` finds the layouts that explain the local tensors, `faults` the causes
where none does, `judge` the verdict and its place.
"""
