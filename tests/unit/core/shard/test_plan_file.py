"""Plans as TOML files: what is written is read back, and a mistake is named with its line."""

import re

import pytest

from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.placement_types import Partial, Replicate, Shard
from hyper_parallel.core.shard.plan_file import load_plan, plan_text, write_plan
from hyper_parallel.core.shard.sharding_plan import ShardingPlan, names_of, read_plan
from hyper_parallel.models import Llama, LlamaConfig, llama_plan

MESH = Layout((2, 4), ("dp", "tp"))


def load(tmp_path, text, mesh=MESH):
    path = tmp_path / "plan.toml"
    path.write_text(text)
    return load_plan(path, mesh)


def error_of(tmp_path, text):
    with pytest.raises(ValueError) as caught:
        load(tmp_path, text)
    return str(caught.value).replace(str(tmp_path), "")


# What is written is read back


@pytest.mark.parametrize("options", [{}, {"sequence_parallel": False}, {"logits": "local"}, {"chunks": 2}])
@pytest.mark.parametrize("tied", [False, True])
def test_the_shipped_plan_survives(tmp_path, options, tied):
    config = LlamaConfig(num_key_value_heads=4, tie_embeddings=tied)
    plan = llama_plan(config, MESH, **options)
    write_plan(plan, MESH, tmp_path / "plan.toml")
    again = load_plan(tmp_path / "plan.toml", "dp=2,tp=4")
    assert plan_text(again, MESH) == (tmp_path / "plan.toml").read_text()
    names = names_of(Llama(config))
    readings = [read_plan("", each, MESH, *names) for each in (plan, again)]
    assert readings[0].parameters == readings[1].parameters
    assert list(readings[0].returned) == list(readings[1].returned)
    assert readings[0].wrap_inputs == readings[1].wrap_inputs
    layers = [f"layers.{number}" for number in range(config.num_hidden_layers if "chunks" in options else 0)]
    chunks = {f"{layer}.mlp": 2 for layer in layers} | {f"{layer}.attention": (2, 0) for layer in layers}
    assert dict(readings[0].chunks) == dict(readings[1].chunks) == chunks
    for kind in ("inputs", "outputs", "local"):
        first, second = (getattr(reading, kind) for reading in readings)
        assert list(first) == list(second)
        ndim = {"inputs": 3, "outputs": 3, "local": 3}[kind]
        for path in first:
            assert first[path].splits(ndim) == second[path].splits(ndim)
            assert first[path].partial == second[path].partial


def test_every_way_to_spell_layouts(tmp_path):
    plan = ShardingPlan(
        plan={"a.w": (("tp", "dp"), "None"), "a.b": (Replicate(), Shard(0)), "skipped": None},
        input_plan={"input": [("dp", "None"), None], "a.input": {"x y": ("dp",), "z": None}},
        output_plan={"output": [None, None], "a.output": {"loss": (Partial(), Replicate())}},
        local_plan={"": MESH("dp", "None", partial={"tp": "avg"})},
        return_local_tensor=["", "a"],
        wrap_inputs=True,
    )
    assert plan_text(plan, MESH).splitlines() == [
        "# on a mesh dp=2, tp=4",
        "schema = 1",
        'return_local_tensor = ["", "a"]',
        "wrap_inputs = true",
        "",
        "[plan]",
        '"a.w" = "tp+dp,None"',
        '"a.b" = "tp"',
        "",
        "[input_plan]",
        'input = ["dp,None", "-"]',
        '"a.input" = {"x y" = "dp", z = "-"}',
        "",
        "[output_plan]",
        'output = ["-", "-"]',
        '"a.output" = {loss = "; dp=sum"}',
        "",
        "[local_plan]",
        '"" = "dp,None; tp=avg"',
    ]
    again = load(tmp_path, plan_text(plan, MESH))
    assert plan_text(again, MESH) == plan_text(plan, MESH)
    assert again.plan == {"a.w": MESH(("tp", "dp"), "None"), "a.b": MESH("tp")}
    assert again.input_plan == {"input": [MESH("dp", "None"), None], "a.input": {"x y": MESH("dp"), "z": None}}
    assert again.output_plan == {"output": [None, None], "a.output": {"loss": MESH(partial={"dp": "sum"})}}
    assert (again.return_local_tensor, again.wrap_inputs) == (["", "a"], True)
    readings = [read_plan("", each, MESH, ["", "a"], {"a.w": 2, "a.b": 1, "skipped": 1}) for each in (plan, again)]
    assert [reading.outputs[""] for reading in readings] == [(None, None), (None, None)]


def test_an_empty_file_is_an_empty_plan(tmp_path):
    assert load(tmp_path, "") == ShardingPlan()
    assert plan_text(ShardingPlan(), "dp=2") == "# on a mesh dp=2\nschema = 1\n"


def test_tables_by_name_may_stand_below_each_other(tmp_path):
    plan = load(tmp_path, '[input_plan."a.input"]\nx = "dp"\ny = "-"\n')
    assert plan.input_plan == {"a.input": {"x": MESH("dp"), "y": None}}


def test_a_dash_alone_is_a_dim_that_is_not_split(tmp_path):
    assert load(tmp_path, '[plan]\nw = "-"\n').plan == {"w": MESH("None")}


# Mistakes


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ('[plan]\n\n"w" = "dq"\n', ["toml:3, [plan] 'w': no axis is called 'dq'\n  dq\n  ^^\n", "try: 'dp'"]),
        ('[input_plan]\ninput = ["dp", "tp,tp"]\n', ["toml:2, [input_plan] 'input': axis 'tp' is used for dim 0 alre"]),
        ('[plan]\nw = "dp; tp=sun"\n', ["toml:2", "no reduction is called 'sun'", "try: 'sum'"]),
        ('\n[inputplan]\nx = "dp"\n', ["toml:2: there is no table [inputplan]\n  [inputplan]\n  try: [input_plan]"]),
        ('[zzz]\nx = "dp"\n', ["there is no table [zzz]", "try: one of 'plan', 'input_plan', 'output_plan', 'local_p"]),
        ("wrap_input = true\n", ["toml:1: there is no setting 'wrap_input'\n", "try: 'wrap_inputs'"]),
        ("wrap_inputs = 1\n", ["toml:1: wrap_inputs is true or false, and not 1\n", "try: wrap_inputs = true"]),
        ('return_local_tensor = "head"\n', ["is a list of module paths, and not 'head'", 'r = ["head"]']),
        ("chunks = 2\n", ["toml:1: chunks is how many for each module path, and not 2", 'try: chunks = {"lay']),
        ('[local_plan]\nhead = "dp"\nwrap_inputs = true\n', ["toml:3: 'wrap_inputs' is no path in ", "above"]),
        ('"a.w" = "dp"\n', ["toml:1: 'a.w' stands above all tables", "try: below [plan], [input_plan]"]),
        ("plan = 3\n", ["toml:1: plan is a table, and not 3", "try: a line [plan]"]),
        ("[plan]\na.w = \"dp\"\n", ["toml:2: a path with dots is in quotes\n  a.w = \"dp\"\n  try: \"a.w\" = ..."]),
        ('[plan]\nw = ["dp", "tp"]\n', ["toml:2: parameter 'w' has one layout, in quotes", 'try: w = "tp,None"']),
        ('[input_plan]\n"a" = "dp"\n', ["toml:2: the last part of a path in ", 'try: "a.input"']),
        ('[input_plan]\n"a.output" = "dp"\n', ["is 'input'", "try: [output_plan]"]),
        ('[output_plan]\noutput = 3\n', ["toml:2, [output_plan] 'output': 3 is no layout", 'try: "dp,None"']),
        ("[output_plan]\noutput = []\n", ["[output_plan] 'output': it is empty"]),
        ('[output_plan]\noutput = ["dp", 1]\n', ["[output_plan] 'output': 1 is no layout"]),
        ("[plan]\nlayers.*.w = 'dp'\n", ["toml:2: not valid TOML: ", "stands in quotes"]),
        ("[plan]\nw = dp,None\n", ["toml:2: not valid TOML: ", "\n  w = dp,None\n"]),
        ('[plan]\nw = "dp"\nw = "tp"\n', ["not valid TOML: cannot overwrite a value"]),
    ],
)  # fmt: skip
def test_a_mistake_names_the_line_and_what_to_try(tmp_path, text, messages):
    error = error_of(tmp_path, text)
    assert error.startswith("cannot read the plan /plan.toml")
    assert re.fullmatch(r"[^\n]+\n  .+\n  try: [^\n]+", error, re.DOTALL), error
    assert [message for message in messages if message not in error] == [], error


def test_a_missing_file_says_which_there_are(tmp_path):
    load(tmp_path, "")
    with pytest.raises(ValueError, match=r"no such file\n  TOML files there: plan.toml\n  try: '.*plan.toml'"):
        load_plan(tmp_path / "plam.toml", MESH)
    with pytest.raises(ValueError, match=r"TOML files there: none\n  try: hyper-parallel verify --show-plan"):
        load_plan(tmp_path / "nowhere" / "plan.toml", MESH)
    with pytest.raises(ValueError, match="is a directory"):
        load_plan(tmp_path, MESH)
    (tmp_path / "plan.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="it is not UTF-8 text"):
        load_plan(tmp_path / "plan.toml", MESH)


def test_a_byte_order_mark_is_no_part_of_a_plan(tmp_path):
    plan = load(tmp_path, "")
    (tmp_path / "plan.toml").write_bytes(b"\xef\xbb\xbf" + (tmp_path / "plan.toml").read_bytes())
    assert load_plan(tmp_path / "plan.toml", MESH) == plan


def test_what_a_file_cannot_say_is_refused():
    with pytest.raises(ValueError, match=r"plan\['w'\]: it counts a dim from the last one"):
        plan_text(ShardingPlan({"w": (Shard(-1), Replicate())}), MESH)
    with pytest.raises(ValueError, match=r"cannot write the plan: plan\['w'\]"):
        plan_text(ShardingPlan({"w": ("cp",)}), MESH)
