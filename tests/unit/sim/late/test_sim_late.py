"""`device="npu"`: what runs late on a rank's device, what is a race there, and what later worlds see of it."""

from __future__ import annotations

import copy
import io
import math
import pickle
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, _random, distribute_tensor, randn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import sim
from hyper_parallel import fully_shard, init_parameters
from hyper_parallel.core.fully_shard import MixedPrecisionPolicy
from hyper_parallel.core.fully_shard.bucket import CopyStreams
from hyper_parallel.core.fully_shard.comm import GroupLog
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.accelerator import NpuPlatform
from sim.late import switch
from sim.late.queue import LateQueue

pytestmark = [
    pytest.mark.sim,
    pytest.mark.skipif(bool(switch.why_not()), reason=switch.why_not()),
    pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning"),
]
SEEDS = range(8)


def late(body, world_size=1, **options):
    return sim.run(body, world_size, device="npu", **options)


def found(body, world_size=1) -> str:
    """The text of the race in `body`, which gives another result for some seed if nobody looks."""
    right = {str(late(body, world_size, seed=seed)) for seed in SEEDS}
    assert len(right) > 1, right
    with pytest.raises(sim.InFlightBufferRace) as caught:
        late(body, world_size, check_races=True)
    return str(caught.value)


def right(body, world_size=1):
    """The result of `body`, which has no race, and is the same for every seed."""
    result = late(body, world_size, check_races=True)
    assert {str(late(body, world_size, seed=seed)) for seed in SEEDS} == {str(result)}
    return result


# -- operations --------------------------------------------------------------------------------------------------------


def halves(x: torch.Tensor) -> torch.Tensor:
    norm = torch.nn.LayerNorm(6).to(x.device, torch.bfloat16)
    return torch.autograd.grad(norm(x.bfloat16()).square().sum(), (x, norm.weight))[0]


def attended(x: torch.Tensor, heads: int = 2, **options) -> torch.Tensor:
    """Two queries attend with their gradients, and in inference."""
    q = x.view(1, 2, 2, 6).detach().requires_grad_()
    out = torch.nn.functional.scaled_dot_product_attention(q, q[:, :heads], q[:, :heads] * 2, **options)
    with torch.inference_mode():
        again = torch.nn.functional.scaled_dot_product_attention(q, q[:, :heads], q[:, :heads] * 2, **options)
    return torch.stack([out, again.clone(), *torch.autograd.grad(out.square().sum(), q)])


def root_mean_squares(x: torch.Tensor) -> torch.Tensor:
    found, norm = [], torch.nn.functional.rms_norm
    for given, shape in ((x, (6,)), (x, (4, 6)), (x.bfloat16(), (6,)), (x[0], (6,)), (x.double(), (6,))):
        given = given.detach().requires_grad_()
        weight = torch.linspace(-1, 2, 24, dtype=given.dtype, device=x.device)[-math.prod(shape) :]
        weight = weight.view(shape).requires_grad_()
        out = norm(given, shape, weight) + norm(given, shape, eps=1e-3)
        found += [out, *torch.autograd.grad(out.square().sum(), (given, weight))]
    return torch.cat([each.flatten().float() for each in found])


def recurrent(x: torch.Tensor) -> torch.Tensor:
    found = []
    for layer in (torch.nn.GRU(6, 3, 2), torch.nn.LSTM(6, 3, 2), torch.nn.LSTM(6, 3, bias=False, bidirectional=True)):
        layer = layer.to(x.device)
        y, last = layer(x)
        loss = y.square().sum() + sum(each.sum() for each in (last if isinstance(last, tuple) else (last,)))
        found += torch.autograd.grad(loss, (x, *layer.parameters()))
    return torch.cat([each.flatten() for each in found])


OPERATIONS = {
    "arithmetic and views": lambda x: (x.t() * 3 - x[0].unsqueeze(-1)).expand(2, 6, 4).transpose(0, 1)[..., 1:],
    "matrix products": lambda x: torch.addmm(x @ x.t(), x, x.t(), beta=0.5),
    "reductions": lambda x: torch.stack([x.sum(), x.mean(), x.std(), x.amax(), x.norm()]),
    "several results": lambda x: torch.cat(
        [x.sort(dim=1).values, x.topk(2, dim=1).values, x.max(dim=1)[0][:, None]], 1
    ),
    "lists": lambda x: torch.cat(torch._foreach_add(list(x.split(2)), 1.5)),
    "shapes that depend on values": lambda x: x[x > 0].cumsum(0) + x.nonzero().sum() + torch.unique(x.round()).numel(),
    "indices": lambda x: x[torch.tensor([1, 0, 1])] + x.index_select(0, torch.tensor([1, 2, 1], device=x.device)),
    "writes by index": lambda x: x.clone().index_put_((torch.tensor([0, 2]),), torch.tensor(7.0)),
    "out=": lambda x: torch.mul(x, 2, out=torch.empty(0, device=x.device)),
    "other dtypes": lambda x: x.view(torch.int32).bitwise_and(0xFF).to(torch.bfloat16).float(),
    "complex": lambda x: torch.view_as_real(torch.view_as_complex(x.view(4, 3, 2)).conj() * 1j),
    "nothing": lambda x: torch.cat([x[:0], x.new_empty(0, 6)]).sum(),
    "random numbers": lambda x: torch.nn.functional.dropout(torch.randn_like(x), 0.5) + torch.rand(6, device=x.device),
    "layers": lambda x: torch.nn.functional.layer_norm(torch.nn.functional.gelu(x), (6,)),
    "attention": lambda x: attended(x, is_causal=True),
    "attention with a mask": lambda x: attended(x, attn_mask=torch.tensor([[True, False], [True, True]]).to(x.device)),
    "attention with fewer heads": lambda x: attended(x, 1, enable_gqa=True),
    "attention in other dtypes": lambda x: attended(x.bfloat16(), scale=0.3).float() + attended(x.double()),
    "attention with a mask that learns": lambda x: attended(x, attn_mask=x[:2, :2]),
    "root mean squares": root_mean_squares,
    "embedding and loss": lambda x: torch.nn.functional.cross_entropy(
        torch.nn.functional.embedding(torch.tensor([1, 0, 3], device=x.device), x), torch.tensor([5, 0, 1]).to(x.device)
    ),
    "statistics that nobody reads": lambda x: torch.nn.BatchNorm1d(6).to(x.device).eval()(x),
    "norms of halves": lambda x: halves(x.requires_grad_()),
    "a recurrent cell": lambda x: recurrent(x.requires_grad_()),
    "convolution": lambda x: torch.nn.functional.conv1d(x[None], x[:, :4, None]),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_gives_what_it_gives_on_the_cpu(name):
    def body(device: str) -> list:
        x = torch.randn(4, 6).to(device)
        out = OPERATIONS[name](x)
        assert out.device.type == device
        return out.detach().cpu(), torch.rand(1)  # and as many random numbers are drawn

    torch.testing.assert_close(late(body, args=("npu",), check_races=True), sim.run(body, 1, ("cpu",)))


def test_one_kernel_keeps_what_one_of_an_accelerator_keeps():
    """Attention its output and log-sums, a norm its output and a number for each row; products keep the scores."""

    def kept_by(function: Callable[..., torch.Tensor], *args, **options) -> int:
        before = torch.npu.memory_allocated()
        out = function(*args, **options)
        return torch.npu.memory_allocated() - before if out.grad_fn else -1

    def body() -> list[int]:
        q, k = (torch.randn(1, heads, 16, 8, device="npu", requires_grad=True) for heads in (4, 2))
        attend, options = torch.nn.functional.scaled_dot_product_attention, {"is_causal": True, "enable_gqa": True}
        fused = kept_by(attend, q, k, k, **options)
        with sdpa_kernel(SDPBackend.MATH):
            scores = kept_by(attend, q, k, k, **options)
        norm = kept_by(torch.nn.functional.rms_norm, q, (8,), torch.ones(8, device="npu"))
        gate, grad = torch.nn.functional.silu(q), torch.ones_like(q)
        before = torch.npu.memory_allocated()
        torch.npu.reset_peak_memory_stats()
        gate.backward(grad)
        return [fused, scores, norm, torch.npu.max_memory_allocated() - before]

    ((fused, scores, norm, gate),) = late(body)
    assert fused == (8 + 1) * 4 * 16 * 4
    assert scores > fused + 4 * 16 * 16 * 4
    assert norm == (8 + 1) * 4 * 16 * 4
    assert gate == 8 * 4 * 16 * 4, "the gradient, and nothing on the way to it"


def test_masks_of_attention_are_those_that_torch_takes():
    def body(device: str) -> list:
        q, found = torch.randn(2, 4, 3, 8).to(device), []
        for shape in ((3, 5), (3, 1), (1, 5), (2, 4, 3, 5), (2, 1, 1, 5), (4, 3, 5), (1, 1)):
            mask = torch.rand(shape).gt(0.4).to(device)
            for each in (mask, mask.float()):
                found.append(F.scaled_dot_product_attention(q, *q.new_ones(2, 2, 4, 5, 8).cumsum(3), each).cpu())
        found.append(F.scaled_dot_product_attention(q, q, q, q[0, 0, :, :3], is_causal=True).cpu())
        with pytest.raises(RuntimeError, match="must match"):
            F.scaled_dot_product_attention(q, q, q, q.new_zeros(3, 2))
        return found

    torch.testing.assert_close(late(body, args=("npu",), check_races=True), sim.run(body, 1, ("cpu",)), equal_nan=True)


@pytest.mark.tier("test")
@pytest.mark.skipif(
    torch.__version__ < "2.12", reason="torch 2.11 refuses views that merge a split dim that is not the first"
)
def test_attention_of_dtensors_stays_split():
    def body() -> list:
        whole = torch.randn(2, 4, 6, 8, generator=torch.Generator().manual_seed(0))
        mask, mesh = torch.rand(6, 6, generator=torch.Generator().manual_seed(1)), init_device_mesh("npu", (2,))
        found = []
        for dim, options in ((0, {"is_causal": True}), (1, {}), (1, {"attn_mask": mask})):
            alone, parts = whole.clone(), distribute_tensor(whole.to("npu"), mesh, [Shard(dim)])
            on_mesh = {name: distribute_tensor(each.to("npu"), mesh) for name, each in options.items() if each is mask}
            for x, given in ((alone, options), (parts, options | on_mesh)):
                x.requires_grad_()
                out = torch.nn.functional.scaled_dot_product_attention(x, x * 2, x, **given)
                out.square().sum().backward()
                assert x is alone or "attn_mask" in options or out.placements == x.grad.placements == (Shard(dim),)
                found.append([full.full_tensor().cpu() if x is parts else full for full in (out.detach(), x.grad)])
        return found

    for found in late(body, 2, check_races=True):
        for alone, split in zip(found[::2], found[1::2], strict=True):
            torch.testing.assert_close(split, alone)


@pytest.mark.tier("test")
def test_training_gives_what_it_gives_on_the_cpu():
    def body(device: str) -> list[float]:
        block = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Dropout(0.2), torch.nn.Linear(8, 4)
        )
        model = torch.nn.Sequential(torch.nn.Embedding(5, 4), block, torch.nn.LayerNorm(4)).to(device)
        optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.1), []
        for step in range(3):
            hidden = checkpoint(model[1], model[0](torch.tensor([step, 1, 4], device=device)), use_reentrant=False)
            loss = torch.nn.functional.mse_loss(model[2](hidden), torch.ones(3, 4).to(device))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    assert late(body, args=("npu",), check_races=True) == sim.run(body, 1, ("cpu",))


def without_autocast(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with torch.autocast("npu", enabled=False):
        return x @ w


# What is called under autocast, and the same with every cast written out.
CAST = {
    "a product": (lambda x, w: x @ w, lambda x, w: x.half() @ w.half()),
    "a layer": (lambda x, w: F.linear(x, w, w[0]), lambda x, w: F.linear(x.half(), w.half(), w[0].half())),
    "attention": (
        lambda x, w: F.scaled_dot_product_attention(*[x.view(1, 2, 2, 4)] * 3, is_causal=True),
        lambda x, w: F.scaled_dot_product_attention(*[x.half().view(1, 2, 2, 4)] * 3, is_causal=True),
    ),
    "a sum": (lambda x, w: (x @ w).sum(), lambda x, w: (x.half() @ w.half()).sum(dtype=torch.float32)),
    "softmax": (lambda x, w: (x @ w).softmax(-1), lambda x, w: (x.half() @ w.half()).float().softmax(-1)),
    "a sum of a dtype": (
        lambda x, w: (x @ w).sum(0, dtype=torch.float64),
        lambda x, w: (x.half() @ w.half()).sum(0, dtype=torch.float64),
    ),
    "a norm": (
        lambda x, w: F.layer_norm(x.half(), (4,), w[0]),
        lambda x, w: F.layer_norm(x.half().float(), (4,), w[0]),
    ),
    "two dtypes": (
        lambda x, w: torch.addcmul(x.half(), x, x.half()),
        lambda x, w: torch.addcmul(x.half().float(), x, x.half().float()),
    ),
    "float64": (lambda x, w: x.double() @ w.double(), lambda x, w: x.double() @ w.double()),
    "a list": (
        lambda x, w: torch.linalg.multi_dot([x, w, w]),
        lambda x, w: torch.linalg.multi_dot([x.half(), w.half(), w.half()]),
    ),
    "autocast switched off": (without_autocast, lambda x, w: x @ w),
    "anything else": (lambda x, w: F.gelu(x.half()), lambda x, w: F.gelu(x.half())),
}


@pytest.mark.parametrize("name", CAST)
def test_autocast_casts_what_it_casts_on_a_gpu(name):
    def body(device: str) -> list:
        x, w = (torch.randn(4, 4).to(device).requires_grad_() for _ in range(2))
        with torch.autocast(device, torch.float16, enabled=device == "npu"):
            out = CAST[name][device == "cpu"](x, w)
        grads = torch.autograd.grad(out.square().sum(), (x, w), allow_unused=True)
        return [each.detach().cpu() for each in (out, *grads) if each is not None]

    (found,), (expected,) = late(body, args=("npu",), check_races=True), sim.run(body, 1, ("cpu",))
    assert found[0].dtype is expected[0].dtype
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-3)


@pytest.mark.tier("test")
def test_a_scaler_of_gradients_skips_the_step_that_overflows():
    def body() -> list:
        weight = torch.nn.Parameter(torch.ones(4, 4, device="npu"))
        scaler, optimizer = torch.amp.GradScaler("npu", init_scale=2.0**15), torch.optim.SGD([weight], lr=1.0)
        seen = []
        for size in (1e3, 1e-3):
            with torch.autocast("npu", torch.float16):
                loss = (torch.full((2, 4), size, device="npu") @ weight).mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            seen.append([scaler.get_scale(), weight[0, 0].item()])
        return seen

    ((first, second),) = right(body)
    assert first == [2.0**14, 1.0], "it has overflown"
    assert second == [2.0**14, pytest.approx(1 - 1e-3 / 4, rel=1e-5)]


def test_a_tensor_says_where_it_is():
    def body() -> None:
        x = torch.nn.Parameter(torch.ones(2, 3, device="npu"))
        twin = copy.deepcopy(x)
        assert (str(x.device), x.is_npu, twin.is_npu, x.cpu().is_npu) == ("npu:0", True, True, False)
        assert twin.requires_grad
        assert twin.untyped_storage().data_ptr() != x.untyped_storage().data_ptr() > 0
        assert x.untyped_storage().nbytes() == 24
        assert "device='npu:0'" in repr(x)
        with pytest.raises(RuntimeError, match=r"same device, but found.* npu:0 and cpu"):
            x + torch.ones(2, 3)
        with pytest.raises(RuntimeError, match="invalid device ordinal: npu:1"):
            torch.ones(1, device="npu:1")
        with pytest.raises(TypeError, match="convert"):
            x.detach().numpy()

    late(body)


@pytest.mark.tier("test")
def test_copies_and_files_of_tensors_and_of_subclasses():
    def body() -> list:
        x = distribute_tensor(torch.arange(6.0, device="npu"), init_device_mesh("npu", (1,)), [Shard(0)])
        whole = torch.ones(4, device="npu")
        twin, first, other = copy.deepcopy([x, whole[:2], whole])
        first += 1  # is a part of the other, as it was
        file = io.BytesIO()
        torch.save([x, whole[1:]], file)
        kept = [torch.load(io.BytesIO(file.getvalue()), map_location=to, weights_only=False) for to in (None, "cpu")]
        assert [each[1].device.type for each in kept] == ["npu", "cpu"]
        x.to_local().zero_()
        return [twin.full_tensor().tolist(), other.tolist(), whole.tolist(), *(each[1].tolist() for each in kept),
                kept[0][0].full_tensor().tolist()]  # fmt: skip

    numbers = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert right(body) == [[numbers, [2.0, 2.0, 1.0, 1.0], [1.0] * 4, [1.0] * 3, [1.0] * 3, numbers]]


def test_values_are_written_to_tensors_of_the_device():
    class Diagonal(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.empty(2, 2))

        def reset_parameters(self) -> None:
            torch.nn.init.eye_(self.weight)  # by torch.eye(out=...)

    def body() -> list:
        with torch.device("meta"):
            model = Diagonal()
        return init_parameters(model, 0, device="npu").weight.tolist()

    assert late(body) == [[[1.0, 0.0], [0.0, 1.0]]]


@pytest.mark.tier("test")
def test_the_engine_packs_the_gradients_of_a_unit_at_once():
    calls: list[str] = []

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func._opname in ("_chunk_cat", "_foreach_copy_", "copy_"):
                calls.append(func._opname)
            return func(*args, **(kwargs or {}))

    def body(ranks: int) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Linear(3, 7)).to("npu")
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        fully_shard(model, mesh=init_device_mesh("npu", (ranks,)), mp_policy=policy)
        loss = model(torch.ones(2, 5, device="npu")).square().sum()
        with Counting():
            loss.backward()
        return [each.grad.full_tensor().cpu() for each in model.parameters()]

    (alone,) = late(body, args=(1,))
    assert calls == ["_chunk_cat"], "one launch for all parameters of a unit"
    calls.clear()
    for grads in late(body, 2, args=(2,), check_races=True):
        torch.testing.assert_close(grads, alone)
    assert calls == ["_chunk_cat"] * 2


@pytest.mark.tier("test")
def test_draws_on_the_device_are_those_on_the_host():
    class Drawn(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.long = (torch.nn.Parameter(torch.empty(size)) for size in ((40, 2500), (300_000,)))

        def reset_parameters(self) -> None:
            torch.nn.init.normal_(self.wide, std=0.02)
            torch.nn.init.uniform_(self.long)

    def filled(device: str, again: bool = False) -> list[torch.Tensor]:
        with torch.device("meta"):
            model = Drawn()
        init_parameters(model, 0, device=device)
        if again:  # changes what is there
            init_parameters(model, 0, init_fn=lambda module: [w.detach().mul_(3).tanh_() for w in module.parameters()])
        return [parameter.detach().cpu() for parameter in model.parameters()]

    def both() -> list[torch.Tensor]:
        return [*filled("npu"), *filled("npu", again=True)]

    assert all(map(torch.equal, late(both)[0], [*filled("cpu"), *filled("cpu", again=True)]))


RANDOM = {
    "normal_": lambda x: x.normal_(),
    "uniform_": lambda x: x.uniform_(),
    "trunc_normal_": torch.nn.init.trunc_normal_,
    "dropout": lambda x: F.dropout(x + 1, 0.5),
    "bernoulli": lambda x: torch.bernoulli(x + 0.5),
    "rand_like": torch.rand_like,
    "a generator": lambda x: x.normal_(generator=seeded(3)),
    "randn": lambda x: randn(x.shape, device_mesh=x.device_mesh, placements=x.placements),
}


@pytest.mark.parametrize("name", RANDOM)
def test_random_operations_on_dtensors_draw_for_each_shard(name):
    """Copies are equal, shards differ, what all ranks hold is what a plain tensor would draw, and ranks go on alike."""

    def body(placements: list) -> tuple[torch.Tensor, ...]:
        mesh = init_device_mesh("npu", (2, 2))
        torch.manual_seed(5)
        drawn = RANDOM[name](distribute_tensor(torch.zeros(7, 5, device="npu"), mesh, placements))
        assert drawn.placements == tuple(placements)
        return drawn.to_local().cpu(), torch.rand(2, device="npu").cpu()

    before = _random._rng_tracker
    copies = late(body, 4, args=([Replicate(), Replicate()],), check_races=True)
    if name != "randn":
        torch.manual_seed(5)
        assert torch.equal(copies[0][0], RANDOM[name](torch.zeros(7, 5)))
    assert all(torch.equal(each, first) for each, first in zip(sum(copies[1:], ()), copies[0] * 3, strict=True))
    shards, after = zip(*late(body, 4, args=([Shard(0), Replicate()],)), strict=True)
    assert torch.equal(shards[0], shards[1])
    assert torch.equal(shards[2], shards[3])
    assert not torch.equal(shards[0][:3], shards[2])
    if name != "trunc_normal_":  # torch draws again until a rank's own shard is within bounds
        assert all(torch.equal(each, after[0]) for each in after)
    assert _random._rng_tracker is before, "each rank's is its own, and goes with the world"


def test_a_sharded_model_resets_its_parameters():
    def body() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        with torch.device("meta"):
            model = torch.nn.Linear(5, 5)
        fully_shard(model, mesh=init_device_mesh("npu", (2,)))
        model.to_empty(device="npu")
        model.reset_parameters()
        shards: list[DTensor] = list(model.parameters())
        return [x.full_tensor().cpu() for x in shards], [x.to_local().cpu() for x in shards]

    (full, first), (again, second) = late(body, 2, check_races=True)
    assert all(map(torch.equal, full, again))
    for shard, other in zip(first, second, strict=True):
        assert 0 < shard.abs().max() <= 5**-0.5
        assert not torch.equal(shard[: len(other)], other)


def test_backward_is_the_rank_s_own_after_inference():
    def body() -> list[float]:
        x = torch.ones(2, device="npu", requires_grad=True)
        with torch.inference_mode(), torch.inference_mode(False), torch.enable_grad():  # torch lets threads do it again
            assert torch._C._is_multithreading_enabled()
            (x * 3).sum().backward()
        return x.grad.tolist()

    assert right(body) == [[3.0, 3.0]]


def test_a_failure_on_the_device_names_the_line_that_has_issued_it():
    def body() -> None:
        table, index = torch.ones(3, 2, device="npu"), torch.tensor([7], device="npu")
        row = torch.nn.functional.embedding(index, table)
        torch.npu.synchronize()
        del row

    with pytest.raises(sim.SimError, match=r"device failed, late, in aten.index_select: .*\n  issued: test_sim_late"):
        late(body)


def test_an_exception_of_a_hook_is_that_of_backward():
    def body(registers, fails) -> None:
        x = torch.ones(4, device="npu", requires_grad=True)
        registers(x, lambda *_: fails())
        (x * 2).sum().backward()

    def by_rank() -> None:
        if dist.get_rank() == 1:
            raise KeyError("rank 1 only")
        dist.barrier()  # and ends there

    for registers in (torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook):
        with pytest.raises(ZeroDivisionError):
            late(lambda: body(lambda x, hook: getattr(x, registers.__name__)(hook), lambda: 1 / 0))  # noqa: B023
        with pytest.raises(KeyError, match="rank 1 only"):
            late(lambda: body(lambda x, hook: getattr(x, registers.__name__)(hook), by_rank), 2)  # noqa: B023


class Fails(torch.autograd.Function):
    """Its backward fails by itself, or in an operation of the device."""

    @staticmethod
    def forward(ctx, x, how):
        ctx.how = how
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return ctx.how(grad), None


@pytest.mark.tier("test")
def test_what_no_device_takes_from_the_host():
    def steps(device: str) -> None:
        x, grad, first, second = (torch.ones(3, device="npu") for _ in range(4))
        step = torch.zeros((), device=device)
        options = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "eps": 1e-8}
        torch._fused_adamw_([x], [grad], [first], [second], [], [step], amsgrad=False, maximize=False, **options)

    def body() -> list[bool]:
        x = torch.ones(3, device="npu")
        for refused in (
            lambda: torch.equal(x, torch.ones(3)),
            lambda: torch.equal(x.sum(), torch.tensor(3.0)),
            lambda: torch.equal(torch.tensor(3.0), x.sum()),
            lambda: x.masked_select(torch.ones(3, dtype=torch.bool)),
            lambda: steps("cpu"),
        ):
            with pytest.raises(RuntimeError, match="same device, but found npu:0 and cpu"):
                refused()
        steps("npu")
        return [torch.equal(x, x.clone()), torch.equal(x, x * 2), x[torch.ones(3, dtype=torch.bool)].numel() == 3]

    assert right(body) == [[True, False, True]]


def test_an_exception_of_what_backward_computes_is_that_of_backward():
    def body(how) -> None:
        Fails.apply(torch.ones(4, device="npu", requires_grad=True), how).sum().backward()

    with pytest.raises(ZeroDivisionError):
        late(lambda: body(lambda grad: 1 / 0))
    with pytest.raises(RuntimeError, match="xpected all tensors to be on the same device"):
        late(lambda: body(lambda grad: grad + torch.ones(4)))

    def freed() -> None:
        x = torch.ones(4, device="npu", requires_grad=True)
        weight = torch.ones(4, device="npu")
        y = x * weight  # C++ computes the gradient
        weight.untyped_storage().resize_(0)
        y.sum().backward()

    with pytest.raises(sim.SimError, match="uses memory that was given back"):
        late(freed)


# -- streams -----------------------------------------------------------------------------------------------------------


def on_a_stream(*, enters: bool = True, leaves: bool = True, keeps: bool = True):
    """Work on a stream of its own; without one of these it is wrong."""

    def body() -> float:
        main, side = torch.npu.current_stream(), torch.npu.Stream()
        x = torch.full((64,), 2.0, device="npu")
        if enters:
            side.wait_stream(main)
        with torch.npu.stream(side):
            y = x * 3
        if keeps:
            x.record_stream(side)
        del x
        z = torch.zeros(64, device="npu")
        if leaves:
            main.wait_event(side.record_event())
        return (y + z).sum().item()

    return body


def test_streams_that_wait_are_right_for_every_seed():
    assert right(on_a_stream()) == [384.0]


def test_a_stream_that_does_not_wait_for_what_it_reads():
    text = found(on_a_stream(enters=False))
    assert text.startswith(
        "rank 0 reads a buffer on stream 1 that the default stream writes, and nothing orders them\n"
    )
    assert "\n  first: test_sim_late.py:" in text
    assert "in body, by aten.fill_\n  then:  test_sim_late.py:" in text
    assert "in body, by aten.mul on float32 [64]\n  try: let stream 1 wait: stream.wait_stream(other)" in text
    assert text.endswith("replay: sim.run(..., world_size=1, seed=0, device='npu')")


def test_a_result_that_is_read_too_early():
    text = found(on_a_stream(leaves=False))
    assert "reads a buffer on the default stream that stream 1 writes" in text


def test_memory_that_is_used_again_too_early():
    text = found(on_a_stream(keeps=False))
    assert text.startswith("rank 0 gives back memory to the default stream that stream 1 still uses\n")
    assert "by aten.mul\n  then:  test_sim_late.py" in text
    assert "  try: tensor.record_stream(stream), or let the default stream wait for that stream first\n" in text


def test_memory_that_can_be_used_again_orders_nothing_else():
    """Whether a stream is through when the allocator looks is luck."""

    def body() -> float:
        main, side = torch.npu.current_stream(), torch.npu.Stream()
        x = torch.full((64,), 2.0, device="npu")
        side.wait_stream(main)
        with torch.npu.stream(side):
            y = x * 3
        x.record_stream(side)
        del x
        torch.ones((), device="npu").item()
        z = torch.zeros(64, device="npu")
        return (y + z).sum().item()

    for seed in range(8):
        with pytest.raises(sim.InFlightBufferRace, match="reads a buffer on the default stream that stream 1 writes"):
            sim.run(body, 1, device="npu", check_races=True, seed=seed)


@pytest.mark.tier("test")
def test_memory_of_a_stream_may_be_dropped_while_another_uses_it_if_it_waits_before_it_allocates():
    def body(waits: bool) -> float:
        main, side = torch.npu.current_stream(), torch.npu.Stream()
        with torch.npu.stream(side):
            y = torch.full((64,), 2.0, device="npu")
        main.wait_stream(side)
        z = y * 3
        del y
        if waits:
            side.wait_stream(main)
        with torch.npu.stream(side):
            torch.zeros(8, device="npu")
        return z.sum().item()

    assert right(lambda: body(True)) == [384.0]
    assert "gives back memory to stream 1 that the default stream still uses" in found(lambda: body(False))


def test_the_order_of_writes():
    def body() -> float:
        x, side = torch.zeros(8, device="npu"), torch.npu.Stream()
        torch.npu.synchronize()
        with torch.npu.stream(side):
            x.add_(1)
        x[4:].fill_(3)
        torch.npu.synchronize()
        return x.sum().item()

    assert "writes a buffer on the default stream that stream 1 writes" in found(body)


def test_parts_of_a_buffer_that_do_not_overlap_are_no_race():
    def body() -> list[float]:
        x, side = torch.zeros(4, 2, device="npu"), torch.npu.Stream()
        torch.npu.synchronize()
        with torch.npu.stream(side):
            x[:, 0].add_(1)
        x[:, 1].add_(2)
        torch.npu.synchronize()
        return x.sum(0).tolist()

    assert right(body) == [[4.0, 8.0]]


def test_events_and_streams_say_whether_they_are_done():
    def body() -> None:
        side, x = torch.npu.Stream(), torch.ones(4, device="npu")
        side.wait_stream(torch.npu.current_stream())
        with side:
            assert torch.npu.current_stream() == side != torch.npu.default_stream()
            y = x + 1
        event = side.record_event()
        while not event.query():
            pass
        assert torch.npu.Event(enable_timing=True).query()
        assert side.query()
        torch.npu.current_stream().wait_event(event)
        assert y.tolist() == [2.0] * 4
        event.synchronize()
        side.synchronize()
        assert event.elapsed_time(event) == 0.0

    late(body, check_races=True)


def test_nothing_runs_before_somebody_waits_for_it():
    def body() -> None:
        torch.ones(4, device="npu")
        event = torch.npu.current_stream().record_event()
        assert not event.query()
        torch.npu.synchronize()
        assert event.query()

    late(body)


def test_no_more_work_waits_than_a_device_can_hold():
    queue, done = LateQueue(0), []
    lane = queue.new_lane(0, "kernels")
    for number in range(3000):
        queue.put(lane, "", "", lambda number=number: done.append(number))
    assert done == list(range(3000 - 1024))


# -- memory of the host ------------------------------------------------------------------------------------------------


def to_the_host(*, waits: bool):
    def body() -> list[float]:
        x = torch.full((4,), 2.0, device="npu")
        y = torch.empty(4, pin_memory=True)
        assert y.is_pinned()
        assert not torch.ones(2).is_pinned()
        y.copy_(x, non_blocking=True)
        if waits:
            torch.npu.current_stream().synchronize()
        result = (y * 1).tolist()
        torch.npu.synchronize()
        return result

    return body


def test_a_late_copy_to_the_host_has_to_be_waited_for():
    assert right(to_the_host(waits=True)) == [[2.0] * 4]
    assert str(late(to_the_host(waits=False))) == "[[nan, nan, nan, nan]]"
    with pytest.raises(sim.InFlightBufferRace) as caught:
        late(to_the_host(waits=False), check_races=True)
    assert "reads a buffer that a copy on the default stream writes and that it has not waited for" in str(caught.value)
    assert "try: synchronize the stream, or an event that is recorded behind the copy, first" in str(caught.value)


@pytest.mark.tier("test")
def test_a_late_copy_from_the_host_reads_what_is_there_then():
    def body(waits: bool, pinned: bool) -> float:
        x = torch.full((4,), 2.0)
        y = (x.pin_memory() if pinned else x).to("npu", non_blocking=True) if pinned else x.to("npu", non_blocking=True)
        return y.sum().item()

    def reused(waits: bool) -> float:
        x = torch.full((4,), 2.0).pin_memory()
        y = x.to("npu", non_blocking=True)
        if waits:
            torch.npu.synchronize()
        x.zero_()
        return y.sum().item()

    assert right(lambda: body(True, False)) == right(lambda: body(True, True)) == right(lambda: reused(True)) == [8.0]
    assert late(lambda: reused(False)) == [0.0]
    with pytest.raises(sim.InFlightBufferRace, match="writes a buffer that a copy on the default stream reads"):
        late(lambda: reused(False), check_races=True)


# -- communication -----------------------------------------------------------------------------------------------------


def gathered(*, waits: bool):
    def body() -> list[float]:
        x, out = torch.full((2,), dist.get_rank() + 1.0, device="npu"), torch.empty(4, device="npu")
        work = dist.all_gather_into_tensor(out, x, async_op=True)
        del x  # the group keeps it until it is through
        torch.zeros(2, device="npu")
        if waits:
            work.wait()
        result = (out * 1).tolist()
        work.wait()
        return result

    return body


def test_a_collective_that_is_waited_for():
    assert right(gathered(waits=True), 2) == [[1.0, 1.0, 2.0, 2.0]] * 2


def test_a_collective_that_is_not_waited_for():
    text = found(gathered(waits=False), 2)
    assert "reads a buffer on the default stream that the stream of group 'world' writes" in text
    assert "in body, by all_gather #0 of group 'world'\n  then:  test_sim_late.py" in text


def test_a_wait_on_another_stream_does_not_help():
    def body() -> float:
        x, side = torch.ones(4, device="npu"), torch.npu.Stream()
        work = dist.all_reduce(x, async_op=True)
        with torch.npu.stream(side):
            work.wait()
        return (x * 1).sum().item()

    assert "reads a buffer on the default stream that the stream of group 'world' writes" in found(body, 2)


def test_what_was_received_is_given_back_once_nobody_has_it():
    def body() -> list[int]:
        x, out = torch.ones(64, device="npu"), torch.empty(128, device="npu")
        dist.all_gather_into_tensor(out, x)
        del out
        return torch.npu.memory_allocated()

    assert late(body, 2) == [256, 256]


def test_copies_that_differ_are_found_on_devices():
    def body(differs: bool) -> None:
        x = torch.ones(4, device="npu")
        x[dist.get_rank()] += differs
        sim.check_replicas(x, group=dist.group.WORLD)

    late(body, 2, args=(False,), check_races=True)
    with pytest.raises(sim.ReplicaMismatch, match="differ"):
        late(body, 2, args=(True,))


@pytest.mark.tier("test")
def test_an_input_that_is_overwritten_too_early():
    def body(waits: bool) -> float:
        x, out = torch.ones(4, device="npu"), torch.empty(2, device="npu")
        work = dist.reduce_scatter_tensor(out, x, async_op=True)
        if waits:
            work.wait()
        x.zero_()
        work.wait()
        return out.sum().item()

    assert right(lambda: body(True), 2) == [4.0, 4.0]
    assert "writes a buffer on the default stream that the stream of group 'world' reads" in found(
        lambda: body(False), 2
    )


def test_objects_go_over_the_device_in_a_group_that_has_no_other():
    def body(backend: str | None) -> list[str]:
        dist.init_process_group(backend)
        group = dist.new_group([0, 1])
        dist.all_gather_object([None, None], dist.get_rank(), group=group)
        return [device.type for device in group._device_types]

    for backend, kinds in (("hccl", ["npu"]), ("gloo", ["cpu"]), ("cpu:gloo,npu:hccl", ["cpu", "npu"])):
        assert late(lambda backend=backend: body(backend), 2, check_races=True) == [kinds] * 2
    assert late(lambda: body(None), 2) == [["cpu", "npu"]] * 2
    assert sim.run(lambda: body("hccl"), 2) == [["cpu"]] * 2


def test_a_group_takes_tensors_of_its_devices_only():
    def reduces(device: str) -> None:
        dist.all_reduce(torch.ones(1, device=device))

    def sends(device: str) -> None:
        dist.send(torch.ones(1, device=device), 1) if dist.get_rank() == 0 else dist.recv(torch.ones(1), 0)

    for backend, device in (("hccl", "cpu"), ("gloo", "npu")):
        for body in (reduces, sends):
            with pytest.raises(sim.RankFailed, match=f"no backend type is associated with device type {device}"):
                late(body, 2, args=(device,), backend=backend)
        late(reduces, 2, args=("cpu" if device == "npu" else "npu",), backend=backend)


def test_after_a_barrier_the_host_may_read_what_was_copied():
    def body(waits: bool) -> list[float]:
        y = torch.empty(4, pin_memory=True)
        y.copy_(torch.ones(4, device="npu"), non_blocking=True)
        if waits:
            dist.barrier()
        return (y * 1).tolist()

    assert right(lambda: body(True), 2) == [[1.0] * 4] * 2
    assert str(late(lambda: body(False), 2)) == str([[float("nan")] * 4] * 2)


def test_ranks_that_do_not_agree():
    def splits() -> None:
        rank, x = dist.get_rank(), torch.ones(4, device="npu")
        dist.all_to_all_single(torch.empty(4, device="npu"), x, [2, 2], [1, 3] if rank == 0 else [2, 2])

    def devices() -> None:
        dist.all_reduce(torch.ones(4, device="npu" if dist.get_rank() == 0 else "cpu"))

    for body, text in ((splits, "rank 0 sends 1 elements to rank 0"), (devices, "on the host")):
        with pytest.raises(sim.CollectiveMismatch, match=text):
            late(body, 2)


# -- the rank's device, and other worlds -------------------------------------------------------------------------------


def test_the_platform_is_that_of_an_npu():
    def body() -> None:
        platform = get_platform()
        assert type(platform) is NpuPlatform
        assert (platform.name(), platform.device_count()) == ("simulated npu", 1)
        assert platform.device() == torch.device("npu:0")
        assert platform.has_streams
        platform.set_device(0)
        with pytest.raises(ValueError, match="this process sees 1 of them"):
            platform.set_device(1)
        x = torch.zeros(1000, device=platform.device())
        stream = platform.new_stream()
        stream.wait_stream(platform.current_stream())
        with platform.use_stream(stream):
            y = x + 1
            event = platform.new_event()
            event.record()
        platform.record_stream(x, stream)
        event.wait()
        assert y.sum().item() == 1000
        stats = platform.memory_stats()
        assert (stats.allocated, stats.peak_allocated, stats.reserved) == (8000, 8004, 2 * 4096 + 512)
        del x, y
        platform.reset_peak_memory()
        assert platform.memory_stats().peak_allocated == 0
        platform.synchronize()
        x = torch.zeros(2000, device=platform.device())  # takes back what no stream uses any more
        most = platform.memory_stats().peak_reserved
        platform.empty_cache()
        del x
        torch.zeros(1, device=platform.device())
        assert platform.memory_stats().reserved < platform.memory_stats().peak_reserved == most
        assert 0 < platform.total_memory() == 64 << 30
        platform.manual_seed(3)
        platform.synchronize()
        assert get_platform("cpu").device_type == "cpu"
        assert torch.accelerator.current_accelerator() == torch.device("npu")

    late(body)


def test_gradients_on_their_way_to_the_host_keep_their_memory():
    def body() -> list[float]:
        copies = CopyStreams(get_platform())
        gradient = torch.ones(1000, device="npu") * 2
        on_host = copies.to_host(gradient)
        del gradient
        other = torch.ones(1000, device="npu") * 3  # would take the memory
        copies.finish()
        return [on_host.sum().item(), other.sum().item()]

    assert late(body, check_races=True) == [[2000.0, 3000.0]]
    assert {str(late(body, seed=seed)) for seed in SEEDS} == {"[[2000.0, 3000.0]]"}


def test_the_comparison_of_a_step_is_read_when_it_has_come():
    def body(key: int) -> str:
        log, platform = GroupLog(dist.group.WORLD), get_platform()
        log.note("gather", bytes([key]), "a unit")
        log.compare(platform, 1)
        try:
            log.check()
        except RuntimeError:
            return "different"
        return "equal"

    for options in ({"check_races": True}, *({"seed": seed} for seed in SEEDS)):
        assert late(lambda: body(0), 2, **options) == ["equal"] * 2
        assert late(lambda: body(dist.get_rank()), 2, **options) == ["different"] * 2


def test_the_platform_records_memory(tmp_path):
    path = tmp_path / "memory" / "rank-0.pickle"

    def body() -> None:
        with get_platform().recorded_memory(path):
            kept = torch.ones(1000, device="npu")
            del kept
            torch.ones(300, device="npu")
        torch.ones(2000, device="npu")

    for _ in range(2):  # torch_npu writes over what is there
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x" * 10_000)
        late(body)
        assert path.stat().st_mode & 0o400
        seen = pickle.loads(path.read_bytes())
        traces = [(event["action"], event["size"]) for event in seen["device_traces"][0]]
        assert traces == [("alloc", 4096), ("free_completed", 4096), ("alloc", 1536), ("free_completed", 1536)]
        assert "test_sim_late.py" in seen["device_traces"][0][0]["frames"][0]["filename"]
        assert seen["segments"] == []


def test_what_torch_npu_says_of_streams_and_seeds():
    def body() -> None:
        torch.npu.set_stream(None)
        assert torch.npu.current_stream() == torch.npu.default_stream()
        side = torch.npu.Stream(priority=-1)
        assert side != torch.npu.default_stream()
        with torch.npu.stream(None):
            assert torch.npu.current_stream() == torch.npu.default_stream()
        with torch.npu.stream(side):
            again = torch.npu.current_stream()
            assert (again, hash(again)) == (side, hash(side))
        torch.npu.set_stream(side)
        assert torch.npu.current_stream() == side
        event = torch.npu.Event(enable_timing=False, blocking=False, interprocess=False)
        assert event.query()  # it was never recorded
        event.wait()
        event.synchronize()
        get_platform().manual_seed(7)
        state = torch.npu.get_rng_state("npu")
        first = torch.rand(3, device="npu").tolist()
        torch.npu.set_rng_state(state, "npu:0")
        assert torch.rand(3, device="npu").tolist() == first == torch.rand(3, generator=seeded(7)).tolist()

    late(body)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_tied_weights_stay_tied():
    def body() -> tuple:
        net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        net[1].weight = net[0].weight
        weight = net[0].weight
        net.to("npu")
        assert net[0].weight is net[1].weight is weight
        assert weight.device.type == "npu"
        net(torch.ones(1, 4, device="npu")).sum().backward()
        grad = weight.grad.tolist()
        net.cpu()
        assert net[0].weight is weight
        assert weight.grad.tolist() == grad
        return str(weight.device), len(list(net.parameters()))

    assert right(body) == [("cpu", 3)]


def test_a_tensor_grows():
    def body() -> list[float]:
        x = torch.arange(6.0).to("npu")[2:5]
        x.resize_(2)
        assert x.tolist() == [2.0, 3.0]
        x.resize_(1000)
        assert x[:4].tolist() == [2.0, 3.0, 4.0, 5.0]
        assert x[4:].isnan().all().item()
        assert torch.npu.memory_allocated() == 4024  # with the six that it was a part of
        return x.fill_(1).sum().item()

    assert right(body) == [1000.0]


def test_a_scalar_takes_the_place_of_an_element():
    def body() -> list[float]:
        x = torch.arange(6.0).to("npu")
        scalar = torch.empty((), device="npu").set_(x.untyped_storage(), 3, ())
        scalar.fill_(7)
        return [scalar.item(), x[3].item()]

    assert right(body) == [[7.0, 7.0]]


def test_hooks_are_seen_as_they_are():
    class Hook:
        is_mine = True

        def __call__(self, grad: torch.Tensor) -> torch.Tensor:
            return grad * 2

        def method(self, grad: torch.Tensor) -> torch.Tensor:
            return grad * 3

    def body() -> float:
        x, own = torch.ones(2, device="npu", requires_grad=True), Hook()
        x.register_hook(own)
        x.register_hook(own.method)
        found = list(x._backward_hooks.values())
        assert isinstance(found[0], Hook)
        assert found[0].is_mine
        assert found[1].__self__ is own
        x.sum().backward()
        return x.grad.sum().item()

    assert late(body) == [12.0]


def test_storages_lose_their_memory_and_get_it_back():
    def body() -> None:
        x = torch.ones(1000, device="npu")
        storage = x.untyped_storage()
        storage.resize_(0)
        assert (storage.nbytes(), torch.npu.memory_allocated()) == (0, 0)
        with pytest.raises(sim.SimError, match="memory that was given back"):
            x.add_(1)
        storage.resize_(4000)
        assert torch.npu.memory_allocated() == 4000
        assert x.isnan().all().item()
        assert x.fill_(2).sum().item() == 2000
        with pytest.raises(sim.SimError, match="from 4,000 to 8 bytes"):
            storage.resize_(8)

    late(body)


def check_is_unharmed() -> None:
    """What the process, and worlds without such a device, see of the name npu."""
    assert not torch.accelerator.is_available()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert get_platform().device_type == "cpu"
        torch.manual_seed(0)
    x = torch.ones(3, requires_grad=True)
    (x * x).sum().backward()
    assert x.grad.tolist() == [2.0] * 3
    storage = torch.UntypedStorage(8)
    assert storage.resize_(4).nbytes() == 4
    assert torch.ones(2).data_ptr() > 0


def test_worlds_after_it_are_as_before():
    def on_cpu() -> float:
        assert get_platform().device_type == "cpu"
        x = torch.ones(3, requires_grad=True)
        dist.all_reduce(y := (x * x).detach())
        (x * y).sum().backward()
        return x.grad.sum().item()

    def mapped() -> str:
        torch.npu.synchronize()
        with torch.npu.stream(torch.npu.Stream()):
            return str((torch.ones(2, device="npu").npu() + 1).device)

    kinds = {
        "cpu": lambda: sim.run(on_cpu, 2) == [6.0, 6.0],
        "late": lambda: late(lambda: torch.ones(3, device="npu").sum().item()) == [3.0],
        "mapped": lambda: sim.run(mapped, 2, map_device="npu") == ["cpu", "cpu"],
        "meta": lambda: sim.run(lambda: str(torch.ones(2).device), 1, device="meta") == ["meta"],
    }
    for name in ("mapped", "late", "cpu", "late", "mapped", "meta", "late"):
        assert kinds[name](), name
        check_is_unharmed()


def test_outside_of_such_a_world_there_is_no_npu():
    kept = late(lambda: torch.ones(2, device="npu"))[0]
    for touch in (lambda: torch.ones(1, device="npu"), lambda: kept + 1, lambda: torch.npu.FloatTensor):
        with pytest.raises((sim.SimError, AttributeError), match=r"device='npu'|has no attribute"):
            touch()
    with pytest.raises(sim.SimError, match=r"needs an npu, which only ranks have whose world"):
        sim.run(lambda: kept + 1, 1)


def test_what_torch_lacks_is_said(monkeypatch):
    monkeypatch.delattr(torch._C, "_acc")
    with pytest.raises(sim.SimError, match=r"has no torch._C._acc.create_empty_tensor"):
        late(lambda: None)


def test_a_world_has_either_devices_or_maps_them():
    with pytest.raises(ValueError, match="it has devices of its own, of which none is mapped"):
        sim.world(2, device="npu", map_device="cuda")
