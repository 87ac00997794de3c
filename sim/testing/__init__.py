"""Test bodies on ranks of every backend.

    ranks -> backends -> processes

`ranks` is the decorator and what a body receives, `backends` runs a body where its test asks for it, `processes`
starts and watches the processes of a backend. The hooks of the pytest plugin are `hyper_parallel.pytest_plugin`: they
import neither torch nor this package, so that a project without such tests does not pay for them.
"""
