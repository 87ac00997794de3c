"""Training runs that others have published, predicted: how far off, by source, and held-out runs apart.

    __main__ -> predict, page -> compare -> rows -> conventions -> step -> megatron, replicated, losses, float8, zoo
                predict, conventions -> gpt -> zoo

A row of the table of measurements becomes a job of `sim.mesh` as its framework trains (`conventions`). What our trainer
cannot do is a `PublishedRecipe`, whose steps a `PublishedRun` builds and takes in the place of the simulator's own
(`step`); models of its own are a `sim.mesh.spec.ModelSpec` (`gpt`, `zoo`).
"""
