"""Proofs that a parallel program computes what the program on one device computes, rank by rank.

    verify, steps.api, training, sim.script.verify -> steps.proof
    verify -> steps.api, compare -> steps.compare
    steps.proof -> steps.compare, steps.mutants, steps.drawn
    steps.compare -> judge -> faults -> infer -> evidence
    steps.compare -> steps.watch, steps.names, steps.updates
    steps.watch -> modes, bound, record

A program is a loop of steps: a model with a plan (`verify`), a step function (`steps.api`), a run of the trainer
(`training`) or a script. `steps.watch` records the loop on one device and on each rank, and `steps.proof` has the one
pipeline of a proof. `steps.compare` compares the records; `compare` does so for models with a plan, call by call, with
the layouts that their DTensors declare. `runs` has inputs and gradients of models with a plan, `record` what is read of
models and tensors. `modes` has what is computed otherwise than the program says, `bound` how far rounding can move it.
`infer` finds the layouts that explain the local tensors, `faults` the causes where none does, `judge` the verdict and
its place.
"""
