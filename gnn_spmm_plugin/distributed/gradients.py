"""Gradients of parameters that every rank has a copy of."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def all_reduce_gradients(parameters: torch.nn.Module | Iterable[Tensor], group: Any = None) -> None:
    """Adds up the gradients of all ranks, so that each steps alike; call it between ``backward`` and ``step``.

    For a loss that is a sum over nodes, each rank's over its own: divide by the number of nodes of all ranks, not of
    one. `DistributedDataParallel` is for the other case, a mean over batches of equal size: it divides by the number of
    ranks, and reduces while the backward runs, among the exchanges of features. Here what is reduced is some megabytes
    after gigabytes of features, in one operation for each dtype.

    Args:
        parameters: a module or parameters, the same on all ranks. One that has no gradient on some rank counts as zero
            there; one that has none anywhere keeps none.
        group: of the processes; None: the default one. Without one, nothing is to be done.

    Raises:
        TypeError: a gradient is sparse.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(group) == 1:
        return
    given = parameters.parameters() if isinstance(parameters, torch.nn.Module) else parameters
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for p in given:
        if p.requires_grad:
            kinds.setdefault((p.dtype, p.device), []).append(p)
            if p.grad is not None and p.grad.layout != torch.strided:
                raise TypeError(
                    f"a gradient is sparse ({p.grad.layout}), e.g. of Embedding(sparse=True); make it dense"
                )
    for (dtype, device), ps in kinds.items():
        # One number more for each parameter: on how many ranks it has a gradient.
        pieces = [torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in ps]
        has = torch.tensor([p.grad is not None for p in ps], dtype=dtype, device=device)
        flat = torch.cat([*pieces, has])
        dist.all_reduce(flat, group=group)
        *sums, has = flat.split([*(p.numel() for p in ps), len(ps)])
        for p, total, there in zip(ps, sums, has.tolist(), strict=True):
            if there and p.grad is None:
                p.grad = total.view_as(p).clone()
            elif p.grad is not None:
                p.grad.detach().copy_(total.view_as(p))
