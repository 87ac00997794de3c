"""`hyper-parallel plan`: what a person reads, and one message with exit code 2 for every mistake."""

import re

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from hyper_parallel import cli
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.machine import find_machine
from hyper_parallel.core.redistribute import lower_bound, plan, show
from hyper_parallel.core.redistribute.bounds import torch_plan

MESH = Layout((2, 4), ("dp", "tp"))
USUAL = {"--mesh": "dp=2,tp=4", "--shape": "16,8", "--from": "tp,None", "--to": "dp+tp,None"}


def invoke(*flags, **changes):
    options = {**USUAL, **{f"--{name.replace('_', '-')}": value for name, value in changes.items()}}
    options = {name.replace("--source", "--from").replace("--target", "--to"): v for name, v in options.items()}
    arguments = [word for name, value in options.items() if value is not None for word in (name, value)]
    result = CliRunner().invoke(cli.app, ["plan", *arguments, *flags])
    return result.exit_code, result.output


def output_of(*flags, **changes):
    code, output = invoke(*flags, **changes)
    assert code == 0, output
    return output


# What a person reads


def test_layouts_are_put_into_words():
    lines = output_of(shape="10,8", source="-,dp; tp=avg", target="dp+tp,-").splitlines()
    assert lines[:7] == [
        "float32 tensor of 10 x 8, 320 B",
        "from  (-, dp) pending avg over tp on dp=2, tp=4",
        "      dim 1 is split over dp; an avg over tp is still to be taken; no two ranks hold the same",
        "      rank 0 holds 10 x 4 (160 B), rank 7 holds 10 x 4 (160 B)",
        "to    (dp>tp, -) on dp=2, tp=4",
        "      dim 0 is split over dp, then tp; no two ranks hold the same",
        "      rank 0 holds 2 x 8 (64 B), rank 7 holds 0 x 8 (0 B)",
    ]


@pytest.mark.parametrize(
    ("mesh", "layout", "shape", "words", "held"),
    [
        ("dp=2,tp=4", "-,-", "4,4", "every rank holds all of it", "rank 7 holds 4 x 4 (64 B)"),
        ("dp=2,tp=4", "dp", "4", "dim 0 is split over dp; 4 ranks hold each part", "rank 7 holds 2 (8 B)"),
        ("dp=1", "dp", "4", "dim 0 is split over dp; every rank holds all of it", "rank 0 holds 4 (16 B)"),
        ("dp=2", "", "", "every rank holds all of it", "rank 0 holds no dims (4 B), rank 1 holds no dims (4 B)"),
    ],
)
def test_words_of_other_layouts(mesh, layout, shape, words, held):
    output = output_of(mesh=mesh, shape=shape, source=layout, target=layout)
    assert f"\n      {words}\n" in output
    assert held in output
    assert output.count("nothing to do") == 2
    assert output.endswith("received per rank: ours 0 B, torch 0 B, least possible 0 B; torch / ours: -\n")


def rows_of(output, title):
    """The cells of the table below a title."""
    table = output.partition(f"{title}")[2].partition("\n\n")[0].splitlines()[1:]
    return [re.split(r"\s{2,}", line) for line in table]


def test_our_steps_and_torch_s_side_by_side():
    output = output_of()
    ours = plan(MESH("tp", None), MESH(("dp", "tp"), None), (16, 8), torch.float32)
    theirs = torch_plan(ours.src, ours.dst, (16, 8), torch.float32)
    head, *steps, total = rows_of(output, "hyper_parallel")
    assert head == ["step", "kind", "axes", "ranks", "received per rank", "sent per rank", "extra memory"]
    assert [row[:3] for row in steps] == [[str(n), s.kind, "+".join(s.axes)] for n, s in enumerate(ours.steps, 1)]
    assert total[:2] == ["total", f"{ours.num_collectives} collective"]
    assert total[2] == f"{ours.recv_bytes.max()} B (min {ours.recv_bytes.min()} B)"
    head, *steps, total = rows_of(output, f"torch {torch.__version__}")
    assert steps == [
        ["1", "all_gather", "tp", "4", "384 B", "384 B", "512 B"],
        ["2", "slice", "dp", "-", "0 B", "0 B", "768 B"],
        ["3", "slice", "tp", "-", "0 B", "0 B", "256 B"],
    ]
    assert total == ["total", "1 collective", "384 B", "384 B", "768 B"]
    assert theirs.recv_bytes.tolist() == [384] * 8
    least = lower_bound(ours.src, ours.dst, (16, 8), torch.float32).mean()
    assert ours.recv_bytes.mean() == least == 48
    assert output.splitlines()[-1] == (
        "received per rank on average: ours 48 B, torch 384 B, least possible 48 B; torch / ours: 8.00"
    )


def test_no_time_without_hardware_and_one_with():
    assert " us" not in output_of()
    output = output_of(hardware="h100-sxm", ranks_per_node="4")
    assert "\nhyper_parallel, times modelled for h100-sxm, 4 ranks per node\n" in output
    on = find_machine("h100-sxm").with_figures(node__devices=4)
    ours = plan(MESH("tp", None), MESH(("dp", "tp"), None), (16, 8), torch.float32, on)
    theirs = torch_plan(ours.src, ours.dst, (16, 8), torch.float32, on)
    for title, modelled in (("hyper_parallel", ours), ("torch ", theirs)):
        head, *_, total = rows_of(output, title)
        assert head[-1] == "time"
        assert total[-1] == f"{modelled.seconds * 1e6:,.1f} us"


def test_on_a_laptop_torch_gathers_where_it_otherwise_exchanges():
    kinds = {
        hardware: [row[1] for row in rows_of(output_of(target="-,tp", hardware=hardware), "torch ")[1:-1]]
        for hardware in ("h100-sxm", "laptop-cpu")
    }
    assert kinds == {"h100-sxm": ["all_to_all"], "laptop-cpu": ["all_gather"]}


def test_a_node_that_has_all_ranks_is_one_node():
    assert "for laptop-cpu, 2 ranks per node\n" in output_of(hardware="laptop-cpu")
    assert "for laptop-cpu, 7 ranks per node\n" in output_of(hardware="laptop-cpu", ranks_per_node="7")
    assert "for laptop-cpu, one node\n" in output_of(hardware="laptop-cpu", ranks_per_node="8")


def test_steps_only():
    output = output_of("--steps-only")
    assert output.startswith("step ")
    assert output.splitlines()[-1].startswith("total")
    assert "torch" not in output


def test_torch_may_refuse():
    output = output_of(shape="9,8", source="tp+dp,-", target="-,-")
    assert "\nrefuses: cannot make a DTensor of this shape: dim 0 (size 9) is split over 'tp' then 'dp'" in output
    assert ", torch refuses, least possible " in output.splitlines()[-1]
    assert output.splitlines()[-1].endswith("; torch / ours: -")


def test_an_exchange_in_rounds_says_so():
    output = output_of("--steps-only", shape="64,64", source="dp,-", target="-,dp", max_extra_bytes="2048")
    assert re.search(r"all_to_all x\d+", output)
    assert not re.search(r"all_to_all x", output_of("--steps-only", shape="64,64", source="dp,-", target="-,dp"))


def test_dtypes_count():
    assert output_of(dtype="bf16").startswith("bfloat16 tensor of 16 x 8, 256 B\n")


def test_the_text_reads_well_in_a_pipe_and_in_a_narrow_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("FORCE_COLOR", "1")
    output = output_of(hardware="h100-sxm")
    assert "\x1b" not in output
    assert [line for line in output.splitlines() if line != line.rstrip()] == []
    assert "extra memory" in output, "no cell is cut or folded"


def test_nothing_received_by_us_is_no_ratio():
    ours = plan(MESH(), MESH("dp"), (16,), torch.float32)
    theirs = torch_plan(MESH("dp"), MESH(), (16,), torch.float32)
    last = show._comparison(ours, theirs, np.zeros(8))
    assert last == "received per rank: ours 0 B, torch 32 B, least possible 0 B; torch / ours: infinite"


# Mistakes


@pytest.mark.parametrize(
    ("changes", "messages"),
    [
        ({"mesh": "dp=2,tp"}, ["cannot read a mesh: 'tp' has no '='", "\n  dp=2,tp\n       ^^\n", "try: tp=2"]),
        ({"shape": "4k,2"}, ["cannot read a shape: '4k' is no whole number", "\n  4k,2\n  ^^\n"]),
        ({"source": "dq"}, ["cannot read a layout: no axis is called 'dq'", "\n  dq\n  ^^\n", "try: 'dp'"]),
        ({"target": "-,-; tp=sun"}, ["no reduction is called 'sun'", "\n  -,-; tp=sun\n          ^^^\n", "'sum'"]),
        ({"target": "dp,dp"}, ["axis 'dp' is used for dim 0 already", "\n  dp,dp\n     ^^\n"]),
        ({"source": "dp,tp,-"}, ["entry 2, not split, is for a dim that a tensor of ndim 2 does not have", "try: "]),
        ({"dtype": "flaot32"}, ["no dtype is called 'flaot32'", "try: 'float32'"]),
        ({"hardware": "h100"}, ["cannot find the hardware 'h100'", "try: 'h100-sxm', or the path of a TOML file"]),
        ({"ranks_per_node": "8"}, ["no --hardware says what joins them", "try: --hardware h100-sxm"]),
        (
            {"hardware": "a100-80gb", "ranks_per_node": "0"},
            ["cannot change 'node.devices' of a100-80gb: a figure is above 0", "given: 0", "try: leave it out"],
        ),
        ({"max_extra_bytes": "0", "target": "-,tp"}, ["max_extra_bytes", "try: "]),
        ({"source": "-,-; tp=sum", "target": "dp,tp", "dtype": "float8_e4m3fn"}, ["float8_e4m3fn", "try: "]),
        ({"shape": "99999999999999999999,4"}, ["more than 8 ranks' bytes can be counted for", "try: "]),
    ],
)
def test_a_mistake_is_one_message_and_exit_code_2(changes, messages):
    code, output = invoke(**changes)
    assert code == cli.USER_ERROR
    assert output.startswith("error: ")
    assert output.count("error:") == 1
    assert [message for message in messages if message not in output] == [], output
    assert "Traceback" not in output


@pytest.mark.parametrize("changes", [{"mesh": None}, {"target": None}, {"max_extra_bytes": "much"}])
def test_flags_that_do_not_parse_exit_with_2(changes):
    code, output = invoke(**changes)
    assert code == cli.USER_ERROR
    assert "Traceback" not in output


# -- drawings; those of docs/design/redistribution.md are checked with the other pages ---------------------------------


def test_a_drawing_counts_what_the_plan_counts():
    mesh = Layout((2, 3), ("dp", "tp"))
    for src, dst in ((mesh("dp", "tp"), mesh("tp", "dp")), (mesh(None, ("tp", "dp")), mesh("dp"))):
        (step,) = plan(src, dst, (7, 5), torch.float32).steps
        table = [line.split()[2:] for line in show.draw_transfers(step).splitlines()[1:]]
        sent = np.array([[0 if cell == "." else int(cell) for cell in row] for row in table]) * 4
        assert sent.sum(axis=0).tolist() == step.recv_bytes.tolist()
        assert sent.sum(axis=1).tolist() == step.send_bytes.tolist()


def test_what_cannot_be_drawn_on_a_page():
    mesh = Layout((2,), ("dp",))
    with pytest.raises(ValueError, match="cannot draw a redistribution: it has 3 dims, and a page has two"):
        show.draw_parts(plan(mesh("dp"), mesh(), (2, 2, 2), torch.float32).before)
    with pytest.raises(ValueError, match="it has 3 axes"):
        show.draw_mesh(Layout((2, 2, 2), ("a", "b", "c")))
