"""Training runs that others have published, predicted: how far off, by source, and held-out runs apart.

    __main__ -> predict, page -> compare -> rows -> conventions -> megatron, gpt
                predict -> gpt

A row of the table of measurements becomes a job of `sim.mesh` as its framework trains (`conventions`); what the
simulator does not do by itself goes through its two hooks: a model is a `sim.mesh.models.spec.ModelSpec` (`gpt`), and
what a framework does otherwise during a step is a `sim.mesh.recipe.Conventions` (`megatron`).
"""
