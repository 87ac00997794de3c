"""With any policy of activation memory, engine and number of ranks, training is that of one device."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from activations_kit import trained
from hypothesis import event, given, settings
from hypothesis import strategies as st

import sim
from sim.late.switch import why_not

pytestmark = [
    pytest.mark.sim,
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
    pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True:UserWarning"),
]


class Case(NamedTuple):
    """Shrinks towards one block on one rank, and nothing done to it."""

    policy: str
    engine: str
    ranks: int
    depth: int
    width: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    kind = draw(st.sampled_from(("none", "full", "selective", "alternate", "offload", "full offload")))
    words = [kind]
    if kind != "none":
        words += [f"every {n}" for n in draw(st.lists(st.integers(2, 3), max_size=1))]
        words += [f"first {n}" for n in draw(st.lists(st.integers(1, 4), max_size=1))]
    engine, ranks = draw(st.sampled_from((("none", 1), ("ours", 1), ("ours", 2), ("hsdp", 2), ("fsdp2", 2))))
    return Case(" ".join(words), engine, ranks, draw(st.integers(1, 4)), draw(st.sampled_from((8, 16))))


@settings(max_examples=max(settings.default.max_examples // 4, 1))  # each is a training on late devices
@given(cases(), st.integers(0, 2**16))
def test_training_is_that_of_one_device(case: Case, seed: int) -> None:
    event(f"{case.policy.partition(' every')[0].partition(' first')[0]} by {case.engine}")
    losses, parameters, _ = trained("cpu", "none", "none", case.depth, case.width)
    given = ("npu", case.policy, case.engine, case.depth, case.width)
    found = sim.run(trained, case.ranks, given, device="npu", seed=seed, check_races=True)
    means = torch.tensor([each[0] for each in found]).mean(dim=0).tolist()
    torch.testing.assert_close(means, losses, rtol=1e-4, atol=1e-5)
    for each in found:
        torch.testing.assert_close(each[1], parameters, rtol=1e-4, atol=1e-5)
