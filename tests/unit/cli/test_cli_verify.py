"""`hyper-parallel verify`: right and wrong plans, exit codes, and one message for every mistake."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hyper_parallel import cli
from hyper_parallel.cli.subject import llama_subject
from hyper_parallel.core.shard.plan_file import load_plan, plan_text
from hyper_parallel.models import LlamaConfig, llama_plan

pytestmark = pytest.mark.tier("test")

SMALL = ("--mesh", "tp=2", "--seq-len", "4")
OWN = """
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

def build():
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))

def tensor_parallel(model, mesh):
    return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})

def forgetful(model, mesh):  # the second layer's sum is not taken
    for index, dim in ((0, 0), (2, 1)):
        part = model[index].weight.detach().chunk(2, dim)[mesh.get_local_rank()].clone()
        model[index].weight = nn.Parameter(part)
    model[0].bias = nn.Parameter(model[0].bias.detach().chunk(2)[mesh.get_local_rank()].clone())
    model[2].bias.data.div_(2)
    return model

def loss(output, x):
    return (output - x).square().mean()

def biased(output, x):  # of the values alone: backward sees half of it
    return loss(output, x) / 2 + loss(output, x).detach() / 2

def momentum(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)

def unlike(params):  # a rate of its own on each rank
    import os
    return torch.optim.SGD(params, lr=0.1 + float(os.environ.get("RANK", 0)))

three = 3
"""


def invoke(*words):
    result = CliRunner().invoke(cli.app, ["verify", *words])
    return result.exit_code, result.output


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A module of the user's own in the working folder; its name is new each time, as Python keeps modules."""
    name = f"own_{abs(hash(str(tmp_path)))}"
    (tmp_path / f"{name}.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    return name


@pytest.fixture
def edited(tmp_path):
    """Return a function that changes a line of the shipped plan."""

    def edit(old, new):
        code, text = invoke(*SMALL, "--show-plan")
        assert code == 0
        assert text.count(f"\n{old}\n") == 1, text
        path = tmp_path / "plan.toml"
        path.write_text(text.replace(f"\n{old}\n", f"\n{new}\n"))
        return str(path)

    return edit


# Right and wrong


def test_a_loss_and_an_optimizer_of_ones_own(own):
    words = ("--model", f"{own}:build", "--input", "3,4", "--mesh", "tp=2", "--parallelize", f"{own}:tensor_parallel")
    code, output = invoke(*words, "--loss", f"{own}:loss", "--optimizer", f"{own}:momentum", "--steps", "2", "--all")
    assert code == 0, output
    assert re.search(r"^2\.weight after step 2 +update|^2\.weight.* update", output, re.MULTILINE), output
    code, output = invoke(*words, "--optimizer", f"{own}:unlike")
    assert code == cli.FAILURE
    assert re.search(r"^  update: ", output, re.MULTILINE), output
    code, output = invoke(*words, "--loss", f"{own}:lost")
    assert code == cli.USER_ERROR
    assert "has no 'lost'" in output
    for option, argument, wrong in (("--loss", "loss_fn", "momentum"), ("--optimizer", "optimizer_fn", "loss")):
        code, output = invoke(*words, option, f"{own}:{wrong}")
        assert code == cli.USER_ERROR, output
        assert f"error: cannot verify a plan: {argument} raises TypeError on one device: " in output
        assert f"\n  {argument}: {wrong}\n  try: " in output
    code, output = invoke("--tp", "2", "--loss", f"{own}:loss")
    assert code == cli.USER_ERROR
    assert "it is about a plan, and a run has its own" in output


@pytest.mark.parametrize("tp", [1, 3, 5])
def test_sizes_of_the_llama_divide_by_the_degree(tp):
    model = llama_subject(f"tp={tp}").model_fn()
    sizes = {size for parameter in model.parameters() for size in parameter.shape if size != model.config.vocab_size}
    assert all(size % tp == 0 for size in sizes)
    assert model.config.intermediate_size == 3 * model.config.hidden_size


def test_the_shipped_plan_is_right():
    code, output = invoke(*SMALL)
    assert code == 0, output
    assert output.startswith("Llama, ")
    assert "\n2 simulated ranks on tp=2 beside one device, in float64 ...\n" in output
    assert "\nthe model on tp=2 computes what it computes on one device: " in output
    assert "layers.0" not in output


def test_all_tensors_on_request_and_in_float32():
    code, output = invoke(*SMALL, "--all", "--dtype", "float32", "--no-sequence-parallel")
    assert code == 0, output
    assert "in float32 ..." in output
    assert len(re.findall(r"^layers.*weight.*gradient", output, re.MULTILINE)) == 18


def test_the_plan_shown_is_the_plan_that_is_read(tmp_path):
    code, text = invoke("--show-plan")
    assert code == 0
    assert text == plan_text(llama_plan(LlamaConfig(num_key_value_heads=4), "dp=2,tp=4"), "dp=2,tp=4")
    path = tmp_path / "plan.toml"
    path.write_text(text)
    assert plan_text(load_plan(path, "dp=2,tp=4"), "dp=2,tp=4") == text
    assert invoke("--show-plan", "--plan", str(path)) == (0, text)
    assert "tp,None" not in invoke("--show-plan", "--no-sequence-parallel")[1].partition("[input_plan]")[2]


def test_a_sum_that_is_forgotten_is_named(edited):
    path = edited('"layers.*.mlp" = "; tp=sum"', '"layers.*.mlp" = "None"')
    code, output = invoke(*SMALL, "--plan", path)
    assert code == cli.FAILURE, output
    assert "does not compute what it computes on one device" in output
    assert re.search(r"^ *\S*.*layers\.0\.mlp\.output", output, re.MULTILINE), output


@pytest.mark.tier("full")
def test_the_page_shows_what_the_command_prints(tmp_path):
    page = (Path(__file__).resolve().parents[3] / "docs" / "verify.md").read_text()
    commands, shown = re.search(
        r"```console\n(hyper-parallel verify --show-plan.*?)```\n\n```text\n(.*?)```", page, re.DOTALL
    ).groups()
    old, new = re.search(r"sed -i 's/\^(.*?)/(.*?)/'", commands).groups()
    plan = tmp_path / "plan.toml"
    plan.write_text(invoke("--show-plan")[1].replace(f"\n{old}\n", f"\n{new}\n"))
    code, output = invoke("--plan", str(plan))
    assert code == cli.FAILURE, output
    cause = re.compile(r"^  forward: .*?^    try: .*?$", re.MULTILINE | re.DOTALL)
    promised, printed = (re.sub(r"[0-9.]+(e[+-][0-9]+)?", "N", cause.search(text)[0]) for text in (shown, output))
    assert printed == promised


def test_a_plan_on_which_ranks_raise_names_the_module(edited):
    path = edited('"layers.*.attention.wo.weight" = "None,tp"', '"layers.*.attention.wo.weight" = "tp,None"')
    code, output = invoke(*SMALL, "--plan", path)
    assert code == cli.FAILURE, output
    assert "layers.0.attention.wo" in output
    assert "Traceback" not in output


def test_a_model_of_one_s_own(own):
    usual = ("--model", f"{own}:build", "--input", "3,4", "--mesh", "tp=2")
    code, output = invoke(*usual, "--parallelize", f"{own}:tensor_parallel")
    assert code == 0, output
    assert f"{own}:build, {own}:tensor_parallel\ninputs: 3 x 4 float64\n" in output
    code, output = invoke(*usual, "--parallelize", f"{own}:forgetful")
    assert code == cli.FAILURE, output
    assert "parts of a sum over tp" in output


def test_a_plan_is_compared_over_as_many_steps_as_asked(own):
    words = ("--model", f"{own}:build", "--input", "3,4", "--mesh", "tp=2", "--parallelize", f"{own}:tensor_parallel")
    code, output = invoke(*words, "--steps", "2", "--all")
    assert code == 0, output
    assert "0.weight after step 2" in output
    code, output = invoke(*words, "--steps", "0")
    assert code == 2, output
    assert "steps" in output


def test_a_model_of_one_s_own_with_a_plan(own, tmp_path):
    (tmp_path / "plan.toml").write_text(
        '[plan]\n"0.weight" = "tp,None"\n"0.bias" = "tp"\n"2.weight" = "None,tp"\n"2.bias" = "None"\n'
        '[input_plan]\ninput = "dp,None"\n[output_plan]\noutput = "dp,None"\n'
    )
    usual = ("--model", f"{own}:build", "--mesh", "dp=2,tp=2", "--plan", "plan.toml", "--input", "4,4")
    code, output = invoke(*usual)
    assert code == 0, output
    assert "inputs: 4 x 4 float64\n" in output
    code, output = invoke(*usual, "--input-layout", "tp,None")  # brought to the plan's layout
    assert code == 0, output
    assert "inputs: 4 x 4 float64 as tp,None\n" in output


def test_a_model_that_fails_on_one_device_shows_where(own):
    words = ("--model", f"{own}:build", "--input", "3,5", "--mesh", "tp=2", "--parallelize", f"{own}:tensor_parallel")
    code, output = invoke(*words)
    assert code == cli.USER_ERROR
    assert "mat1 and mat2 shapes cannot be multiplied (3x5 and 4x8)" in output
    assert "in module '0'" in output
    assert "try: inputs that the model takes" in output


# Mistakes


@pytest.mark.parametrize(
    ("words", "messages"),
    [
        (["--mesh", "dp=2,tp"], ["cannot read a mesh: 'tp' has no '='", "try: tp=2"]),
        (["--mesh", "dp=2,pt=4"], ["tp='tp' is no axis of the mesh", "try: tp='pt'"]),
        (["--seq-len", "0"], ["--seq-len is below 1", "try: --seq-len 4"]),
        (["--dtype", "int32"], ["models do not compute in int32", "try: float64"]),
        (["--dtype", "flaot32"], ["no dtype is called 'flaot32'", "try: 'float32'"]),
        (["--plan", "nowhere/plan.toml"], ["no such file", "try: hyper-parallel verify --show-plan"]),
        (["--input-layout", "dq"], ["no axis is called 'dq'", "try: 'dp'"]),
        (["--input-layout", "dp", "--input-layout", "dp"], ["there are 2 of them for 1 input"]),
        (["--input", "3,4"], ["--input is for a model of your own", "or --seq-len"]),
        (["--parallelize", "a:b"], ["--parallelize is for a model of your own"]),
        (["--model", "lama"], ["--model lama: it is not of the form module:function, and not 'llama'"]),
        (["--model", "OWN:build"], ["neither of --plan and --parallelize given", "try: --plan plan.toml"]),
        (["--model", "OWN:build", "--parallelize", "OWN:forgetful"], ["no --input says what", "try: --input 4,16"]),
        (["--model", "OWN:biuld"], ["has no 'biuld'", "functions: build, tensor_parallel, forgetful", "OWN:build"]),
        (["--model", "OWN:three"], ["OWN:three: 'three' cannot be called", "try: one of 'build', 'tensor_p"]),
        (["--model", "own.py:build"], ["there is no file 'own.py'", "here: OWN.py", "try: its path"]),
        (["--model", "nowhere.at.all:x"], ["there is no module 'nowhere'", "try: a module that is there"]),
        (["--model", "OWN:build", "--parallelize", "OWN:forgetful", "--input", "4,4:x"], ["'x' is no whole number"]),
        (["--model", "OWN:build", "--parallelize", "OWN:forgetful", "--input", "4,k"], ["cannot read a shape"]),
        (
            ["--model", "OWN:build", "--parallelize", "OWN:forgetful", "--input", "4,4", "--show-plan"],
            ["cannot --show-plan: --parallelize makes the model parallel"],
        ),
    ],
)
def test_a_mistake_is_one_message_and_exit_code_2(own, words, messages):
    code, output = invoke(*(word.replace("OWN", own) for word in words))
    assert code == cli.USER_ERROR, output
    assert output.startswith("error: ")
    assert "\n  try: " in output
    assert [message for message in messages if message.replace("OWN", own) not in output] == [], output
    assert "Traceback" not in output


def test_a_plan_for_another_model_is_a_mistake(own, tmp_path):
    (tmp_path / "plan.toml").write_text('[plan]\n"0.wieght" = "tp,None"\n')
    code, output = invoke("--model", f"{own}:build", "--mesh", "tp=2", "--plan", "plan.toml", "--input", "4,4")
    assert code == cli.USER_ERROR, output
    assert "'0.wieght' is no parameter of the model" in output
    assert "try: '0.weight'" in output


def test_a_degree_that_no_plan_uses_is_refused():
    code, output = invoke("--mesh", "dp=2,tp=2,pp=2", *SMALL[2:])
    assert code == 2
    assert output == (
        "error: cannot verify the llama: no plan of the llama uses pp: it would split the batch over pp\n"
        "  --mesh dp=2,tp=2,pp=2\n"
        "  try: hyper-parallel verify --devices 8 --tp 2 --pp 2, which proves the run of these degrees\n"
    )


# Runs


def test_a_run_is_proved_by_the_options_of_train(tmp_path):
    (tmp_path / "run.toml").write_text("[model]\nhidden_size = 256\n[train]\nbatch_size = 32\n")
    code, output = invoke(str(tmp_path / "run.toml"), "--devices", "32", "--dp-replicate", "2", "--all")
    assert code == 0, output
    assert output.startswith("a run on 32 ranks: dp_replicate=2 x dp_shard=16: two steps on simulated ranks ")
    assert "the model on dp_replicate=2, dp_shard=2 computes what it computes on one device: " in output
    assert "note: reduced: dp_shard 16 -> 2, param_dtype fp32 -> fp64, hidden_size 256 -> 8" in output
    assert "layers.0.attention.wq.weight of step 2 " in output


def test_what_is_of_a_run_and_what_is_of_a_plan_do_not_mix():
    code, output = invoke("--tp", "2", "--mesh", "tp=2", "--show-plan")
    assert code == 2
    assert output == (
        "error: cannot verify a run with --mesh, --show-plan: it is about a plan, and a run has its own\n"
        "  of a run: tp   of a plan: --mesh, --show-plan\n"
        "  try: one of the two\n"
    )
    code, output = invoke("--pp", "3")
    assert code == 2, output
