"""Test bodies on ranks of every backend.

    ranks -> backends -> processes -> rank_test
    oracle

`ranks` is the decorator, `rank_test` what a body receives, `backends` runs a body where its test asks for it,
`processes` starts and watches the processes of a backend. The hooks of the pytest plugin are
`hyper_parallel.pytest_plugin`: they import neither torch nor this package, so that a project without such tests does
not pay for them.
"""
