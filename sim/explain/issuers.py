"""Issuers of collectives and messages: engines for sharded parameters, stages of pipelines, norms of gradients,
checkpoints; found in the caller's stack.

A collective says how many numbers travel, not whose they are: units of equal size that ranks gather in another order
get each other's values. The methods listed here issue collectives of torch or of this library. Their `self` says what
for.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from types import FrameType, MappingProxyType
from typing import Any, NamedTuple

from hyper_parallel.core.common.torch_compat import plain_name
from hyper_parallel.core.fully_shard.bucket import name_of_unit


class Issuer(NamedTuple):
    """What a collective is for, as the frame of its issuer has it.

    Attributes:
        purpose: Says it, without the parameters.
        owner: The object that issues it, of which each rank has its own; None: nothing more is to be compared.
        what: Names the parameters; called once for each owner.
        made: Numbers the owners of a rank in the order in which they were made; called once for each, 0 means unknown.
    """

    purpose: str
    owner: Any = None
    what: Callable[[Any], str] = str
    made: Callable[[Any], int] = lambda owner: 0


Ask = Callable[[FrameType], Issuer]  # of a frame of the function that issues


def _outer(frame: FrameType) -> FrameType:
    assert frame.f_back is not None, "a function of a library was called"
    return frame.f_back


# -- fully_shard and hsdp ----------------------------------------------------------------------------------------------


def _of_bucket(purpose: str, bucket: Any) -> Issuer:
    return Issuer(purpose, bucket, _bucket_text, _bucket_made)


def _bucket_text(bucket: Any) -> str:
    return str(bucket.identity)


def _bucket_made(bucket: Any) -> int:
    unit = getattr(bucket.params[0].on_gradient, "__self__", None)
    return 0 if unit is None else _hook_of(unit, unit.modules[0])


def _hook_of(unit: Any, module: Any) -> int:
    """torch numbers the hooks of a process: that of a unit's forward says in which order units were made."""
    hooks = module._forward_pre_hooks.items()
    return next((number for number, hook in hooks if getattr(hook, "__self__", None) is unit), 0)


def _norm(frame: FrameType) -> Issuer:
    """Of a reduction over one group: stages of a pipeline have parameters of their own, all others the same ones."""
    group, outer = frame.f_locals["group"], frame.f_back
    found: Mapping[str, Any] = {} if outer is None else outer.f_locals
    if "key" not in found or group is found["stage_group"]:
        return Issuer("gradient norm over stages")
    split = [x.param for x in found["found"] if found["key"] in x.axes]
    return Issuer(f"gradient norm of {len(split)} parameters,", split[0], lambda _: _elements(split))


def _elements(params: list[Any]) -> str:
    return f"{sum(param.numel() for param in params):,} elements"


# -- FSDP2 -------------------------------------------------------------------------------------------------------------


def _fsdp2_text(group: Any) -> str:
    return _params_text(group, group.fsdp_params)


def _params_text(group: Any, params: list[Any]) -> str:
    state = _fsdp2_state(group)
    path = plain_name(group._module_fqn or "")
    start = f"{path}." if path else ""
    texts = []
    for param in params:
        name = plain_name(param._param_fqn or param._module_info.param_name).removeprefix(start)
        texts.append(f"{name} {str(param.orig_dtype).removeprefix('torch.')} {list(param._orig_size)}")
    unit = name_of_unit(path, getattr(state, "path_when_wrapped", ""))  # noted by the simulator
    return (f"{unit}: " if unit else "") + ", ".join(texts)


def _fsdp2_state(group: Any) -> Any:
    from torch.distributed.fsdp._fully_shard._fsdp_state import _get_module_fsdp_state

    return _get_module_fsdp_state(group.modules[0])


def _fsdp2_made(group: Any) -> int:
    state = _fsdp2_state(group)
    return 0 if state is None else _hook_of(state, group.modules[0])


def _fsdp2_reduce(frame: FrameType) -> Issuer:
    found = frame.f_locals
    group, used = found["self"], found.get("fsdp_params_with_grad", ())
    if len(used) == len(group.fsdp_params):
        return Issuer("reduction of", group, _fsdp2_text, _fsdp2_made)
    places = [place for place, param in enumerate(group.fsdp_params) if any(param is each for each in used)]
    return Issuer(f"reduction of {places}", group, lambda owner: _params_text(owner, list(used)), _fsdp2_made)


# -- DistributedDataParallel -------------------------------------------------------------------------------------------


def of_reducer(params: Sequence[Any], names: Mapping[int, str], made: int) -> Issuer:
    """Return the issuer of the reductions of a model's buckets, which C++ code issues; its owner is still to be set.

    Args:
        params: Its parameters.
        names: Of them, by number.
        made: Numbers the models of a process.
    """
    paths = [plain_name(names.get(number, str(number)).removeprefix(".")) for number in range(len(params))]
    texts = [
        f"{path} {str(param.dtype).removeprefix('torch.')} {list(param.shape)}"
        for path, param in zip(paths, params, strict=True)
    ]
    return Issuer("reduction of", None, lambda owner: ", ".join(texts), lambda owner: made)


# -- experts -----------------------------------------------------------------------------------------------------------


def _of_experts(what: str, experts: Any) -> Issuer:
    return Issuer(f"exchange of experts: {what}", experts, lambda owner: f"of {plain_name(owner.fqn) or 'the model'}")


def _rows(frame: FrameType) -> Issuer:
    what = "gradients of rows" if _outer(frame).f_code.co_name == "backward" else "rows"
    return _of_experts(what, frame.f_locals["self"].experts)


# -- stages of a pipeline ----------------------------------------------------------------------------------------------


def _turn(way: str, micro_batch: int, source: int, target: int) -> Issuer:
    return Issuer(f"micro-batch {micro_batch} {way}, stage {source} -> {target}")


def _received(frame: FrameType) -> Issuer:
    outer, stage, source = _outer(frame), frame.f_locals["self"].stage_index, frame.f_locals["info"].source
    if outer.f_code.co_name == "get_fwd_recv_ops":
        return _turn("forward", outer.f_locals["fwd_chunk_id"], source, stage)
    return _turn("backward", outer.f_locals["bwd_chunk_id"], source, stage)


def _sent_forward(frame: FrameType) -> Issuer:
    found = frame.f_locals
    return _turn("forward", found["fwd_chunk_id"], found["self"].stage_index, found["dst"])


def _sent_backward(frame: FrameType) -> Issuer:
    found = frame.f_locals
    return _turn("backward", found["bwd_chunk_id"], found["self"].stage_index, found["grad_recv_stage"])


def _of_batch(name: str) -> Ask:
    """A batch of messages is issued after they were made, which is where `sim.patches` asks what each is for."""
    return lambda frame: Issuer(getattr(frame.f_locals.get(name), "purpose", ""))


# -- the table ---------------------------------------------------------------------------------------------------------


def _always(purpose: str) -> Ask:
    issuer = Issuer(purpose)
    return lambda frame: issuer


def _agreement(frame: FrameType) -> Issuer:
    outer = _outer(frame)
    name = (_outer(outer) if outer.f_code.co_name == "agree" else outer).f_code.co_name
    return Issuer(f"checkpoint: agreement in {name}()")


def _step_of_checkpoint(frame: FrameType) -> Issuer:
    found, step = _outer(frame).f_locals, frame.f_locals["step"]
    for name, what in (("storage_writer", "save to"), ("storage_reader", "load from")):
        if name in found:
            return Issuer(f"checkpoint: {step} of a {what} {getattr(found[name], 'checkpoint_id', 'its folder')}")
    return Issuer(f"checkpoint: {step}")


Methods = Mapping[str, Ask]
_NONE: Methods = MappingProxyType({})
# By file and function. Where several are in a stack, the innermost is asked.
_FILES: Mapping[str, Methods] = MappingProxyType(
    {
        "hyper_parallel/core/fully_shard/bucket.py": {
            "start_gather": lambda frame: _of_bucket("gather of", frame.f_locals["self"])
        },
        "hyper_parallel/core/fully_shard/reduce.py": {
            "reduce": lambda frame: _of_bucket("reduction of", frame.f_locals["self"].bucket),
            "advance": lambda frame: _of_bucket("reduction of", frame.f_locals["self"].owner.bucket),
            "add_up": lambda frame: _of_bucket("reduction of", frame.f_locals["self"].bucket),
        },
        "hyper_parallel/core/fully_shard/clip.py": {"_reduce": _norm},
        "hyper_parallel/core/checkpoint/errors.py": {"gather": _agreement},
        "hyper_parallel/core/expert_parallel/experts.py": {
            "exchange_counts": lambda frame: _of_experts("numbers of rows", _outer(frame).f_locals.get("self")),
            "start": _rows,
        },
        "hyper_parallel/core/expert_parallel/router.py": {
            "_update": _always("balance of experts"),
            "_balanced": _always("balance of experts over a sequence"),
        },
        "hyper_parallel/core/pipeline/tied.py": {
            "copy_values": _always("values of tied weights"),
            "add_gradients": _always("gradients of tied weights"),
        },
        "torch/distributed/pipelining/stage.py": {
            "_get_recv_ops": _received,
            "get_fwd_send_ops": _sent_forward,
            "get_bwd_send_ops": _sent_backward,
        },
        "torch/distributed/pipelining/schedules.py": dict.fromkeys(("_batch_p2p", "<listcomp>"), _of_batch("p")),
        "torch/distributed/distributed_c10d.py": {"batch_isend_irecv": _of_batch("p2p_op")},
        "torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py": {
            "unshard": lambda frame: Issuer("gather of", frame.f_locals["self"], _fsdp2_text, _fsdp2_made),
            "post_backward": _fsdp2_reduce,
        },
        "torch/distributed/checkpoint/utils.py": {
            **dict.fromkeys(("reduce_scatter", "all_reduce", "all_gather", "broadcast"), _step_of_checkpoint),
            "barrier": _always("checkpoint: agreement"),  # of ranks that may each have a folder of their own
        },
        "torch/nn/utils/clip_grad.py": dict.fromkeys(
            ("_get_total_norm", "_clip_grads_with_norm_"), _always("gradient norm")
        ),
    }
)


def issuers_in(file: str) -> Methods:
    """Return the functions of a source file that issue collectives, by name, and how to ask a frame of theirs."""
    path = file.replace(os.sep, "/")
    return next((methods for end, methods in _FILES.items() if path.endswith(end)), _NONE)
