"""The decorator of test bodies that run on ranks, and what such a body receives.

`@sim.ranks(4)` turns a body into a test for each backend: simulated ranks, gloo processes, GPUs and NPUs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

try:
    import pytest
except ImportError as missing:
    raise ImportError(
        "sim.ranks needs pytest, which is not installed\n  try: pip install 'hyper_parallel[test]'"
    ) from missing

from typing_extensions import Unpack

from hyper_parallel.core.common.checks import check_choice, read_int
from hyper_parallel.core.common.errors import InvalidType
from sim.explain.callables import check_body
from sim.testing.rank_test import RankTest
from sim.world import Checks, check_options, show_options

__all__ = ["BACKENDS", "RankTest", "ranks"]

BACKENDS = ("sim", "gloo", "gpu", "npu")


def ranks(
    world_size: int, *, backends: tuple[str, ...] = BACKENDS, **checks: Unpack[Checks]
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Run the decorated body `fn(ctx, ...)` on `world_size` ranks, once per backend.

    ::

        @sim.ranks(4)
        def test_sum(ctx):
            x = torch.ones(1, device=ctx.device)
            dist.all_reduce(x)
            assert x.item() == ctx.world_size

    Further parameters are fixtures or `parametrize` arguments, as usual; each rank gets them (on the backends with
    processes, a pickled copy). With `backends=("sim",)`, a method can be a body; its ranks share the instance.

    Args:
        world_size: Number of ranks, at least 1.
        backends: Which backends to make, of `sim`, `gloo`, `gpu`, `npu`.
        **checks: `machine`, `check_races` and `check_replicas` as in `sim.world`; on the `sim` backend only.

    Raises:
        ValueError: A world size below 1 or an unknown backend.
        TypeError: A world size that is no int; an option that there is not; a body that takes no argument, is a method
            on a backend with processes, or of which a call runs nothing: a coroutine function or a generator function.
    """
    asked = "cannot run a test on several ranks"
    read_int(asked, "world_size", world_size, 1, "@sim.ranks(4)")
    check_options(asked, checks, ["backends", *Checks.__annotations__])
    for backend in backends or ("",):
        check_choice(asked, "backend", backend, BACKENDS, "backends=('sim', 'gloo')")

    def decorate(body: Callable[..., Any]) -> Callable[..., None]:
        own = list(inspect.signature(body).parameters.values())
        owner = own[:1] if own and own[0].name == "self" else []
        if len(own) == len(owner):
            start = "self, " if owner else ""
            asked, seen = f"cannot make ranks of {body.__name__}", f"seen: def {body.__name__}({start.rstrip(', ')})"
            raise InvalidType(asked, "it takes no argument", seen, f"def {body.__name__}({start}ctx): ...")
        elsewhere = [backend for backend in backends if backend != "sim"]
        if owner and elsewhere:
            blame = "it is a method, which the processes of a backend could not find"
            seen = f"backends: {', '.join(elsewhere)} start processes"
            hint = f"backends=('sim',), or a function of the module: def {body.__name__}(ctx): ..."
            raise InvalidType(f"cannot make ranks of {body.__qualname__}", blame, seen, hint)
        check_body(body)

        def function(request: pytest.FixtureRequest, rank_backend: str, **fixtures: Any) -> None:
            from sim.testing.backends import run_body

            __tracebackhide__ = True
            run_body(rank_backend, test, world_size, fixtures, request)

        def method(self: Any, request: pytest.FixtureRequest, rank_backend: str, **fixtures: Any) -> None:
            from sim.testing.backends import run_body

            __tracebackhide__ = True
            run_body(rank_backend, test, world_size, fixtures, request, owner=self)

        test: Callable[..., None] = method if owner else function
        test.__name__ = body.__name__
        test.__qualname__ = body.__qualname__
        test.__doc__ = body.__doc__
        test.__module__ = body.__module__
        test.body = body  # type: ignore[attr-defined]
        test.checks = checks  # type: ignore[attr-defined]
        test.rank_backends = tuple(backends)  # type: ignore[attr-defined]
        test.pytestmark = list(getattr(body, "pytestmark", []))  # type: ignore[attr-defined]
        keyword = inspect.Parameter.KEYWORD_ONLY
        test.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            owner
            + [inspect.Parameter(name, keyword) for name in ("request", "rank_backend")]
            + [parameter.replace(kind=keyword) for parameter in own[len(owner) + 1 :]]
        )
        cases = [pytest.param(backend, marks=getattr(pytest.mark, backend), id=backend) for backend in backends]
        return pytest.mark.parametrize("rank_backend", cases)(test)

    return decorate


show_options(ranks, Checks)
