"""Proofs that a parallel program computes what the program on one device computes, rank by rank.

    verify, steps.api, training, sim.script.verify -> steps.proof
    verify -> steps.api, compare -> steps.boundaries -> steps.comparison
    steps.proof -> steps.compare -> steps.activations -> steps.comparison; steps.proof -> steps.mutants, steps.drawn
    steps.comparison -> steps.finder -> judge -> faults -> infer -> evidence
    steps.comparison -> steps.watch, steps.names, steps.updates
    steps.watch -> modes, bound, record

A program is a loop of steps: a model with a plan (`verify`), a step function (`steps.api`), a run of the trainer
(`training`) or a script. `steps.watch` records the loop on one device and on each rank. `steps.proof` is the pipeline
of a proof. `steps.comparison` is the base of two comparisons: `steps.compare` of loops, with `steps.activations` for
the boundaries of modules, and `compare` of models with a plan, with `steps.boundaries`, by the layouts that DTensors
declare. `runs` has inputs and gradients of models with a plan, `record` reads models and tensors. `modes` changes the
computation, e.g. its precision; `bound` measures rounding. `infer` finds the layouts that explain the local tensors,
`faults` the causes where none does, `judge` the verdict and its place.
"""
