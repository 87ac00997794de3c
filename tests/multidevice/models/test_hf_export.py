"""Sharded models to and from folders of Hugging Face: the files of one device, of which a rank reads its part."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors
import torch
import torch.distributed as dist
from safetensors.torch import load_file

import sim
from hyper_parallel import (
    full_tensor,
    fully_shard,
    get_model_state_dict,
    init_device_mesh,
    init_parameters,
    shard_module,
)
from hyper_parallel.models import Llama, LlamaConfig, MoEConfig, MoELlama, llama_plan, parallelize_moe
from hyper_parallel.models.hf_weights import export_huggingface, import_huggingface, load_huggingface

pytestmark = pytest.mark.tier("test")

SIZES = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 42, "num_hidden_layers": 2, "max_seq_len": 16}
DENSE = LlamaConfig(**SIZES)  # type: ignore[arg-type]
TIED = LlamaConfig(**SIZES, tie_embeddings=True)  # type: ignore[arg-type]
SPARSE = MoEConfig(**SIZES, num_experts=4, expert_intermediate_size=10, num_dense_layers=1)  # type: ignore[arg-type]


def sharded(ctx, config: LlamaConfig, seed: int) -> torch.nn.Module:
    """The model over (dp, tp), or (ep, tp) where there are experts; 42 and 50 do not divide evenly by 4."""
    axis = "ep" if isinstance(config, MoEConfig) else "dp"
    mesh = init_device_mesh(ctx.device_type, (2, 2), mesh_dim_names=(axis, "tp"))
    with torch.device("meta"):
        model = MoELlama(config) if isinstance(config, MoEConfig) else Llama(config)
    if isinstance(config, MoEConfig):
        parallelize_moe(model, mesh)
    else:
        shard_module(model, mesh["tp"], llama_plan(config, mesh["tp"]))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    return init_parameters(model, seed)


def alone(config: LlamaConfig, seed: int) -> torch.nn.Module:
    with torch.device("meta"):
        model = MoELlama(config) if isinstance(config, MoEConfig) else Llama(config)
    return init_parameters(model, seed)


@pytest.mark.tier("full", each=4)
@sim.ranks(4)
@pytest.mark.parametrize("config", [DENSE, TIED, SPARSE], ids=["dense", "tied", "experts"])
def test_a_sharded_model_goes_out_and_comes_back(ctx, config, tmp_path):
    """Files of several ranks hold what one device's do, and a model on another mesh is filled from them."""
    ranks = tmp_path / "ranks"
    export_huggingface(get_model_state_dict(sharded(ctx, config, seed=3)), config, ranks, max_shard_bytes=9_000)
    if ctx.rank == 0:
        names = sorted(path.name for path in ranks.glob("*.safetensors"))
        assert len(names) > 2
        files = {name: tensor for file in names for name, tensor in load_file(ranks / file).items()}
        places = _by_their_names(alone(config, seed=3))
        assert sorted(files) == sorted(places)
        for name, tensor in files.items():
            assert torch.equal(tensor, places[name]), name
    dist.barrier()
    found, load = import_huggingface(ranks)
    assert found == config
    other = sharded(ctx, config, seed=4)
    state = get_model_state_dict(other)
    load(state)
    expected = alone(config, seed=3).state_dict()
    for name, tensor in get_model_state_dict(other).items():
        full = full_tensor(tensor) if hasattr(tensor, "placements") else tensor
        assert torch.equal(full.cpu(), expected[name]), name


def _by_their_names(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    from hyper_parallel.models.hf_names import place_of

    found = {}
    for name, tensor in model.state_dict().items():
        if name == "head.weight" and model.config.tie_embeddings:
            continue
        place = place_of(name, tuple(tensor.shape))
        found |= {each: tensor[i] if place.is_stacked else tensor for i, each in enumerate(place.names)}
    return found


@pytest.mark.sim
def test_a_rank_that_cannot_write_tells_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(tensors, path, metadata):
        raise safetensors.SafetensorError("I/O error: No space left on device (os error 28)")

    def export(folder: Path, kind: type[Exception]) -> str:
        mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("dp",))
        state = get_model_state_dict(fully_shard(alone(DENSE, 0), mesh=mesh))
        with pytest.raises(kind, match="cannot export") as error:
            export_huggingface(state, DENSE, folder, max_shard_bytes=9_000)
        return str(error.value)

    (tmp_path / "model.safetensors").touch()
    said = sim.run(export, world_size=3, args=(tmp_path, ValueError))
    assert len(set(said)) == 1
    assert "it has weights already" in said[0]
    monkeypatch.setattr(safetensors.torch, "save_file", full_disk)
    said = sim.run(export, world_size=3, args=(tmp_path / "full", OSError))
    assert len(set(said)) == 1
    assert "rank 0 could not write" in said[0]
    assert "No space left on device" in said[0]
    assert not (tmp_path / "full" / "config.json").exists()


@pytest.mark.sim
def test_a_rank_reads_no_more_than_its_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export_huggingface(alone(SPARSE, 0).state_dict(), SPARSE, tmp_path)
    read = dict.fromkeys(range(4), 0)
    real = safetensors.safe_open

    class Counting:
        """A file that counts the elements which are read from it."""

        def __init__(self, *args, **options):
            self.file = real(*args, **options)

        def __enter__(self):
            return self

        def __exit__(self, *error):
            self.file.__exit__(*error)

        def keys(self):
            return self.file.keys()

        def get_slice(self, name):
            return CountingSlice(self.file.get_slice(name))

    class CountingSlice:
        def __init__(self, source):
            self.source, self.get_shape, self.get_dtype = source, source.get_shape, source.get_dtype

        def __getitem__(self, part):
            found = self.source[part]
            read[dist.get_rank()] += found.numel()
            return found

    monkeypatch.setattr(safetensors, "safe_open", Counting)

    def load() -> int:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "tp"))
        with torch.device("meta"):
            model = MoELlama(SPARSE)
        parallelize_moe(model, mesh)
        state = get_model_state_dict(init_parameters(model, 1))
        load_huggingface(state, tmp_path)
        return sum(x.to_local().numel() if hasattr(x, "placements") else x.numel() for x in state.values())

    held = sim.run(load, world_size=4)
    assert [read[rank] for rank in range(4)] == held
    assert max(held) < 0.7 * SPARSE.num_parameters()
