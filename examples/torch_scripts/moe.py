"""A mixture of experts, one per rank: tokens travel by an uneven all_to_all that autograd knows how to undo.

torchrun --nproc-per-node 4 examples/torch_scripts/moe.py
python -m sim run --nproc 4 examples/torch_scripts/moe.py
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd

options = argparse.ArgumentParser()
options.add_argument("--width", type=int, default=8)
options.add_argument("--tokens", type=int, default=12, help="on each rank")
WIDTH, TOKENS = options.parse_args().width, options.parse_args().tokens
STEPS, LR = 4, 0.2


def make_model(experts: int) -> tuple[nn.Linear, list[nn.Linear]]:
    torch.manual_seed(0)
    return nn.Linear(WIDTH, experts), [nn.Linear(WIDTH, WIDTH) for _ in range(experts)]


def tokens_of(rank: int, step: int) -> torch.Tensor:
    return torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(1000 * step + rank))


def exchange(x: torch.Tensor, receive: list[int], send: list[int]) -> torch.Tensor:
    return all_to_all_single_autograd(x, receive, send, dist.group.WORLD).wait()


def forward(x: torch.Tensor, router: nn.Linear, expert: nn.Linear) -> torch.Tensor:
    weight, chosen = router(x).softmax(dim=-1).max(dim=-1)
    order = chosen.argsort(stable=True)
    send = chosen.bincount(minlength=dist.get_world_size())
    receive = torch.empty_like(send)
    dist.all_to_all_single(receive, send)
    arrived = exchange(x[order], receive.tolist(), send.tolist())
    back = exchange(expert(arrived).tanh(), send.tolist(), receive.tolist())
    return torch.empty_like(x).index_copy(0, order, back) * weight[:, None]


def train_alone(world_size: int) -> list[float]:
    router, experts = make_model(world_size)
    parameters = [*router.parameters(), *(p for expert in experts for p in expert.parameters())]
    optimizer = torch.optim.SGD(parameters, lr=LR)
    losses = []
    for step in range(STEPS):
        x = torch.cat([tokens_of(rank, step) for rank in range(world_size)])
        weight, chosen = router(x).softmax(dim=-1).max(dim=-1)
        y = torch.stack([experts[e](token).tanh() for e, token in zip(chosen.tolist(), x, strict=True)])
        loss = F.mse_loss(y * weight[:, None], x.flip(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    router, experts = make_model(world_size)
    optimizer = torch.optim.SGD([*router.parameters(), *experts[rank].parameters()], lr=LR)
    losses = []
    for step in range(STEPS):
        x = tokens_of(rank, step)
        loss = F.mse_loss(forward(x, router, experts[rank]), x.flip(-1)) / world_size
        optimizer.zero_grad()
        loss.backward()
        for parameter in router.parameters():  # every rank has a copy of the router
            dist.all_reduce(parameter.grad)
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item())
        if rank == 0:
            print(f"step {step}  loss {losses[-1]:.6f}")
    torch.testing.assert_close(losses, train_alone(world_size), rtol=1e-4, atol=1e-6)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
