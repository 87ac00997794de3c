"""Meshes, layouts and shapes as people type them: what is read, and where an error points."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.placement_types import Replicate, Shard
from hyper_parallel.core.dtensor.text import parse_dtype, parse_layout, parse_mesh, parse_shape, write_layout
from sim.strategies import layouts, meshes, shapes

MESH = Layout((2, 4, 2), ("dp", "tp", "cp"))


# What is read


@pytest.mark.parametrize(
    ("text", "mesh"),
    [
        ("dp=2", Layout((2,), ("dp",))),
        ("dp=2,tp=4", Layout((2, 4), ("dp", "tp"))),
        (" dp = 2 ,\ttp=1_024 ", Layout((2, 1024), ("dp", "tp"))),
        ("dp-shard.0=3", Layout((3,), ("dp-shard.0",))),
    ],
)
def test_meshes(text, mesh):
    assert parse_mesh(text) == mesh


@pytest.mark.parametrize(
    ("text", "layout"),
    [
        ("", MESH()),
        ("  ", MESH()),
        ("None", MESH("None")),
        ("dp,None", MESH("dp", "None")),
        ("-,dp", MESH("None", "dp")),
        ("dp+tp", MESH(("dp", "tp"))),
        ("(dp,tp)", MESH(("dp", "tp"))),
        ("tp>dp, -", MESH(("tp", "dp"), "None")),
        (" ( tp , dp ) , cp ", MESH(("tp", "dp"), "cp")),
        ("(dp+tp)", MESH(("dp", "tp"))),
        ("(dp),tp", MESH("dp", "tp")),
        ("dp,None; tp=sum", MESH("dp", "None", partial={"tp": "sum"})),
        ("None,None;tp=max,cp = max", MESH(None, None, partial={"tp": "max", "cp": "max"})),
        ("; tp=prod", MESH(partial={"tp": "prod"})),
    ],
)
def test_layouts(text, layout):
    read = parse_layout(MESH, text)
    assert read == layout
    assert read.alias_placements == layout.alias_placements


def test_an_assignment_of_the_mesh_does_not_matter():
    assert parse_layout(MESH("tp"), "dp") == MESH("dp")


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("", ()),
        ("4096", (4096,)),
        ("4096,1024", (4096, 1024)),
        ("4096x1024X2", (4096, 1024, 2)),
        (" 4_096 , 0 ", (4096, 0)),
        (str((4096, 1024)), (4096, 1024)),
        (str((5,)), (5,)),
        (str(()), ()),
        (str([2, 3]), (2, 3)),
    ],
)
def test_shapes(text, shape):
    assert parse_shape(text) == shape


@pytest.mark.parametrize(
    ("text", "dtype"),
    [
        ("float32", torch.float32),
        (" torch.bfloat16", torch.bfloat16),
        ("half", torch.half),
        ("bf16", torch.bfloat16),
        ("fp64", torch.float64),
        ("float8_e4m3fn", torch.float8_e4m3fn),
        (str(torch.int8), torch.int8),
    ],
)
def test_dtypes(text, dtype):
    assert parse_dtype(text) is dtype


# Where an error points: the marks are under the mistake


@pytest.mark.parametrize(
    ("text", "marks", "blame", "hint"),
    [
        ("td,None", "^^", "no axis is called 'td'", "'tp'"),
        ("None, dq", "      ^^", "no axis is called 'dq'", "'dp'"),
        ("dp;xyz=sum", "   ^^^", "no axis is called 'xyz'", "one of 'dp', 'tp', 'cp'"),
        ("dp tp", "^^^^^", "no axis is called 'dp tp'", "'dp'"),
        ("dp,,tp", "   ^", "dim 1 has an empty entry", '"-" for a dim that is not split, else an axis'),
        ("dp,", "   ^", "dim 1 has an empty entry", '"-" for a dim that is not split, else an axis'),
        ("dp++tp", "   ^", "dim 0 has an empty entry", '"-" for a dim that is not split, else an axis'),
        ("()", " ^", "dim 0 has an empty entry", '"-" for a dim that is not split, else an axis'),
        ("dp,tp,dp", "      ^^", "axis 'dp' is used for dim 0 already", "'dp' in one of the two places only"),
        ("dp;dp=sum", "   ^^", "axis 'dp' is used for dim 0 already", "'dp' in one of the two places only"),
        ("dp,tp=sum", "   ^^^^^^", "reductions come after a semicolon", "'dp; tp=sum'"),
        ("tp=sum", "^^^^^^", "reductions come after a semicolon", "'; tp=sum'"),
        ("dp;tp=sun", "      ^^^", "no reduction is called 'sun'", "'sum'"),
        ("dp;tp=", "      ^", "no reduction is called ''", "one of 'sum', 'avg', 'max', 'min', 'prod'"),
        ("dp; tp", "    ^^", "'tp' has no '='", "tp=sum"),
        ("dp;", "   ^", "an entry is empty", "dp=sum"),
        ("dp;=sum", "   ^^^^", "'=sum' has no name before '='", "dp=sum"),
        ("dp;tp=sum=1", "   ^^^^^^^^", "'tp=sum=1' has more than one '='", "tp=sum"),
        ("dp;tp=sum;cp=sum", "         ^", "a second semicolon", '"," between reductions'),
        ("(dp,tp", "^", "a bracket opens and never closes", "brackets in pairs, or none"),
        ("dp)", "  ^", "a bracket closes that was never opened", "brackets in pairs, or none"),
        ("(dp,tp)+cp", "^^^^^^^", "brackets within dim 0", "(dp,tp) for one dim that two axes split, and"),
        ("((dp,tp),None)", " ^^^^^^^", "brackets within dim 0", "no brackets around all dims"),
        ("(dp, None)", "     ^^^^", "'None' is no axis", "one entry per dim, without brackets around all of them"),
        ("dp\t,td", "    ^^", "no axis is called 'td'", "'tp'"),
    ],
)
def test_layout_errors(text, marks, blame, hint):
    check(lambda: parse_layout(MESH, text), "layout", text, marks, blame, "mesh: dp=2, tp=4, cp=2", hint)


@pytest.mark.parametrize(
    ("text", "marks", "blame", "hint"),
    [
        ("", "^", "an entry is empty", "dp=2"),
        ("dp=2,", "     ^", "an entry is empty", "dp=2"),
        ("dp=2,tp", "     ^^", "'tp' has no '='", "tp=2"),
        ("dp:2", "^^^^", "'dp:2' has no '='", "dp=2"),
        ("=2", "^^", "'=2' has no name before '='", "dp=2"),
        ("dp=2=3", "^^^^^^", "'dp=2=3' has more than one '='", "dp=2"),
        ("dp=2, dp=3", "      ^^", "axis name 'dp' is given twice", "another name, such as 'tp'"),
        ("None=2", "^^^^", "'None' cannot be an axis name", "another name, such as 'dp'"),
        ("-=2", "^", "'-' cannot be an axis name", "another name, such as 'dp'"),
        ("d p=2", "^^^", "'d p' cannot be an axis name", "another name, such as 'dp'"),
        ("tp=0", "   ^", "'0' is no whole number from 1 up", "tp=2"),
        ("tp=-1", "   ^^", "'-1' is no whole number from 1 up", "tp=2"),
        ("tp=two", "   ^^^", "'two' is no whole number from 1 up", "tp=2"),
        ("tp=", "   ^", "a size is missing", "tp=2"),
    ],
)
def test_mesh_errors(text, marks, blame, hint):
    check(lambda: parse_mesh(text), "mesh", text, marks, blame, "form: dp=2,tp=4", hint)


@pytest.mark.parametrize(
    ("text", "marks", "blame"),
    [
        ("4,", "  ^", "a size is missing"),
        ("4,,5", "  ^", "a size is missing"),
        ("4, -1", "   ^^", "'-1' is no whole number from 0 up"),
        ("4k", "^^", "'4k' is no whole number from 0 up"),
        ("1.5", "^^^", "'1.5' is no whole number from 0 up"),
        ("(4,5", "^", "a bracket opens and never closes"),
        ("4)", " ^", "a bracket closes that was never opened"),
    ],
)
def test_shape_errors(text, marks, blame):
    hint = "brackets in pairs, or none" if "bracket" in blame else "sizes such as 4096,1024"
    check(lambda: parse_shape(text), "shape", text, marks, blame, "form: 4096,1024 or 4096x1024", hint)


@pytest.mark.parametrize(
    ("text", "marks", "hint"),
    [
        ("flaot32", "^^^^^^^", "'float32'"),
        ("torch.bfloat1", "^^^^^^^^^^^^^", "'bfloat16'"),
        (" nn", " ^^", "one of "),
        ("bf32", "^^^^", "'float32'"),
        ("", "^", "one of "),
    ],
)
def test_dtype_errors(text, marks, hint):
    blame = f"no dtype is called {text.strip()!r}"
    check(lambda: parse_dtype(text), "dtype", text, marks, blame, "form: float32 or bf16", hint)


def check(read, what, text, marks, blame, context, hint):
    with pytest.raises(ValueError) as caught:
        read()
    first, line, pointer, seen, tried = str(caught.value).splitlines()
    assert first.startswith(f"cannot read a {what}: {blame}")
    assert line == "  " + text.replace("\t", " ")
    assert pointer == "  " + marks
    assert seen == "  " + context
    assert tried.startswith("  try: ")
    assert hint in tried


# There and back again


@pytest.mark.tier("test")
@given(st.data())
def test_what_is_written_is_read_back(data):
    mesh = data.draw(meshes())
    shape = data.draw(shapes(0, 4))
    layout = data.draw(layouts(mesh, shape, partial=True))
    read = parse_layout(mesh, write_layout(layout))
    assert read == layout
    assert read.alias_placements == layout.alias_placements
    assert parse_mesh(",".join(f"{n}={s}" for n, s in zip(mesh.alias_name, mesh.mesh_shape, strict=True))) == mesh
    assert parse_shape(str(shape)) == parse_shape("x".join(map(str, shape))) == shape


@pytest.mark.tier("test")
@given(st.data())
def test_what_a_layout_shows_is_read_back(data):
    """The entries of `str(layout)`, without the brackets around them all."""
    mesh = data.draw(meshes())
    layout = data.draw(layouts(mesh, (4,) * 3))
    shown = str(layout)
    assert parse_layout(mesh, shown[1 : shown.index(")")]) == layout
    assert parse_mesh(shown[shown.rindex(" on ") + 4 :]) == mesh


@pytest.mark.tier("test")
@given(st.text(alphabet="dptc+>,;=()- None0123456789x\t", max_size=12))
def test_any_text_is_read_or_explained(text):
    for read in (parse_mesh, parse_shape, lambda text: parse_layout(MESH, text)):
        try:
            read(text)
        except ValueError as error:
            lines = str(error).splitlines()
            assert len(lines) == 5
            assert set(lines[2].strip()) == {"^"}
            assert len(lines[2]) <= len(lines[1]) + 1


def test_a_layout_without_entries_cannot_be_written():
    for layout in (MESH, MESH(Shard(0), Replicate(), Replicate())):
        with pytest.raises(ValueError, match="cannot write a layout: it has no alias form"):
            write_layout(layout)
    assert write_layout(MESH()) == ""
