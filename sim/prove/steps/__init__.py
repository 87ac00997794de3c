"""Training loops of the user's own, compared step by step with one device.

    api -> compare -> names, watch
        -> drawn -> names
        -> mutants
    compare, watch -> updates

`watch` records what a loop does: calls of modules, losses, gradients, updates. `names` finds which parameter of one
device each parameter of a rank stands for, `drawn` gives ranks their shards of what they draw by themselves, `compare`
judges all, and `api` is for step functions. `updates` takes the steps of optimizers again, and `mutants` puts faults
into the communication of a program.
"""
