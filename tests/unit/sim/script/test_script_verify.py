"""`python -m sim verify`: right torchrun scripts beside their one-device form, broken ones, and what is refused."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sim.prove import evidence
from sim.script.verify import _factors, _ScriptLoop, main

pytestmark = [pytest.mark.sim, pytest.mark.tier("test")]

EXAMPLES = Path(__file__).parents[4] / "examples" / "torch_scripts"
Verify = Callable[..., tuple[int, str, str]]


@pytest.fixture
def verify(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Verify:
    """Write a script and its reference, and verify it; the exit code, and what came on both outputs."""
    monkeypatch.chdir(tmp_path)

    def verify(source: str, reference: str | None = None, *options: str, nproc: int = 2) -> tuple[int, str, str]:
        Path("script.py").write_text(textwrap.dedent(source))
        if reference is not None:
            Path("one.py").write_text(textwrap.dedent(reference))
            options = ("--reference", "one.py", *options)
        code = main(["--nproc", str(nproc), *options, "script.py"])
        out, err = capsys.readouterr()
        return code, " ".join(out.split()), err

    return verify


# -- the examples, and a fault in a copy of each -----------------------------------------------------------------------


def example(name: str, *change: str) -> str:
    source = (EXAMPLES / f"{name}.py").read_text()
    if change:
        assert source.count(change[0]) == 1
        source = source.replace(*change)
    return source


ALONE = "from script import train_alone\ntrain_alone(2)\n"
CASES = {
    "ddp": (ALONE, "DistributedDataParallel(make_model())", "make_model()", "parts of an average over ranks"),
    "fsdp2": (None, "losses = train(model, dist.get_rank(),", "losses = train(model, 0,", "input of step 1"),
    "tensor_parallel": (None, "manual_seed(step)", "manual_seed(step + dist.get_rank())", "input of step 1"),
    "moe": (ALONE, "dist.all_reduce(parameter.grad)", "pass", "parts of a sum over ranks"),
    "pipeline": (ALONE, "loss_fn=F.mse_loss)", "loss_fn=F.mse_loss, scale_grads=False)", "8 times what they should be"),
    "checkpoint": (
        None,
        "make_model(seed)",
        "make_model(seed + mesh.get_rank())",
        "0.weight: weights differ by rank before",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_examples_are_right(verify: Verify, name: str) -> None:
    code, out, _ = verify(example(name), CASES[name][0])
    assert (code, "computes what it computes on one device" in out) == (0, True), out
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.tier("full", each=2)
@pytest.mark.parametrize("name", CASES)
def test_a_fault_in_an_example_is_named(verify: Verify, name: str) -> None:
    reference, *change, words = CASES[name]
    code, out, _ = verify(example(name, *change), reference or example(name))
    assert code == 1
    assert words in out.split("verdict")[0], out


# -- what a new user does ----------------------------------------------------------------------------------------------

MODEL = """
import os, torch, torch.distributed as dist
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
x = torch.randn(8, 4)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
"""
RANKS = """
dist.init_process_group("gloo")
rank = dist.get_rank()
rows = x.chunk(dist.get_world_size())[rank]
for step in range(3):
    model(rows).square().mean().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)
    optimizer.step()
    optimizer.zero_grad()
"""
ONE = """
for step in range(3):
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_reference_without_communication(verify: Verify) -> None:
    code, out, err = verify(MODEL + RANKS, MODEL + ONE, "--steps", "3", "--all")
    assert (code, err) == (0, ""), out
    assert "2.weight of step 3 update" in out


def test_the_script_itself_takes_all_rows_as_its_only_rank(verify: Verify) -> None:
    assert verify(MODEL + RANKS)[0] == 0


def test_what_no_step_of_a_script_exercises_is_named(verify: Verify) -> None:
    masked = """
class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.spare = nn.Embedding(64, 4), nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    def forward(self, ids, mask):
        return (self.embed(ids) * mask[..., None]).sum()
model = Masked()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(2):
    model(torch.arange(40).view(5, 8), torch.ones(5, 8)).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    code, out, _ = verify(MODEL + "dist.init_process_group('gloo')" + masked)
    assert code == 0, out
    assert "rows 40 to 63 of embed.weight were never looked up: a fault there is not seen" in out
    assert "no input reaches spare: a fault there is not seen" in out
    assert "a fault may hide behind input 1: of one value" in out


def test_a_batch_that_grows_with_the_ranks_needs_a_reference(verify: Verify) -> None:
    grows = RANKS.replace("x.chunk(dist.get_world_size())[rank]", "torch.randn(4, 4) + rank")
    code, out, _ = verify(MODEL + grows)
    assert code == 1
    assert "each rank takes as many rows as one device" in out
    assert "--reference FILE" in out


def test_a_fault_of_the_second_step_alone(verify: Verify) -> None:
    late = RANKS.replace("op=dist.ReduceOp.AVG)", "op=dist.ReduceOp.AVG if step < 1 else dist.ReduceOp.SUM)")
    code, out, _ = verify(MODEL + late, MODEL + ONE)
    assert code == 1
    assert "the gradient of 2.bias of step 2: every part is 2 times what it should be" in out


def test_a_missing_reference_is_a_mistake(verify: Verify) -> None:
    code, out, err = verify(MODEL + RANKS, None, "--reference", "two.py")
    assert (code, out) == (2, "")
    assert "there is no reference 'two.py'" in err
    assert "script.py" in err


def test_a_quote_that_is_never_closed_is_a_mistake(verify: Verify) -> None:
    code, out, err = verify(MODEL + RANKS, None, "--reference", "two.py 'x")
    assert (code, out) == (2, "")
    assert err.startswith("error: cannot verify script.py: no closing quotation\n  --reference: ")
    assert "\n  try: --reference 'one_device.py" in err


def test_a_reference_that_fails_is_a_mistake(verify: Verify) -> None:
    code, _, err = verify(MODEL + RANKS, MODEL + "raise KeyError('data')")
    assert code == 2
    assert "KeyError: 'data'" in err
    assert "the reference one.py has failed on one device" in err


def test_a_script_that_needs_its_ranks_is_told_to_have_a_reference(verify: Verify) -> None:
    code, _, err = verify(MODEL + "assert os.environ['WORLD_SIZE'] == '2', 'two ranks'" + RANKS)
    assert code == 2
    assert "script.py as its only rank has failed on one device" in err
    assert "--reference FILE" in err


def test_a_script_that_takes_no_step(verify: Verify) -> None:
    by_hand = RANKS.replace("optimizer.step()", "")
    code, _, err = verify(MODEL + by_hand)
    assert code == 2
    assert "one device has made no step in script.py when it ended" in err
    code, _, err = verify(MODEL + by_hand, MODEL + ONE)
    assert code == 2
    assert "no rank has made no step" not in err
    assert "no rank has made a step in script.py when it ended" in err


def test_an_optimizer_that_calls_the_model_takes_one_step(verify: Verify) -> None:
    closure = """
def closure():
    model.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    return loss
optimizer.step(closure)
"""
    lbfgs = MODEL.replace("AdamW", "LBFGS").replace("1e-2", "0.1, max_iter=3")
    code, out, _ = verify(lbfgs + 'dist.init_process_group("gloo")' + closure, lbfgs + closure, "--all")
    assert (code, "0.weight update" in out, "of step 2" in out) == (0, True, False), out


FLAT = """
dist.init_process_group("gloo")
rank, held = dist.get_rank(), list(model.parameters())
for step in range(3):
    model(x.chunk(2)[rank]).square().mean().backward()
    copy = nn.Parameter(torch.cat([each.detach().flatten() for each in held]))
    copy.grad = torch.cat([each.grad.flatten() for each in held])
    dist.all_reduce(copy.grad, op=dist.ReduceOp.AVG)
    torch.optim.SGD([copy], lr=0.1).step()
    for each, new in zip(held, copy.detach().split([each.numel() for each in held])):
        each.data.copy_(new.view_as(each))
    model.zero_grad()
"""
BY_HAND = "copy.data -= 0.1 * copy.grad"
OVER_ALL = "torch.optim.SGD([copy], lr=0.1).step()"


@pytest.mark.tier("test", each=3)
@pytest.mark.parametrize("update", [OVER_ALL, BY_HAND])
@pytest.mark.parametrize(
    "fault",
    [
        ("", ""),
        ("    dist.all_reduce(copy.grad, op=dist.ReduceOp.AVG)\n", ""),
        ("op=dist.ReduceOp.AVG", "op=dist.ReduceOp.SUM"),
        ("each.data.copy_(", "rank or each.data.copy_("),
    ],
)
def test_an_optimizer_over_copies_is_proved_by_the_weights(verify: Verify, update: str, fault: tuple[str, str]) -> None:
    script = (MODEL + FLAT).replace(OVER_ALL, update).replace(*fault)
    code, out, err = verify(script, MODEL.replace("AdamW", "SGD").replace("1e-2", "0.1") + ONE, "--steps", "3")
    assert (code, err) == (int(fault[0] != ""), ""), out
    if fault[0].startswith("each") and update == BY_HAND:  # rank 1 never ends its first step
        assert "bug" in out
        assert "are right" not in out
        return
    assert ("weights after the step are compared, and not the gradients" in out) is (fault[0] == "")
    assert fault[0] == "" or "update: " in out.split("try:")[0]


def test_another_number_of_steps(verify: Verify) -> None:
    code, out, _ = verify(MODEL + RANKS.replace("range(3)", "range(1)"), MODEL + ONE)
    assert code == 1
    assert "one device takes 2 steps, the ranks 1, 1" in out


def test_another_model(verify: Verify) -> None:
    other = MODEL.replace("nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))", "nn.Bilinear(4, 4, 3)")
    code, _, err = verify(MODEL + RANKS, other + ONE.replace("model(x)", "model(x, x)"))
    assert code == 2
    assert "no parameter of script.py is one of one.py" in err
    assert "0.weight (6, 4)" in err


def test_an_exception_on_one_rank(verify: Verify) -> None:
    code, _, err = verify(
        MODEL + RANKS.replace("optimizer.step()", "assert rank == 0 or step < 1, 'late'; optimizer.step()")
    )
    assert code == 1
    assert "AssertionError: late" in err
    assert "rank 1 raised" in err


def test_an_exception_after_the_steps_is_not_waited_for(verify: Verify) -> None:
    code, out, _ = verify(MODEL + RANKS + "raise KeyError('later')\n", MODEL + ONE)
    assert code == 0, out


def test_parameters_of_another_name(verify: Verify) -> None:
    names = "model = nn.ModuleDict(dict(a=model[0], b=model[2]))\n"
    names += "model.forward = lambda x: model['b'](model['a'](x).tanh())\n"
    renamed = MODEL.replace("x = torch", f"{names}x = torch") + RANKS
    code, out, _ = verify(renamed, MODEL + ONE)
    assert code == 0, out
    assert "by their values, a.weight is 0.weight" in out
    unlike = renamed.replace("x = torch", "nn.init.zeros_(model['a'].weight)\nx = torch")
    code, out, _ = verify(unlike, MODEL + ONE)
    assert code == 1
    assert "0.weight: no rank has it; the ranks' a.weight stand for none" in out
    assert "try: --name '<name on the ranks>=0.weight'" in out
    code, out, _ = verify(unlike, MODEL + ONE, "--name", "a.weight=0.weight")
    assert "0.weight: every part is zero" in out


@pytest.mark.parametrize(
    ("computed", "said"),
    [
        ("model(rows.float()).float()", ""),
        ("torch.autocast('cpu', torch.bfloat16)(model)(rows)", ""),
        ("model(rows.bfloat16())", "computed in float64 where the program says bfloat16"),
    ],
)
def test_mixed_precision_is_proved_in_float64(verify: Verify, computed: str, said: str) -> None:
    script = MODEL + RANKS.replace("model(rows)", computed)
    code, out, _ = verify(script)
    assert code == 0, out
    assert said in out
    assert "in the script's own dtypes" not in out
    code, out, _ = verify(
        script.replace("op=dist.ReduceOp.AVG)", "op=dist.ReduceOp.AVG); parameter.grad *= 1 + 1e-6 * rank")
    )
    assert code == 1, out


def test_a_script_that_insists_on_its_dtype_runs_in_that(verify: Verify) -> None:
    insists = (
        "rows = rows.float()\nif rows.dtype != torch.float32: raise TypeError('another dtype')\nfor step in range(3):"
    )
    single = MODEL + RANKS.replace("for step in range(3):", insists)
    code, out, _ = verify(single)
    assert code == 0, out
    assert "in the script's own dtypes, as in float64: " in out
    code, out, _ = verify(single.replace("x.chunk", "(x * (1 + 0.01 * rank)).chunk"))
    assert code == 1


def test_what_is_compiled_runs_as_it_is_written(verify: Verify) -> None:
    code, out, err = verify(MODEL + "model = torch.compile(model)" + RANKS, MODEL + ONE)
    assert (code, err) == (0, ""), out
    assert "note: torch.compile: taken as eager" in out


def test_other_mistakes(verify: Verify) -> None:
    for options, words in (
        (("--steps", "0"), "it compares one step or more"),
        (("--name", "a"), "it takes two names and an equals sign"),
        (("--mesh", "dp=3"), "its axes are of 3 ranks"),
        (("--mesh", "dp=1"), "its axes are of 1 ranks, and there are 2"),
    ):
        code, out, err = verify(MODEL + RANKS, None, *options)
        assert (code, out) == (2, "")
        assert words in err, err
    for files, expected in ((["model ="], 1), (["pass", "model ="], 2)):  # no Python, which is said once
        code, out, err = verify(*files)
        assert (code, err.count("invalid syntax")) == (expected, 1)


def test_meshes_of_a_number_of_ranks() -> None:
    assert sorted(_factors(8)) == [(2, 2, 2), (2, 4), (4, 2), (8,)]


def test_steps_are_complete_when_every_rank_has_taken_them() -> None:
    loop: Any = SimpleNamespace(steps=[SimpleNamespace(updates={"w": 1})], initial={"w": 0})
    task: Any = SimpleNamespace(steps=1)
    assert _ScriptLoop._are_complete(task, {0: loop, 1: loop}, 2)
    assert not _ScriptLoop._are_complete(task, {0: loop}, 2)


# -- the mesh ----------------------------------------------------------------------------------------------------------

TWO_AXES = """
from torch.distributed.device_mesh import init_device_mesh
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
rows = x.chunk(2)[mesh.get_local_rank("dp")]
for step in range(2):
    model(rows).square().mean().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=mesh.get_group("tp"))
        parameter.grad /= 2
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.tier("full")
def test_axes_are_those_of_the_groups(verify: Verify, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, _ = verify(MODEL + TWO_AXES, MODEL + ONE, nproc=4)
    assert code == 1
    assert "unnamed" not in out
    assert "on dp=2, tp=2 does not compute" in out
    assert "parts of an average over dp" in out
    right = TWO_AXES.replace('get_group("tp")', 'get_group("dp")')
    assert verify(MODEL + right, MODEL + ONE, nproc=4)[0] == 0
    monkeypatch.setattr(evidence, "find_machine", lambda name: SimpleNamespace(devices_per_node=2))
    out = verify(MODEL + right, MODEL + ONE, "--mesh", "a=2,b=2", nproc=4)[1]
    assert "on a=2, b=2 computes" in out
    assert "planned for one unnamed node" in out


@pytest.mark.tier("full")
def test_faults_put_into_a_script_are_found(verify: Verify) -> None:
    code, out, _ = verify(MODEL + RANKS, MODEL + ONE, "--sensitivity")
    assert code == 0
    assert "4 of 4 faults were put in" in out
    assert "missing reduction 1 0 0" in out


@pytest.mark.parametrize("waits", [True, False])
def test_a_gradient_whose_reduction_is_never_waited_for(verify: Verify, waits: bool) -> None:
    issued = f"dist.all_reduce(parameter.grad, async_op=True){'.wait()' if waits else ''}"
    code, out, err = verify(example("moe", "dist.all_reduce(parameter.grad)", issued), ALONE)
    assert code == (0 if waits else 1)
    if waits:
        assert "computes what it computes on one device" in out
    else:
        assert "reads a buffer that all_reduce #" in err
        assert "writes and that it has not waited for" in err
        assert "touched: script.py:76" in err
