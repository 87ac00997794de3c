"""Groups: how they are made, split, named and taken down, and what they answer about themselves."""

import datetime
import tempfile

import pytest
import torch
import torch.distributed as dist
from conformance_kit import HOST, NOT_GLOO, all_values, same, values, zeros
from torch import nn

import hyper_parallel as hp
import sim


def adds_up(ctx, group, members) -> None:
    """An all_reduce in `group` reaches exactly `members`."""
    x = values(ctx, ctx.rank, 3)
    dist.all_reduce(x, group=group)
    same(x, all_values(ctx, 3, group=members).sum(0))


@sim.ranks(4)
def test_new_group(ctx):
    halves = [dist.new_group([0, 1]), dist.new_group([3, 2])]
    mine, other = halves[ctx.rank // 2], halves[1 - ctx.rank // 2]
    members = [ctx.rank // 2 * 2, ctx.rank // 2 * 2 + 1]
    assert dist.get_process_group_ranks(mine) == members, "in order of global rank"
    adds_up(ctx, mine, members)
    x = values(ctx, ctx.rank, 3)
    dist.broadcast(x, members[1], group=mine)
    same(x, values(ctx, members[1], 3))
    assert dist.get_rank(other) == -1
    assert dist.get_world_size(other) == -1
    one = dist.new_group([ctx.rank], use_local_synchronization=True)
    adds_up(ctx, one, [ctx.rank])
    adds_up(ctx, dist.new_group(group_desc="again"), range(4))


@pytest.mark.filterwarnings("ignore:Running all_reduce on global rank")
@sim.ranks(3)
def test_an_outsider_of_a_group_does_nothing(ctx):
    group = dist.new_group([0, 1])
    assert dist.get_process_group_ranks(group) == [0, 1], "known to outsiders until they hear of the next group"
    x = values(ctx, ctx.rank, 3)
    work = dist.all_reduce(x, group=group, async_op=True)
    if ctx.rank == 2:
        assert work is None
        same(x, values(ctx, 2, 3))
        assert group == dist.GroupMember.NON_GROUP_MEMBER
    else:
        work.wait()
        same(x, all_values(ctx, 3, group=[0, 1]).sum(0))


@sim.ranks(4)
def test_only_the_members_make_a_group(ctx):
    if ctx.rank in (1, 3):
        group = dist.new_group([1, 3], use_local_synchronization=True)
        assert (group.rank(), group.size()) == (ctx.rank // 2, 2)
        adds_up(ctx, group, [1, 3])
    dist.barrier()


@sim.ranks(4)
def test_ranks_of_groups(ctx):
    group = dist.new_group([1, 3])
    if ctx.rank in (0, 2):
        assert group == dist.GroupMember.NON_GROUP_MEMBER
        return
    assert (dist.get_rank(group), dist.get_world_size(group)) == (ctx.rank // 2, 2)
    assert (group.rank(), group.size()) == (ctx.rank // 2, 2)
    assert [dist.get_group_rank(group, rank) for rank in (1, 3)] == [0, 1]
    assert [dist.get_global_rank(group, rank) for rank in (0, 1)] == [1, 3]
    assert dist.get_process_group_ranks(None) == [0, 1, 2, 3]
    for asked in (dist.get_group_rank, dist.get_global_rank):
        with pytest.raises(ValueError, match="is not part of group"):
            asked(group, 2)


@sim.ranks(2)
def test_what_a_group_says_of_itself(ctx):
    group = dist.group.WORLD
    assert dist.is_initialized()
    assert (dist.get_rank(), dist.get_world_size()) == (ctx.rank, 2)
    assert (group.rank(), group.size()) == (ctx.rank, 2)
    assert group.name() == dist.get_backend()
    assert dist.get_backend() in dist.get_backend_config(group)
    described = dist.new_group([0, 1], group_desc="tp of layer 3")
    assert described.group_desc == "tp of layer 3"
    assert described.group_name != group.group_name
    assert dist.get_pg_count() == 2
    assert type(group).unbox(group.boxed()) is group
    if hasattr(dist, "get_backend_impl"):  # newer than some versions that are supported
        assert dist.get_backend_impl(device=ctx.device) is group.get_backend(ctx.device)
    if ctx.backend in HOST:
        assert group.bound_device_id is None
        assert dist.get_default_backend_for_device("cpu") == "gloo"
        assert not dist.supports_complex(dist.ReduceOp.MAX)


@sim.ranks(2)
def test_the_store_of_a_group(ctx):
    store = dist.group.WORLD.get_group_store()
    store.set(f"from {ctx.rank}", f"value {ctx.rank}")
    assert store.get(f"from {1 - ctx.rank}") == f"value {1 - ctx.rank}".encode()
    dist.barrier()
    store.add("count", ctx.rank + 1)
    dist.barrier()
    assert store.add("count", 0) == 3
    other = dist.new_group([0, 1]).get_group_store()
    assert not other.check(["count"]), "keys are the group's own"
    dist.barrier()


@sim.ranks(2, backends=HOST)
def test_timeouts_and_timing_are_accepted(ctx):
    limit = datetime.timedelta(seconds=30)
    dist.group.WORLD.set_timeout(limit)
    if hasattr(dist, "set_timeout"):
        dist.set_timeout(limit)
    dist.new_group([0, 1], timeout=limit)
    dist.group.WORLD._enable_collectives_timing()
    adds_up(ctx, None, [0, 1])


@sim.ranks(4)
def test_new_subgroups(ctx):
    mine, groups = dist.new_subgroups(2)
    assert len(groups) == 2
    adds_up(ctx, mine, [ctx.rank // 2 * 2, ctx.rank // 2 * 2 + 1])
    mine, _ = dist.new_subgroups_by_enumeration([[3, 0], [1, 2]])
    adds_up(ctx, mine, [ctx.rank, 3 - ctx.rank])


@sim.ranks(4, backends=NOT_GLOO)
def test_split_group(ctx):
    """gloo splits nothing through torch's split_group."""
    group = dist.split_group(split_ranks=[[0, 3], [1, 2]])
    adds_up(ctx, group, [ctx.rank, 3 - ctx.rank])
    alone = dist.split_group(group, [[0], [1]])
    assert alone.size() == 1
    adds_up(ctx, alone, [ctx.rank])


@sim.ranks(4)
def test_mesh_groups(ctx):
    mesh = dist.init_device_mesh(ctx.device_type, (2, 2), mesh_dim_names=("dp", "tp"))
    rows, columns = [ctx.rank // 2 * 2, ctx.rank // 2 * 2 + 1], [ctx.rank % 2, ctx.rank % 2 + 2]
    adds_up(ctx, mesh.get_group("tp"), rows)
    adds_up(ctx, mesh["dp"].get_group(), columns)
    assert [mesh.get_local_rank(axis) for axis in ("dp", "tp")] == [ctx.rank // 2, ctx.rank % 2]
    assert tuple(mesh.get_coordinate()) == divmod(ctx.rank, 2)
    assert len(mesh.get_all_groups()) == 2
    flat = mesh["dp", "tp"]._flatten("all")
    adds_up(ctx, flat.get_group(), range(4))
    cube = dist.init_device_mesh(ctx.device_type, (1, 4), mesh_dim_names=("pp", "cp"))
    adds_up(ctx, cube.get_group("pp"), [ctx.rank])
    adds_up(ctx, cube.get_group("cp"), range(4))


@sim.ranks(4)
def test_a_destroyed_group_is_gone(ctx):
    group = dist.new_group([0, 1, 2, 3])
    adds_up(ctx, group, range(4))
    dist.destroy_process_group(group)
    with pytest.raises(ValueError, match=r"Invalid process group|is not initialized"):
        dist.get_backend(group)
    adds_up(ctx, None, range(4))


@sim.ranks(2, backends=("sim",))
def test_the_default_group_again_after_its_end(ctx):
    adds_up(ctx, None, [0, 1])
    dist.destroy_process_group()
    assert not dist.is_initialized()
    with pytest.raises(ValueError, match="Default process group has not been initialized"):
        dist.barrier()
    dist.init_process_group("gloo")
    assert dist.get_backend() == "gloo"
    adds_up(ctx, None, [0, 1])
    with pytest.raises(ValueError, match="twice"):
        dist.init_process_group("gloo")


@pytest.mark.tier("test")
@sim.ranks(4, backends=("sim", "gloo"))
def test_a_second_default_group_meets_no_group_of_the_first(ctx):
    """torch keeps how results are sharded by meshes that are equal, those of a past default group among them."""

    def gradients(others: int) -> list[float]:
        for _ in range(others):  # else groups of one place have the same names in both
            hp.init_device_mesh(ctx.device_type, (4, 1), mesh_dim_names=("a", "b"))
        mesh = hp.init_device_mesh(ctx.device_type, (2, 2), mesh_dim_names=("replicate", "shard"))
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
        hp.fully_shard(model, mesh=mesh)
        model(torch.ones(3, 4)).square().mean().backward()
        hp.clip_grad_norm_(model, 1.0)
        assert all(parameter.grad.device_mesh is parameter.device_mesh for parameter in model.parameters())
        return [hp.full_tensor(parameter.grad).sum().item() for parameter in model.parameters()]

    first = gradients(0)
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{folder[0]}/second", rank=ctx.rank, world_size=4)
    assert gradients(1) == first


@sim.ranks(2, backends=("sim",))
def test_abort_and_shutdown(ctx):
    """On real backends they stop what is in flight; here nothing is when a rank runs."""
    group = dist.new_group([0, 1])
    adds_up(ctx, group, [0, 1])
    group.abort()
    other = dist.new_group([0, 1])
    other.shutdown()
    x = zeros(ctx, 1)
    dist.all_reduce(x)
    same(x, zeros(ctx, 1))


@sim.ranks(2, backends=("sim",))
def test_what_simulated_groups_do_not_have(ctx):
    group = dist.group.WORLD
    calls = {
        "merge_remote_group": lambda: group.merge_remote_group(group.get_group_store(), 2),
        "split_group of their own": lambda: group.split_group([0, 1]),
        "symmetric memory": group.use_pg_for_symm_mem_rendezvous,
        "completion hooks": lambda: group._register_on_completion_hook(lambda work: None),
        "completion hooks to wait for": group._wait_for_pending_works,
        "abort hooks": lambda: group.register_abort_hook(0, print),
        "hooks before an operation": lambda: group.register_pre_hook(0, print),
        "hooks after an operation": lambda: group.register_post_hook(0, print),
        "new_window": lambda: group.new_window(zeros(ctx, 1)),
        "reconfigure": lambda: group.reconfigure(None),
    }
    for name, call in calls.items():
        with pytest.raises(sim.SimError, match=f"simulated groups have no {name}\n"):
            call()
    for call in (group.unregister_abort_hook, group.unregister_pre_hook, group.unregister_post_hook):
        with pytest.raises(sim.SimError, match="hooks"):
            call(0)
    with pytest.raises(sim.SimError, match="reconfigure"):
        group.get_reconfigure_handle()
    assert {group.supports_abort_hooks, group.supports_completion_hooks, group.supports_reconfigure} == {False}
    assert group.supports_window is False
    with pytest.raises(TypeError, match="shrink"):
        dist.shrink_group([1])
    adds_up(ctx, None, [0, 1])


@sim.ranks(2, backends=("gloo",))
def test_groups_of_processes_have_one_worker_thread(ctx):
    for group in (dist.group.WORLD, dist.new_group([0, 1])):
        backend = group._get_backend(ctx.device)
        assert isinstance(backend, dist.ProcessGroupGloo)
        assert backend.options._threads == 1
