"""`hyper_parallel.show`: every rank's part is in the table, in a terminal and in a notebook, and nothing is sent."""

import builtins
import re
import sys
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import hyper_parallel as hp
import sim
from hyper_parallel.core.common import tables
from hyper_parallel.core.redistribute import plan
from hyper_parallel.core.shard.show import view
from sim.strategies import layouts, meshes, shapes

MESH = hp.Layout((2, 4), ("dp", "tp"))


class Cells(HTMLParser):
    """The rows of all tables of an HTML text, as texts of their cells; and the tags that were not closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if {"td", "th"} & {*self.open}:
            self.rows[-1][-1] += data


def rows_of(shown):
    """Return the rows of all tables that a notebook shows."""
    found = Cells(shown._repr_html_())
    assert found.open == []
    return found.rows


def parts_of(shown):
    """Return the rows below the line that begins with `ranks`, by their heads."""
    rows = rows_of(shown)
    start = next(at for at, row in enumerate(rows) if row[0] == "ranks")
    return [dict(zip(rows[start], row, strict=False)) for row in rows[start + 1 :]]


def ranks_in(text):
    """Read ranks as the table writes them; long lists are cut there, and are not read."""
    if ".." in text:
        first, last = text.split("..")
        return [*range(int(first), int(last) + 1)]
    return [*map(int, text.split(", "))]


def test_a_layout_with_a_shape_says_who_holds_which_rows():
    assert str(view(MESH(("tp", "dp"), None), (10, 3))) == (
        "10 x 3 on 8 ranks: (tp>dp, -)\n"
        "axis  ranks\n"
        "dp        2  split dim 0, each part of tp\n"
        "tp        4  split dim 0\n"
        "\n"
        "ranks  dim 0    holds\n"
        "0      0:2      2 x 3\n"
        "1      3:5      2 x 3\n"
        "2      6:8      2 x 3\n"
        "3      9:10     1 x 3\n"
        "4      2:3      1 x 3\n"
        "5      5:6      1 x 3\n"
        "6      8:9      1 x 3\n"
        "7      nothing  0 x 3"
    )


def test_a_layout_without_a_shape_numbers_its_parts():
    assert str(view(MESH("dp", partial={"tp": "avg"}))).splitlines()[:6] == [
        "8 ranks: (dp); tp=avg",
        "axis  ranks",
        "dp        2  split dim 0",
        "tp        4  hold the parts of an avg that is still to be taken",
        "",
        "ranks  dim 0   tp: avg",
    ]
    assert [row["dim 0"] for row in parts_of(view(MESH("dp")))] == ["1 of 2", "2 of 2"]


@pytest.mark.tier("test")
@given(st.data())
def test_every_rank_is_in_the_row_of_its_part(data):
    shape = data.draw(shapes(max_dims=5, max_size=9))
    mesh = data.draw(meshes(max_ranks=8))  # of more, the ranks of a row may be cut
    layout = data.draw(layouts(mesh, shape, partial=True))
    split = [dim for dim, axes in enumerate(layout.splits(len(shape))) if axes]
    seen = []
    for row in parts_of(view(layout, shape)):
        for rank in ranks_in(row["ranks"]):
            seen.append(rank)
            local = layout.local_slice(shape, rank)
            for dim in split:
                start, stop = local[dim].start, local[dim].stop
                assert row[f"dim {dim}"] == ("nothing" if start == stop else f"{start}:{stop}")
            at = layout.axes.coordinates(layout.axes.position(rank))
            for name, kind in layout.partial.items():
                axis = layout.alias_name.index(name)
                assert row[f"{name}: {kind}"] == f"{at[axis] + 1} of {layout.mesh_shape[axis]}"
            assert row["holds"] == (" x ".join(map(str, layout.local_shape(shape, rank))) or "no dims")
    assert sorted(seen) == sorted(layout.rank_list)


def test_many_ranks_and_five_dims_stay_readable():
    layout = hp.Layout((4, 8, 2, 2, 8, 4), ("pp", "dp", "cp", "ulysses", "ep", "tp"))
    text = str(view(layout("dp", ("cp", "ulysses"), "ep", "tp", None), (70, 64, 30, 5, 3)))
    lines = text.splitlines()
    assert max(map(len, lines)) <= 100
    assert len(lines) < 50
    assert lines[-1] == "1,024 parts in all"
    assert "..." in lines
    assert "0, 1024, 2048, 3072" in text  # the copies along pp


def test_a_mesh_of_many_axes_has_a_row_for_each_place_of_the_outer_ones():
    lines = str(view(hp.Layout((2, 2, 3), ("pp", "dp", "tp")))).splitlines()
    assert lines[0] == "mesh of 12 ranks: pp=2, dp=2, tp=3"
    assert lines[1:3] == ["pp  dp  ranks along tp", "0   0   0..2"]
    assert lines[-1] == "1   1   9..11"
    assert len(str(view(hp.Layout((100, 1000), ("dp", "tp")))).splitlines()) < 40


def one_rank_shows(device):
    mesh = hp.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    local = torch.empty(3 - dist.get_rank() // 2, 2, device=device)
    x = DTensor.from_local(local, mesh, [Shard(0), Partial()], shape=torch.Size((5, 2)), stride=(2, 1))
    if dist.get_rank() == 2:  # the others do not take part
        return str(view(x)), str(view(mesh))
    return None


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_one_rank_shows_a_tensor_without_the_others(device):
    with sim.world(4) as world:
        shown, mesh = world.run(one_rank_shows, args=(device,))[2]
        assert world.trace.summary().splitlines()[1:] == []
    assert shown.splitlines()[0] == "float32 DTensor of 5 x 2, 40 B on 4 ranks: (dp, -); tp=sum"
    assert shown.splitlines()[-4:] == [
        "0      0:3    1 of 2   3 x 2  24 B",
        "1      0:3    2 of 2   3 x 2  24 B",
        "2      3:5    1 of 2   2 x 2  16 B   <- rank 2",
        "3      3:5    2 of 2   2 x 2  16 B",
    ]
    assert mesh.splitlines()[-1] == "1   2, 3            <- rank 2"


def wrong_local():
    mesh = hp.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    x = DTensor.from_local(torch.ones(4, 2), mesh, [Shard(0)], run_check=False, shape=(6, 2), stride=(2, 1))
    return str(view(x)).splitlines()[-1]


def test_a_part_that_the_layout_does_not_say_is_noticed():
    assert sim.run(wrong_local, 2)[1] == "rank 1 holds 4 x 2, where its layout says 3 x 2"


def model_of(layers):
    mesh = hp.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(8, 9) for _ in range(layers)), nn.Linear(8, 2, bias=False))
    for layer in model[:layers]:
        hp.fully_shard(layer, mesh=mesh)
    return view(model) if dist.get_rank() == 1 else None


def test_a_model_shows_alike_layers_once_and_what_is_not_sharded():
    shown = sim.run(model_of, 2, args=(3,))[1]
    assert str(shown).splitlines() == [
        "Sequential: 259 numbers in 7 tensors on dp=2 (2 ranks)",
        "parameter       shape  dtype    layout        copies     full            on a rank",
        "*.weight   x 3  9 x 8  float32  (dp, -)            1    864 B  480 B (least 384 B)",
        "*.bias     x 3  9      float32  (dp)               1    108 B    60 B (least 48 B)",
        "3.weight        2 x 8  float32  plain tensor       -     64 B                 64 B",
        "in all     7                                          1.0 KiB",
        "this process holds 496 B of 1.0 KiB",
    ]
    assert ["3.weight", "", "2 x 8", "float32", "plain tensor", "-", "64 B", "64 B"] in rows_of(shown)


def test_a_model_of_two_meshes_says_which():
    def body():
        mesh = hp.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        hp.fully_shard(model[0], mesh=mesh["dp"])
        hp.fully_shard(model[1], mesh=mesh["tp"])
        return str(view(model)) if dist.get_rank() == 0 else ""

    text = sim.run(body, 4)[0]
    assert "on dp=2 (2 ranks); tp=2 (2 ranks)" in text
    assert "(dp, -) on dp=2" in text
    assert "(tp, -) on tp=2" in text


def test_a_model_without_a_process_group_is_shown():
    text = str(view(nn.Linear(3, 2)))
    assert text.splitlines()[0] == "Linear: 8 numbers in 2 tensors on no mesh: no parameter is a DTensor"
    assert text.count("plain tensor") == 2


def test_a_plan_shows_steps_and_who_holds_what_before_and_after():
    shown = str(view(plan(MESH("dp"), MESH("tp"), (8, 4), torch.float32)))
    assert "received per rank" in shown
    assert "before: 8 x 4, 128 B on 8 ranks: (dp, -)" in shown
    assert "after: 8 x 4, 128 B on 8 ranks: (tp, -)" in shown
    assert shown.count("0..3   0:4    4 x 4  64 B") == 1


def test_a_models_plan_shows_its_entries():
    sharding = hp.ShardingPlan(
        {"layers.*.w": ("tp", None), "b": MESH("dp")},
        {"input": [MESH("dp"), None], "skipped.input": None},
        return_local_tensor=["head"],
    )
    assert str(view(sharding)).splitlines() == [
        "ShardingPlan with 4 entries",
        "path           of         layout",
        "layers.*.w     parameter  ('tp', None)",
        "b              parameter  (dp)",
        "input          input      [(dp), None]",
        "skipped.input  input      left alone",
        "return_local_tensor: ['head']",
    ]
    assert str(view(hp.ShardingPlan())) == "ShardingPlan with 0 entries"


@pytest.mark.parametrize("given_", [torch.ones(3), None, [MESH("dp")], {"w": torch.ones(2)}])
def test_what_cannot_be_shown_says_what_can(given_):
    with pytest.raises(
        TypeError, match=r"cannot show who holds what: x is .*\n.*\n  try: a DTensor, a Layout"
    ) as caught:
        hp.show(given_)
    assert "a model, a ShardingPlan" in str(caught.value)


def test_shapes_that_do_not_belong_are_refused():
    with pytest.raises(ValueError, match="a shape goes with a layout"):
        hp.show(MESH, (4, 4))
    with pytest.raises(ValueError, match="a shape goes with a layout"):
        hp.show(nn.Linear(2, 2), (4, 4))
    with pytest.raises(ValueError, match="entry 1, 'tp', is for a dim"):
        hp.show(MESH("dp", "tp"), (4,))
    with pytest.raises(ValueError, match=r"counts a dim from the last one.*\n.*\n  try: hp.show"):
        hp.show(MESH(Shard(-1), Replicate()))
    assert str(view(MESH(Shard(-1), Replicate()), (4, 6))).splitlines()[-1] == "4..7   3:6    4 x 3"


# Where it is shown


def test_a_terminal_gets_colours_and_a_file_gets_none(capsys, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    hp.show(MESH("dp"), (4,))
    plain = capsys.readouterr().out
    assert plain == f"{view(MESH('dp'), (4,))}\n"
    monkeypatch.setenv("FORCE_COLOR", "1")
    hp.show(MESH("dp"), (4,))
    coloured = capsys.readouterr().out
    assert "\x1b[36m" in coloured
    bare = re.sub(r"\x1b\[[\d;]*m", "", coloured)
    assert [line.rstrip() for line in bare.splitlines()] == plain.splitlines()


def test_a_narrow_terminal_loses_nothing(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    layout = MESH("dp", None, "tp", None, None)
    hp.show(layout, (4, 5, 6, 7, 8))
    assert capsys.readouterr().out == f"{view(layout, (4, 5, 6, 7, 8))}\n"


def test_a_notebook_gets_html(capsys, monkeypatch):
    shown = []
    python = SimpleNamespace(
        get_ipython=lambda: SimpleNamespace(kernel=object()), display=SimpleNamespace(display=shown.append)
    )
    monkeypatch.setitem(sys.modules, "IPython", python)
    hp.show(MESH("dp"), (4,))
    assert capsys.readouterr().out == ""
    assert [row["ranks"] for row in parts_of(shown[0])] == ["0..3", "4..7"]
    python.get_ipython = SimpleNamespace  # IPython in a terminal
    hp.show(MESH("dp"), (4,))
    assert "4..7" in capsys.readouterr().out


def test_text_stays_text_where_rich_would_display_by_itself(monkeypatch):
    class ZMQInteractiveShell:  # the name by which rich knows a notebook
        """A shell of a notebook."""

    before = str(view(MESH("dp"), (4,)))
    monkeypatch.setattr(builtins, "get_ipython", ZMQInteractiveShell, raising=False)
    assert str(view(MESH("dp"), (4,))) == before


def test_names_cannot_be_taken_for_html_or_markup():
    odd = hp.Layout((2,), ("<b>[red]",))
    shown = view(odd("<b>[red]"), (4,))
    assert rows_of(shown)[1][0] == "<b>[red]"
    assert "<b>[red]" in str(shown)
    assert tables.as_html("<script>") == '<div style="white-space: pre">&lt;script&gt;</div>'
