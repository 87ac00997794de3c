"""Training of a model: `loop.train` is the one function that every rank calls.

    loop -> preflight, saving, optimizer, watchdog, metrics, report
    loop -> parallelize_llama -> parallelize -> data, config
    preflight -> saving, report, metrics
    saving -> parallelize, guards
    optimizer -> parallelize
    watchdog -> guards -> config

`config` is what a run is asked to do. `preflight` refuses what cannot work, before any rank starts. `parallelize_llama`
applies the parallelisms in their order, `loop` takes the steps, `saving` keeps them, and `report` shows them. `guards`
and `watchdog` end a run that cannot go on.
"""
