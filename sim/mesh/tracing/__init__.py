"""The step of one rank, recorded from the real model, plan and engine on a rank that lives alone.

    trace -> build, categories, fusion, kernels, stitch
    categories -> build -> compiled, record
    record -> kinds, lone
    compiled -> fusion, kinds

`trace` runs the kinds of stages and has `stitch` put all ranks' programs together. `build` makes a stage, and `record`
writes down what it does.
"""
