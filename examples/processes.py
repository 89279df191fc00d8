"""What the examples for several processes share: the group that torchrun starts, and who says what."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel


class Processes:
    """This process and the others; alone where torchrun has not started it.

    Attributes:
        rank: number of this process, from 0 on.
        size: how many there are.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def sum(self, t: Tensor) -> Tensor:
        """The sum over all processes, without a gradient."""
        t = t.detach().clone()
        if self.size > 1:
            dist.all_reduce(t)
        return t

    def mean(self, t: Tensor) -> Tensor:
        """The mean over all processes, without a gradient."""
        return self.sum(t) / self.size

    def share(self, nodes: Tensor, seed: int) -> Tensor:
        """Of `nodes` as many for each process, drawn at random; some come twice where there are not enough."""
        order = torch.randperm(len(nodes), generator=torch.Generator().manual_seed(seed)).to(nodes.device)
        missing = -len(nodes) % self.size
        return nodes[torch.cat([order, order[:missing]])][self.rank :: self.size]

    def parallel(self, model: Module) -> Module:
        """`model` under DistributedDataParallel, which averages gradients; as it is for one process."""
        return DistributedDataParallel(model) if self.size > 1 else model

    def part_ways(self) -> None:
        """From now on each process draws other random numbers."""
        torch.manual_seed(torch.initial_seed() + self.rank)


@contextlib.contextmanager
def started(options: argparse.Namespace) -> Iterator[Processes]:
    """The group that torchrun says there is; ``options.device`` becomes that of this process.

    Only the first process prints, and writes ``--json``. NCCL wants a GPU for each process; where there are not enough,
    they take turns on those there are, through gloo, which is slow.
    """
    if "WORLD_SIZE" not in os.environ:
        yield Processes(0, 1)
        return
    backend = None  # one for each device
    if torch.device(options.device).type == "cuda":
        local, gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        if int(os.environ["LOCAL_WORLD_SIZE"]) > gpus:
            backend = "gloo"
        torch.cuda.set_device(local % gpus)
        options.device = f"cuda:{local % gpus}"
    dist.init_process_group(backend, timeout=timedelta(minutes=10))
    found = Processes(dist.get_rank(), dist.get_world_size())
    with contextlib.ExitStack() as stack:
        if found.rank:
            options.json = None
            stack.enter_context(contextlib.redirect_stdout(stack.enter_context(open(os.devnull, "w"))))
        elif backend is not None:
            print("fewer GPUs than processes: these talk through gloo", file=sys.stderr)
        yield found
    dist.destroy_process_group()  # not after an error: it would wait for the others, who wait for this one
