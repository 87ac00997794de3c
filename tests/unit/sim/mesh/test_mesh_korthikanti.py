"""Activations of a GPT's layer against the formulas of Korthikanti et al. 2022 (arXiv 2205.05198), section 4.

The 22B model of their table 3: bytes that a layer keeps for backward, as the difference that two layers more make.
"""

from typing import Any

import pytest

from benchmarks.published.gpt import GPTConfig, GPTSpec
from benchmarks.published.step import PublishedRecipe
from hyper_parallel import ParallelDims
from sim import mesh

SEQ, BATCH, WIDTH, HEADS = 2048, 4, 6144, 64
TOKENS = SEQ * BATCH * WIDTH
SCORES = 5 * HEADS * SEQ / WIDTH
"""Bytes of scores, softmax, its mask and what dropout leaves, in units of seq * batch * width."""


def kept_by_a_layer(tp: int, sequence_parallel: bool, **options: Any) -> float:
    """Return bytes in units of seq * batch * width."""
    sizes = []
    for layers in (2, 4):
        config = GPTConfig(
            vocab_size=51200,
            hidden_size=WIDTH,
            num_hidden_layers=layers,
            num_attention_heads=HEADS,
            max_seq_len=SEQ,
            dropout=0.1,
            attention_dropout=0.1,
        )
        recipe = PublishedRecipe().having(
            param_dtype="bf16", level=0, sequence_parallel=sequence_parallel, loss="compiled", **options
        )
        dims = ParallelDims(tp=tp, world_size=tp)
        est = mesh.estimate(GPTSpec.of(config), dims, batch=BATCH, seq_len=SEQ, hardware="a100-80gb", recipe=recipe)
        sizes.append(est.memory.fullest.by_category["activations"])
    return (sizes[1] - sizes[0]) / 2 / TOKENS


@pytest.mark.tier("full", each=6)
@pytest.mark.parametrize("attention", ["math", "math-recomputed"])
@pytest.mark.parametrize(("tp", "sequence_parallel"), [(1, False), (8, False), (8, True)])
def test_a_layer_keeps_what_the_formulas_say(tp, sequence_parallel, attention):
    scores = SCORES if attention == "math" else 0.0  # selective recomputation: equation 6
    if tp == 1:
        formula = 34 + scores  # equation 1
    elif not sequence_parallel:
        formula = 10 + 24 / tp + scores / tp  # equation 2
    else:
        formula = (34 + scores) / tp  # equation 4, where inputs of split layers are gathered again in backward
        again = kept_by_a_layer(tp, sequence_parallel, attention=attention, reshard_inputs=True)
        assert again == pytest.approx(formula, rel=3e-3)
        formula += 4 * (1 - 1 / tp)  # kept, as torch's sequence parallelism keeps them: two of two bytes, less a part
    assert kept_by_a_layer(tp, sequence_parallel, attention=attention) == pytest.approx(formula, rel=3e-3)


@pytest.mark.tier("full")
@pytest.mark.parametrize(("tp", "sequence_parallel"), [(1, False), (8, True)])
def test_full_recomputation_keeps_the_input_of_a_layer(tp, sequence_parallel):
    kept = kept_by_a_layer(tp, sequence_parallel, checkpointing="full")
    assert kept == pytest.approx(2 / tp, rel=1e-3)
