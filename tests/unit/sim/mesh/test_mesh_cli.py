"""The commands of the mesh simulator as a new user tries them: what they print, and one message for every mistake."""

from __future__ import annotations

import importlib
import io
import json
import re
import signal
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import warm
from mesh_fakes import fake_estimate
from rich.console import Console
from typer.testing import CliRunner

import sim.mesh.pricing.measure  # noqa: F401
from hyper_parallel import cli
from hyper_parallel.cli.estimate import arranged_run
from hyper_parallel.core.machine.description import find_machine, machine_names
from hyper_parallel.core.mesh.parallel_dims import ParallelDims
from hyper_parallel.trainer.config import Config, ParallelConfig, TrainConfig, config_text, load_config
from hyper_parallel.trainer.report import prediction_table, read_log
from sim.mesh.job import Job
from sim.mesh.models import find_model
from sim.mesh.pricing.measure import cpu_name
from sim.mesh.recipe import Recipe, Routing
from sim.mesh.searching.space import Candidate

LLAMA = ("--model", "llama3-8b", "--hardware", "h100-sxm")
SEARCH = (*LLAMA, "--devices", "64", "--batch-size", "128", "--seq-len", "8192", "--precision", "bf16")

OWN = """
import torch
from torch import nn

from hyper_parallel.models.llama import LlamaConfig
from sim import mesh


def mlp():
    return mesh.Custom(
        lambda: nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)),
        lambda batch, seq_len: torch.zeros(batch, seq_len, 8),
        name="mlp",
    )


def small():
    return LlamaConfig(num_hidden_layers=2)


def made():
    return nn.Linear(4, 4)
"""


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    Path("own_model.py").write_text(OWN)
    return tmp_path


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Put closed forms in the place of estimates; return what they were asked for."""
    calls: list[dict[str, Any]] = []

    def remembering(**given: Any) -> Any:
        calls.append(given)
        return fake_estimate(**given)

    def of_a_job(job: Any, hardware: Any) -> Any:
        return remembering(
            model=job.model, dims=job.dims, batch=job.batch, seq_len=job.seq_len, hardware=hardware, recipe=job.recipe
        )

    monkeypatch.setattr(sys.modules["sim.mesh.estimate"], "estimate", remembering)
    monkeypatch.setattr(sys.modules["sim.mesh.estimate"], "estimate_job", of_a_job)
    monkeypatch.setattr(importlib.import_module("sim.mesh.searching.search"), "Floors", lambda *given: None)
    return calls


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli.app, arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


# estimate


@pytest.mark.tier("test")
def test_options_become_the_step_of_a_run(asked: list[dict[str, Any]]) -> None:
    degrees = ("--devices", "128", "--tp", "8", "--pp", "4", "--dp-replicate", "2", "--batch-size", "64")
    run = ("--checkpointing", "full", "--no-reshard-after-forward", "--schedule", "interleaved", "--compile")
    more = ("--accumulate", "8", "--precision", "bf16", "--seq-len", "8192", "--max-grad-norm", "0")
    recipe = ("--routing", "0.5", "precision.reduce_dtype=bf16")
    code, output = invoke("estimate", *LLAMA, *degrees, *run, *more, *recipe)
    assert code == 0, output
    assert len(asked) == 1
    given = asked[0]
    assert given["dims"] == ParallelDims(dp_replicate=2, dp_shard=2, tp=8, etp=8, pp=4, world_size=128)
    assert (given["model"].name, given["hardware"]) == ("llama3-8b", "h100-sxm")
    assert (given["batch"], given["seq_len"]) == (16, 8192)
    assert (
        given["recipe"].bare()
        == Recipe()
        .having(
            checkpointing="full",
            reshard_after_forward=False,
            schedule="interleaved",
            accumulate=8,
            compile=True,
            routing=Routing.zipf(0.5),
            reduce_dtype="bf16",
            max_grad_norm=0.0,
        )
        .bare()
    )
    assert "Memory of a rank, where it is fullest" in output
    assert "Time of a step" in output


@pytest.mark.tier("test")
def test_what_is_left_out_has_the_default_of_train(asked: list[dict[str, Any]]) -> None:
    assert invoke("estimate", *LLAMA, "--tp", "2", "--dp-shard", "4")[0] == 0
    assert invoke("estimate", *LLAMA, "--devices", "16")[0] == 0
    assert [given["dims"].world_size for given in asked] == [8, 16]
    assert [given["batch"] for given in asked] == [4, 1]
    assert [given["seq_len"] for given in asked] == [Config().train.seq_len] * 2
    assert all(given["recipe"].bare() == Recipe().having(param_dtype="fp32") for given in asked)


@pytest.mark.tier("test")
def test_what_does_not_fit_has_an_exit_code_of_its_own(asked: list[dict[str, Any]]) -> None:
    small, large = ("--model", "llama3-8b"), ("--model", "llama3.1-405b")
    rest = ("--hardware", "h100-sxm", "--devices", "8", "--precision", "bf16", "--json", "out.json")
    assert invoke("estimate", *small, *rest)[0] == 0
    code, output = invoke("estimate", *large, *rest)
    assert (code, "DOES NOT FIT" in output) == (cli.DOES_NOT_FIT, True)
    assert json.loads(Path("out.json").read_text())["model"] == "llama3-405b"


@pytest.mark.tier("test")
def test_a_budget_says_which_checkpointing_to_take(
    asked: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    of_a_job = sys.modules["sim.mesh.estimate"].estimate_job
    fit = importlib.import_module("sim.mesh.searching.budget").fit_job
    monkeypatch.setattr("sim.mesh.searching.budget.fit_job", lambda *given: fit(*given, of_a_job))
    rest = (*LLAMA, "--devices", "8", "--precision", "bf16", "--batch-size", "8", "--seq-len", "8192")
    code, output = invoke("estimate", *rest, "--budget", "45")
    chosen = re.search(r'the fastest within 45 GiB: --checkpointing "(.+)"', output)
    assert code == 0, output
    assert chosen is not None, output
    assert chosen[1] in {str(given["recipe"].activations) for given in asked} - {"none"}
    assert invoke("estimate", *rest, "--checkpointing", chosen[1])[0] == 0, "and it is read by the same command"
    code, output = invoke("estimate", *rest, "--budget", "1")
    assert (code, "no activation policy needs less" in output) == (cli.DOES_NOT_FIT, True)
    code, output = invoke("estimate", *rest, "--budget", "45", "--checkpointing", "full")
    assert code == cli.USER_ERROR
    assert "a budget chooses the checkpointing" in output


@pytest.mark.tier("test")
def test_the_file_that_train_reads(asked: list[dict[str, Any]]) -> None:
    run = Config().with_shape(find_model("llama-tiny").config).with_changes("parallel", {"tp": 2})
    Path("run.toml").write_text(config_text(run))
    code, output = invoke("estimate", "run.toml", "--hardware", "h200", "--devices", "4", "--seq-len", "64")
    assert code == 0, output
    assert (asked[0]["dims"].tp, asked[0]["dims"].dp_shard, asked[0]["seq_len"]) == (2, 2, 64)
    assert asked[0]["model"].name == "llama-tiny"
    assert invoke("estimate", "run.toml", "--hardware", "h200", "--model", "moe-tiny", "--num-experts", "4")[0] == 0
    assert asked[1]["model"].config.num_experts == 4


def test_in_words_with_changes_tried(asked: list[dict[str, Any]]) -> None:
    code, output = invoke(
        "estimate", *LLAMA, "--devices", "8", "--precision", "bf16", "--checkpointing", "full", "--try", "1"
    )
    assert code == 0, output
    assert "Where the time goes:" in output
    assert "What to change:" in output
    assert "Estimated" in output
    assert len(asked) == 2
    assert output.count("NVIDIA H100 SXM5") == 1, "the headline stands there once"


def test_json_to_a_file_and_to_the_terminal(asked: list[dict[str, Any]]) -> None:
    code, output = invoke("estimate", *LLAMA, "--devices", "8", "--json", "out/estimate.json")
    assert code == 0, output
    assert output.endswith("wrote out/estimate.json\n")
    code, printed = invoke("estimate", *LLAMA, "--devices", "8", "--json", "-")
    assert json.loads(printed) == json.loads(Path("out/estimate.json").read_text())


@pytest.mark.parametrize("name", ["own_model:mlp", "own_model.py:mlp", "./own_model.py:mlp"])
def test_a_model_of_ones_own(asked: list[dict[str, Any]], name: str) -> None:
    code, output = invoke("estimate", "--model", name, "--hardware", "h100-sxm", "--devices", "8")
    assert code == 0, output
    assert asked[0]["model"].name == "mlp"
    assert output.startswith("mlp on 8 x NVIDIA H100")


@pytest.mark.tier("test")
def test_a_config_of_ones_own(asked: list[dict[str, Any]]) -> None:
    assert invoke("estimate", "--model", "own_model.py:small", "--hardware", "h200")[0] == 0
    assert asked[0]["model"].num_layers == 2


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        (("--tp", "3", "--devices", "8"), ["cannot infer dp_shard: world_size=8 is not divisible by", "tp=3"]),
        (("--devices", "8", "--batch-size", "12"), ["cannot split batch_size=12", "try: batch_size = 8 or 16"]),
        (("--devices", "0"), ["cannot place the model: there must be a device at least\n  --devices 0"]),
        (("--dp-shard", "-1"), ["--devices is missing\n  try: --devices 8"]),
        (("--pp", "2", "--schedule", "1fib"), ["there is no schedule '1fib'", "try: '1f1b'"]),
        (("--routing", "99"), ["exponent is not a number from 0 to 64"]),
        (("--plot", "."), ["cannot write '.': it is a folder"]),
        (("--plot", "x" * 256), ["': File name too long"]),
        (("--json", "own_model.py/x.json"), ["own_model.py' is no folder"]),
    ],
)
def test_a_mistake_is_one_message_and_exit_code_2(arguments: tuple[str, ...], messages: list[str]) -> None:
    code, output = invoke("estimate", *LLAMA, *arguments)
    assert code == cli.USER_ERROR, output
    assert output.startswith("error: cannot ")
    assert "\n  try: " in output
    assert [message for message in messages if message not in output] == [], output
    assert "Traceback" not in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--checkpointing", "ful"), "cannot use [parallel]: there is no kind of checkpointing 'ful'"),
        (("--precision", "fp8"), "cannot use [precision]: there is no kind of param_dtype 'fp8'"),
        (("--hiden-size", "8"), "No such option: --hiden-size"),
        (("--hiden-size", "8"), "--hidden-size"),
        (("no.toml",), "cannot read the config 'no.toml': no such file"),
    ],
)
def test_a_mistake_in_the_run_reads_as_that_of_train(arguments: tuple[str, ...], message: str) -> None:
    code, output = invoke("estimate", "--hardware", "h100-sxm", *arguments)
    assert code == cli.USER_ERROR, output
    assert message in output
    assert output.partition("Error")[2] == invoke("train", *arguments)[1].partition("Error")[2]


def test_options_of_a_shape_beside_a_model_that_the_trainer_does_not_know() -> None:
    code, output = invoke(
        "estimate", "--model", "benchmarks.published.gpt:gpt_tiny", "--hardware", "h200", "--hidden-size", "8"
    )
    assert code == cli.USER_ERROR
    assert (
        "cannot estimate benchmarks.published.gpt:gpt_tiny with options of [model]: it has a shape of its own" in output
    )
    assert "given: hidden_size\n  try: leave them out" in output


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("lama3-8b", "there is no model 'lama3-8b'"),
        ("own_model.py:nothing", "own_model.py has no 'nothing'\n  functions: "),
        ("no.py:nothing", "there is no file 'no.py'\n  here: own_model.py"),
        ("no_module:nothing", "there is no module 'no_module'\n  here: own_model.py"),
        ("own_model.py:made", "it returned a Linear, and an estimate makes the model itself"),
    ],
)
def test_a_model_that_is_none(model: str, message: str) -> None:
    code, output = invoke("estimate", "--model", model, "--hardware", "h100-sxm", "--devices", "8")
    assert code == cli.USER_ERROR, output
    assert message in output
    assert "\n  try: " in output


def test_unknown_hardware() -> None:
    code, output = invoke("estimate", "--model", "llama3-8b", "--hardware", "h100")
    assert code == cli.USER_ERROR
    assert output.startswith("error: cannot find the hardware 'h100': nothing has that name\n  known: ")


@pytest.mark.tier("full")
def test_a_real_estimate_with_picture_and_trace() -> None:
    pytest.importorskip("matplotlib")
    degrees = ("--devices", "8", "--tp", "2", "--pp", "2", "--seq-len", "64", "--batch-size", "8", "--accumulate", "4")
    options = ("--explain", "--plot", "out/step.png", "--trace", "out/step.json", "--json", "out/figures.json")
    code, output = invoke("estimate", "--model", "llama-tiny", "--hardware", "a100-80gb", *degrees, *options)
    assert code == 0, output
    assert "llama-tiny on 8 x NVIDIA A100" in output
    assert "fits: " in output
    assert "Where the time goes:" in output
    assert output.endswith("wrote out/step.png\nwrote out/step.json\nwrote out/figures.json\n")
    assert Path("out/step.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads(Path("out/step.json").read_text())["traceEvents"]
    assert json.loads(Path("out/figures.json").read_text())["memory"]["fits"]


@pytest.mark.tier("test")
def test_a_real_estimate_of_a_module_of_ones_own() -> None:
    options = ("--hardware", "h200", "--devices", "4", "--seq-len", "16", "--batch-size", "32")
    code, output = invoke("estimate", "--model", "own_model.py:mlp", *options)
    assert code == 0, output
    assert output.startswith("mlp on 4 x NVIDIA H200")


# search


@pytest.mark.tier("full")
def test_a_search_prints_the_ranking(asked: list[dict[str, Any]]) -> None:
    code, output = invoke("search", *SEARCH, "--limit", "6", "--rows", "2", "--json", "found.json")
    assert code == 0, output
    assert sum(given["recipe"].parallel.tp_chunks == 1 for given in asked) == 6, "chunks of the best come on top"
    assert "Fastest first" in output
    assert "estimates: 0 of 6" in output, "progress"
    assert "Not in the ranking" in output
    found = json.loads(Path("found.json").read_text())
    assert found["complete"]
    assert 1 <= len(found["found"]) <= 6


@pytest.mark.tier("test")
def test_what_is_given_to_a_search_stays(asked: list[dict[str, Any]]) -> None:
    options = ("--tp", "4", "--checkpointing", "selective", "--reshard-after-forward", "--compile")
    assert invoke("search", *SEARCH, *options, "--limit", "4")[0] == 0
    for given in asked:
        recipe = given["recipe"]
        assert given["dims"].tp == 4
        assert (recipe.checkpointing, recipe.zero, recipe.parallel.compile) == ("selective", 3, True)


@pytest.mark.tier("test")
def test_the_best_of_a_search_is_a_run_that_is_trained(
    asked: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["hyper-parallel", "search", "run file.toml"])
    small = ["[train]", "batch_size = 16", "seq_len = 64", "[parallel]", "tp = 2  # mine", 'checkpointing = "full"']
    Path("run.toml").write_text("\n".join(small))
    options = ("--hardware", "h100-sxm", "--devices", "8", "--limit", "20", "--write", "out/best.toml")
    code, output = invoke("search", "run.toml", *options)
    assert code == 0, output
    assert output.endswith("wrote out/best.toml\n")
    text = Path("out/best.toml").read_text()
    assert re.match(
        r"# found by: hyper-parallel search 'run file.toml'\n"
        r"# on: 8 x NVIDIA H100 .*; hyper_parallel [\d.]+, \d{4}-\d\d-\d\d\n"
        r"# predicted, .*: \S+ us a step \(\S+ to \S+ us\), \S+ MiB reserved on a device \(\S+ to \S+ MiB\)\nsch",
        text,
    ), text
    assert ("tp = 2  # mine\n" in text, "beta1" in text, text.count("# found by")) == (True, False, 1)
    assert invoke("search", "out/best.toml", *options)[0] == 0
    assert Path("out/best.toml").read_text().count("# found by") == 1
    run = load_config("out/best.toml")
    assert (run.parallel.tp, run.parallel.checkpointing, run.train.batch_size) == (2, "full", 16)
    assert Job.of_run(run, 8).dims.world_size == 8
    assert {given["dims"].tp for given in asked} == {2}
    assert {given["recipe"].checkpointing for given in asked} == {"full"}
    piped = ("--pp", "2", "--layers-per-stage", "3,1", "--limit", "2", "--write", "piped.toml")
    assert invoke("search", "run.toml", "--hardware", "h100-sxm", "--devices", "8", *piped)[0] == 0
    run = load_config("piped.toml")
    assert (run.parallel.pp, run.parallel.layers_per_stage) == (2, "3,1")
    assert run.train.accumulate > 1
    assert Job.of_run(run, 8).layers_per_stage == (3, 1)


# Each sets other keys than the default of [parallel], all together all of them that a search chooses.
ARRANGED = [
    (
        "moe",
        ParallelDims(dp_shard=2, ep=2, tp=2, etp=1, world_size=8),
        {"ranks_per_node": 4, "reduce_each": True},
        None,
    ),
    (
        "moe",
        ParallelDims(dp_shard=1, ep=2, cp=2, ulysses_degree=2, fold_experts=True, world_size=4),
        {"reshard_after_forward": False},
        None,
    ),
    ("llama", ParallelDims(dp_replicate=2, dp_shard=2, cp=2, ulysses_degree=1, world_size=8), {"compile": True}, None),
    (
        "llama",
        ParallelDims(tp=2, etp=2, pp=2, world_size=4),
        {"schedule": "interleaved", "stages_per_rank": 2},
        (1, 1, 1, 1),
    ),
    ("llama", ParallelDims(tp=2, etp=2, world_size=2), {"reshard_inputs": True, "tp_chunks": 2}, None),
    ("llama", ParallelDims(dp_shard=4, world_size=4), {"muon": True, "whole_parameters": True}, None),
    ("llama", ParallelDims(), {"checkpointing": "full every 2 first 3"}, None),
]


@pytest.mark.parametrize(("model", "dims", "choices", "sizes"), ARRANGED)
def test_a_file_of_a_search_describes_all_of_its_candidate(
    model: str, dims: ParallelDims, choices: dict[str, Any], sizes: tuple[int, ...] | None
) -> None:
    run = Config(train=TrainConfig(model=model, batch_size=16, seq_len=64))
    run = replace(run, parallel=ParallelConfig(compile=choices.get("compile", False), tp=8, reduce_each=True))
    batch = 16 // dims.batch_ranks
    recipe = Recipe.of(run).having(**{"accumulate": 2, "reduce_each": False, **choices})
    candidate = Candidate(dims, recipe, batch, sizes)
    Path("best.toml").write_text(config_text(arranged_run(run, candidate)))
    job = Job.of_run(load_config("best.toml"), dims.world_size)
    assert (job.dims, job.batch, job.layers_per_stage) == (dims, batch, sizes)
    assert job.recipe.bare() == candidate.recipe.bare()
    assert job.microbatches == 2


def test_the_files_of_a_search_are_tried_with_each_key_of_two_values() -> None:
    keys = {field.name for field in fields(ParallelConfig)} - {"engine"}  # no search changes these
    found = []
    for model, dims, choices, sizes in ARRANGED:
        run = Config(train=TrainConfig(model=model, seq_len=64))
        recipe = Recipe.of(run).having(**{"accumulate": 2, **choices})
        found.append(arranged_run(run, Candidate(dims, recipe, 16, sizes)).parallel)
    assert {key for key in keys if len({getattr(each, key) for each in found}) < 2} == set()


def test_a_search_keeps_a_checkpointing_of_some_blocks(asked: list[dict[str, Any]]) -> None:
    Path("run.toml").write_text('[train]\nbatch_size = 16\nseq_len = 64\n[parallel]\ncheckpointing = "full every 2"')
    options = ("--hardware", "h100-sxm", "--devices", "2", "--limit", "2", "--write", "best.toml")
    code, output = invoke("search", "run.toml", *options)
    assert code == 0, output
    assert {g["recipe"].parallel.checkpointing for g in asked} == {"full every 2"}
    assert load_config("best.toml").parallel.checkpointing == "full every 2"


def test_a_search_of_adapters_keeps_them(asked: list[dict[str, Any]]) -> None:
    Path("run.toml").write_text("[train]\nbatch_size = 16\nseq_len = 64\n[lora]\nrank = 4")
    options = ("--hardware", "h100-sxm", "--devices", "2", "--limit", "2", "--write", "best.toml")
    assert invoke("search", "run.toml", *options)[0] == 0
    assert {given["recipe"].lora.rank for given in asked} == {load_config("best.toml").lora.rank} == {4}


def test_a_search_writes_all_that_it_was_given(asked: list[dict[str, Any]]) -> None:
    options = ("--hardware", "h100-sxm", "--devices", "2", "--limit", "2", "--write", "best.toml")
    Path("run.toml").write_text('[train]\nbatch_size = 16\nseq_len = 64\n[precision]\nparam_dtype = "bf16"')
    words = ("precision.master_dtype=bf16", "parallel.reshard_after_forward=false")
    assert invoke("search", "run.toml", *words, *options, "--routing", "0.5")[0] == 0
    assert {given["recipe"].routing for given in asked} == {Routing.zipf(0.5)}
    run = load_config("best.toml")
    assert (run.precision.master_dtype, run.parallel.reshard_after_forward) == ("bf16", False)


@pytest.mark.tier("full")
def test_chunks_that_a_search_finds_are_trained(asked: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    plain = sys.modules["sim.mesh.estimate"].estimate

    def faster_in_chunks(**given: Any) -> Any:
        made = plain(**given)
        made.time.step = made.time.step._replace(value=made.time.step.value / given["recipe"].parallel.tp_chunks)
        return made

    monkeypatch.setattr(sys.modules["sim.mesh.estimate"], "estimate", faster_in_chunks)
    small = ["[train]", "batch_size = 4", "seq_len = 16", "steps = 2", "[parallel]", "tp = 2", 'checkpointing = "none"']
    Path("run.toml").write_text("\n".join(small))
    options = ("--hardware", "h100-sxm", "--devices", "4", "--limit", "2")
    code, output = invoke("search", "run.toml", *options, "--write", "best.toml")
    assert code == 0, output
    assert "4 tp chunks" in output
    assert load_config("best.toml").parallel.tp_chunks == 4
    code, output = invoke("train", "best.toml", "--sim", "4")
    assert code == 0, output
    asked.clear()
    assert invoke("search", "run.toml", *options, "--tp-chunks", "2")[0] == 0
    assert {given["recipe"].parallel.tp_chunks for given in asked} == {2}, "what is said stays"


ROOT = Path(__file__).parents[4]
WALK = ROOT / "docs" / "training.md"


@pytest.mark.tier("full")
def test_the_walk_of_the_docs_from_a_search_to_training(monkeypatch: pytest.MonkeyPatch) -> None:
    block = WALK.read_text().partition("hyper-parallel hardware measure   ")[2].partition("```")[0]
    (_, *commands) = [line.partition("#")[0].split() for line in block.strip().splitlines()]
    assert [words[1] for words in commands] == ["search", "verify", "--nproc-per-node", "plot"]
    here = replace(find_machine("laptop-cpu"), title=f"{cpu_name()}, as measured elsewhere")
    monkeypatch.setattr(sys.modules["sim.mesh.pricing.measure"], "measure", lambda *_, **__: here)
    assert invoke("hardware", "measure")[0] == 0
    for words in commands:
        if words[0] == "torchrun":
            few = [*words[: words.index("--steps")], "--steps", "3"]
            done = warm.run([sys.executable, "-m", "torch.distributed.run", *few[1:]])
            assert done.returncode == 0, done.stderr
            assert re.search(r"^step +[\d.]+ m?s +[\d.]+ m?s +[+-]\d+ %$", done.stdout, re.MULTILINE), done.stdout
        else:
            code, output = invoke(*words[1:])
            assert code == 0, output
    assert load_config("best.toml").model.num_hidden_layers == 2
    assert [record.predicted is not None for record in read_log("out/train.jsonl")] == [True] * 3
    assert Path("out/train.png").exists()


def test_the_docs_show_what_the_walk_has_logged() -> None:
    console = Console(file=io.StringIO(), color_system=None, width=100)
    console.print(prediction_table(read_log(ROOT / "docs" / "pictures" / "walk.jsonl")))
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
    assert "\n".join(["```text", *lines, "```"]) in WALK.read_text()


@pytest.mark.tier("test")
def test_nothing_fits(asked: list[dict[str, Any]]) -> None:
    code, output = invoke("search", *SEARCH, "--memory-limit", "0.5")
    assert code == cli.DOES_NOT_FIT == 3
    assert "nothing fits into 0.5 GiB\n  closest: " in output
    assert "\n  try: about " in output


@pytest.mark.tier("full", each=2)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.usefixtures("interruptible")
def test_an_interrupted_search_prints_what_it_has(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def interrupted(**given: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            signal.raise_signal(number)
        return fake_estimate(**given)

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(sys.modules["sim.mesh.estimate"], "estimate", interrupted)
    monkeypatch.setattr(importlib.import_module("sim.mesh.searching.search"), "Floors", lambda *given: None)
    code, output = invoke("search", *SEARCH)
    assert code == cli.INTERRUPTED
    assert signal.getsignal(signal.SIGTERM) == before
    assert "Fastest first" in output
    assert "the search was interrupted: this is the best so far" in output


# hardware


def test_the_list_of_hardware() -> None:
    code, output = invoke("hardware")
    assert code == 0, output
    assert [line.split()[0] for line in output.splitlines()[1:]][: len(machine_names())] == machine_names()
    assert "…" not in output


@pytest.mark.parametrize("name", machine_names())
def test_every_description_can_be_shown(name: str) -> None:
    code, output = invoke("hardware", "show", name)
    assert code == 0, output
    assert output.startswith(f"{name}: ")
    assert "device.memory" in output
    sources = {figure.source for figure in find_machine(name).figures.values()}
    assert all(source.split()[0] in output for source in sources)


def test_hardware_that_is_not_there() -> None:
    code, output = invoke("hardware", "show", "h100-smx")
    assert code == cli.USER_ERROR
    assert "try: 'h100-sxm', or the path of a TOML file" in output


def test_measuring_writes_a_file_that_estimates_take(monkeypatch: pytest.MonkeyPatch) -> None:
    passed: list[Any] = []

    def measured(processes: int = 2, device: str | None = None, **_: Any) -> Any:
        passed.append((processes, device))
        return find_machine("laptop-cpu" if "laptop-cpu" in machine_names() else "a100-40gb")

    monkeypatch.setattr(sys.modules["sim.mesh.pricing.measure"], "measure", measured)
    code, output = invoke("hardware", "measure", "--write", "out/mine.toml", "--processes", "3", "--device", "npu")
    assert code == 0, output
    assert passed == [(3, "npu")]
    assert output == "wrote out/mine.toml; try: hyper-parallel hardware show out/mine.toml\n"
    code, output = invoke("hardware", "show", "out/mine.toml")
    assert code == 0, output
    assert "device.memory" in output


@pytest.mark.tier("test")
def test_help_names_the_commands() -> None:
    code, output = invoke("--help")
    assert code == 0
    for command in ("estimate", "search", "hardware"):
        assert command in output
