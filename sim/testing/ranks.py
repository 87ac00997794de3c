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

from sim.explain.callables import check_body
from sim.testing.rank_test import RankTest

__all__ = ["ARMS", "RankTest", "ranks"]

ARMS = ("sim", "gloo", "gpu", "npu")


def ranks(
    world_size: int, *, arms: tuple[str, ...] = ARMS, check_races: bool = False, check_replicas: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Run the decorated body ``fn(ctx, ...)`` on ``world_size`` ranks, once per arm.

    ::

        @sim.ranks(4)
        def test_sum(ctx):
            x = torch.ones(1, device=ctx.device)
            dist.all_reduce(x)
            assert x.item() == ctx.world_size

    Further parameters are fixtures or ``parametrize`` arguments, as usual; each rank gets them (on the arms with
    processes, a pickled copy). With ``arms=("sim",)``, a method can be a body; its ranks share the instance.

    Args:
        world_size: Number of ranks, at least 1.
        arms: Which arms to make, of ``sim``, ``gloo``, ``gpu``, ``npu``.
        check_races: As in :func:`sim.world`; on the ``sim`` arm only.
        check_replicas: As in :func:`sim.world`; on the ``sim`` arm only.

    Raises:
        ValueError: A world size below 1 or an unknown arm.
        TypeError: A body that takes no argument, is a method on an arm with processes, or of which a call runs nothing:
            a coroutine function or a generator function.
    """
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise ValueError(f"cannot run a test on {world_size!r} ranks\n  world_size: an int >= 1\n  try: @sim.ranks(4)")
    unknown = [arm for arm in arms if arm not in ARMS]
    if unknown or not arms:
        raise ValueError(
            f"cannot run a test on the arms {arms!r}\n  known: {', '.join(ARMS)}\n  try: arms=('sim', 'gloo')"
        )

    def decorate(body: Callable[..., Any]) -> Callable[..., None]:
        own = list(inspect.signature(body).parameters.values())
        owner = own[:1] if own and own[0].name == "self" else []
        if len(own) == len(owner):
            start = "self, " if owner else ""
            raise TypeError(f"{body.__name__} takes no argument\n  try: def {body.__name__}({start}ctx): ...")
        elsewhere = [arm for arm in arms if arm != "sim"]
        if owner and elsewhere:
            raise TypeError(
                f"{body.__qualname__} is a method; the processes of an arm could not find it\n"
                f"  arms: {', '.join(elsewhere)} start processes\n"
                f"  try: arms=('sim',), or a function of the module: def {body.__name__}(ctx): ..."
            )
        check_body(body)

        def function(request: pytest.FixtureRequest, rank_arm: str, **fixtures: Any) -> None:
            from sim.testing.backends import run_body

            __tracebackhide__ = True
            run_body(rank_arm, test, world_size, fixtures, request)

        def method(self: Any, request: pytest.FixtureRequest, rank_arm: str, **fixtures: Any) -> None:
            from sim.testing.backends import run_body

            __tracebackhide__ = True
            run_body(rank_arm, test, world_size, fixtures, request, owner=self)

        test: Callable[..., None] = method if owner else function
        test.__name__ = body.__name__
        test.__qualname__ = body.__qualname__
        test.__doc__ = body.__doc__
        test.__module__ = body.__module__
        test.body = body  # type: ignore[attr-defined]
        test.checks = check_races, check_replicas  # type: ignore[attr-defined]
        test.rank_arms = tuple(arms)  # type: ignore[attr-defined]
        test.pytestmark = list(getattr(body, "pytestmark", []))  # type: ignore[attr-defined]
        keyword = inspect.Parameter.KEYWORD_ONLY
        test.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            owner
            + [inspect.Parameter(name, keyword) for name in ("request", "rank_arm")]
            + [parameter.replace(kind=keyword) for parameter in own[len(owner) + 1 :]]
        )
        cases = [pytest.param(arm, marks=getattr(pytest.mark, arm), id=arm) for arm in arms]
        return pytest.mark.parametrize("rank_arm", cases)(test)

    return decorate
