"""init_parameters on drawn meshes, layouts and shapes: each shard is a slice of what is filled unsharded."""

import math
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import sim
from hyper_parallel import DTensor, Layout
from hyper_parallel.core.dtensor import to_torch
from hyper_parallel.core.init import tiles as tiles_file
from hyper_parallel.core.init.api import init_parameters
from hyper_parallel.core.init.tiles import FillTarget, digest, flush, normal, tiles, truncated, uniform
from sim.strategies import layouts, meshes, shapes

pytestmark = pytest.mark.sim


def examples(share):
    """Settings for a share of what hypothesis would try."""
    return settings(max_examples=max(1, round(share * settings.default.max_examples)))


def wide(w):
    """A view with other dims first, some of them left out by a step."""
    return w.permute(*reversed(range(w.ndim)))[::2] if w.ndim else w


# Each works on the parameter and may be followed by any other.
STEPS = {
    "normal": lambda w: w.normal_(0.5, 0.1),
    "uniform": lambda w: w.uniform_(-2, 3),
    "exponential": lambda w: w.exponential_(2.0),
    "bernoulli": lambda w: w.bernoulli_(0.3),
    "integers": lambda w: w.random_(-5, 90),
    "truncated": lambda w: nn.init.trunc_normal_(w, std=0.5, a=-0.6, b=0.9),
    "tail": lambda w: nn.init.trunc_normal_(w, mean=3.0, a=4.0, b=6.0),
    "kaiming": lambda w: nn.init.kaiming_normal_(w) if w.ndim > 1 and w.numel() else w.zero_(),
    "row": lambda w: w[-1].uniform_() if w.ndim and w.shape[0] else w,
    "view": lambda w: wide(w).normal_(),
    "view of a view": lambda w: wide(w).unsqueeze(0)[..., 1:].fill_(2),
    "nonlinear": lambda w: w.clamp_(-0.99, 0.99).erfinv_(),
    "scaled sum": lambda w: w.add_(torch.randn_like(w), alpha=0.3),
    "noise": lambda w: w.add_(torch.empty_like(w).normal_().sigmoid()),
    "plain": lambda w: w.mul_(torch.rand(w.shape[-1:])),
    "choice": lambda w: w.copy_(torch.where(w > 0.2, w, torch.rand_like(w) * w.ndim)),
    "numbers": lambda w: w.mul_(3).sub_(0.2).tanh_(),
    "norm": lambda w: w.div_(w.norm() + 1),
    "columns": lambda w: [part.mul_(2.0) for part in w.split(2, dim=-1)] if w.ndim and w.shape[-1] else w,
}


class Steps(nn.Module):
    def __init__(self, shape, dtype, names):
        super().__init__()
        self.w = nn.Parameter(torch.empty(shape, dtype=dtype))
        self.names = names

    @torch.no_grad()
    def reset_parameters(self):
        self.w.normal_()
        for name in self.names:
            STEPS[name](self.w)


@st.composite
def cases(draw):
    mesh, shape = draw(meshes(8, 3)), draw(shapes(0, 3, max_size=13))
    names = draw(st.lists(st.sampled_from(sorted(STEPS)), max_size=4))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.float16]))
    return draw(layouts(mesh, shape)), shape, dtype, names, draw(st.integers(0, 2**70))


def filled(layout, shape, dtype, names, seed):
    mesh = init_device_mesh("cpu", layout.mesh_shape, mesh_dim_names=layout.alias_name)
    with torch.device("meta"):
        model = Steps(shape, dtype, names)
        local = torch.empty(layout.local_shape(shape), dtype=dtype)
    where, placements = to_torch(layout.with_mesh(mesh), shape)
    stride = model.w.stride()
    made = DTensor.from_local(local, where, placements, run_check=False, shape=torch.Size(shape), stride=stride)
    model.w = nn.Parameter(made)
    init_parameters(model, seed)
    assert Layout.of(model.w).local_slice(shape) == layout.local_slice(shape)
    return model.w.to_local().detach().clone()


@examples(2)
@given(cases())
@example((Layout((2,), ("dp",))("None", "dp"), (1, 3), torch.float32, ["truncated", "choice"], 0))  # a loop, a draw
def test_every_part_is_a_slice_of_the_whole(case):
    layout, shape, dtype, names, seed = case
    with torch.device("meta"):
        full = Steps(shape, dtype, names)
    expected = init_parameters(full, seed).w.detach()
    parts = sim.run(filled, len(layout.rank_list), case)
    for rank, part in enumerate(parts):
        assert torch.equal(part, sim.scatter_full(expected, layout, rank)), (rank, part, expected)


@examples(2)
@given(st.data())
def test_tiles_overlap_a_region_and_cover_it_once(data):
    shape = data.draw(shapes(0, 3, max_size=30))
    long = data.draw(st.integers(0, 2))
    shape = tuple(size * 100 if dim == long else size for dim, size in enumerate(shape))
    bounds = [sorted(data.draw(st.tuples(st.integers(0, size), st.integers(0, size)))) for size in shape]
    region = tuple(slice(low, high) for low, high in bounds)
    counts, everything = torch.zeros(shape, dtype=torch.int8), list(tiles(shape, tuple(map(slice, [0] * 3, shape))))
    found = list(tiles(shape, region))
    for tile in found:
        assert tile in everything, "where a tile lies depends on the shape only"
        assert counts[tile].numel() <= 2**14
        counts[tile] += 1
    assert bool((counts[region] == 1).all())
    assert all(max(a.start, b.start) < min(a.stop, b.stop) for t in found for a, b in zip(t, region, strict=True))


# -- threads ---------------------------------------------------------------------------------------------------------


def philox(key):
    return np.random.Generator(np.random.Philox(key=key))


def plain_normal(tile, key, mean, std):
    kind = np.float64 if tile.dtype == torch.float64 else np.float32
    values = philox(key).standard_normal(tile.numel(), np.float32).astype(kind) * kind(std) + kind(mean)
    tile.copy_(torch.from_numpy(values).view(tile.shape))


def plain_uniform(tile, key, low, high):
    values = philox(key).random(tile.numel()) * (high - low) + low
    tile.copy_(torch.from_numpy(values).view(tile.shape))
    ends = torch.tensor([high, low], dtype=tile.dtype)
    tile.clamp_(max=torch.nextafter(ends[0], ends[1]))


def plain_truncated(tile, key, mean, std, low, high):  # of bounds below the mean
    least, most = (0.5 * math.erfc((mean - x) / std / math.sqrt(2)) for x in (low, high))
    chance = torch.from_numpy(philox(key).random(tile.numel()) * (most - least) + least).view(tile.shape)
    tile.copy_(torch.special.ndtri(chance).mul_(std).add_(mean).clamp_(low, high))


# Each with a write, what the write is by hand, and whether it sets every element.
WRITES = {
    "normal": (lambda t, n: normal(t, n, 0.5, 0.02), lambda t, key: plain_normal(t, key, 0.5, 0.02), True),
    "uniform": (lambda t, n: uniform(t, n, -2, 3), lambda t, key: plain_uniform(t, key, -2, 3), True),
    "tail": (lambda t, n: truncated(t, n, 1, 2, -3, 0), lambda t, key: plain_truncated(t, key, 1, 2, -3, 0), True),
    "sevens": (lambda t, n: t.fill_(7), lambda t, key: t.fill_(7), True),
    "tanh": (lambda t, n: t.mul_(3).tanh_(), lambda t, key: t.mul_(3).tanh_(), False),
}


def one_by_one(full, writes, seed, name):
    """Do to a full tensor what writes do, tile by tile, each with a generator of its own."""
    for tile in tiles(full.shape, tuple(slice(0, size) for size in full.shape)):
        values = full[tile].clone(memory_format=torch.contiguous_format)
        for number, write in enumerate(writes):
            WRITES[write][1](values, digest(seed, name, number, [part.start for part in tile]))
        full[tile] = values
    return full


class Part(FillTarget):
    """A tensor of which a rank holds a region, without ranks."""

    def __init__(self, name, full, region, seed):
        super().__init__(name, full.to("meta"), region, seed, sharded=True)
        self.part = full[region].clone()

    @property
    def local(self):
        return self.part


@st.composite
def fills(draw):
    """A tensor of up to a dozen tiles, a region of it and what is written."""
    sizes = draw(st.sampled_from([(), (5000,), (40, 2500), (5000, 20), (3, 20, 1200), (2, 3, 4, 5)]))
    shape = tuple(draw(st.integers(0, size)) for size in sizes)
    bounds = [sorted(draw(st.tuples(st.integers(0, size), st.integers(0, size)))) for size in shape]
    region = tuple(slice(low, high) for low, high in bounds)
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.float16]))
    writes = draw(st.lists(st.sampled_from(sorted(WRITES)), min_size=1, max_size=3))
    return shape, region, dtype, writes, draw(st.integers(0, 2**70))


@examples(1)
@given(st.lists(fills(), min_size=1, max_size=3), st.integers(1, 5), st.sampled_from([1, 2**15, 2**19]))
@example([((40, 3000), (slice(5, 37), slice(700, 2900)), torch.float32, ["normal", "tanh"], 3)], 3, 2**15)
def test_any_number_of_threads_draws_what_one_tile_after_the_other_does(drawn, threads, block):
    targets, expected = [], []
    for number, (shape, region, dtype, writes, seed) in enumerate(drawn):
        full = torch.linspace(-1, 1, math.prod(shape), dtype=torch.float64).to(dtype).view(shape)
        target = Part(f"w{number}", full, region, seed)
        expected.append(one_by_one(full, writes, seed, target.name)[region])
        for write in writes:
            target.write(WRITES[write][0], covers=WRITES[write][2])
        targets.append(target)
    with mock.patch.object(tiles_file, "_BLOCK", block):
        flush(targets, threads)
    for target, wanted in zip(targets, expected, strict=True):
        assert torch.equal(target.local, wanted), target.name
