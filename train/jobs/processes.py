"""One process or several: what `torchrun` starts, this module joins.

Every process runs the same code on its share of each batch; weights, gradients and the optimizer's
state are sharded over them (FSDP), and sums are exchanged where a number is of all.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

_LONGEST_WAIT = timedelta(hours=24)  # one process exports or writes answers, the others wait


@dataclass(frozen=True)
class Processes:
    """This process is `rank` of `world`, on `device`."""

    rank: int = 0
    world: int = 1
    device: torch.device = torch.device("cpu")

    @property
    def is_first(self) -> bool:
        """Whether this process writes what is written once."""
        return self.rank == 0

    def sum(self, x: Tensor) -> Tensor:
        """The sum of x over all processes, in place."""
        if self.world > 1:
            dist.all_reduce(x)
        return x

    def wait(self) -> None:
        """Returns when every process is here."""
        if self.world > 1:
            dist.barrier()

    def shard(self, module: nn.Module) -> nn.Module:
        """The module with its trained weights sharded over the processes; frozen ones are whole."""
        if self.world == 1:
            return module
        from torch.distributed.fsdp import fully_shard

        frozen = {p for p in module.parameters() if not p.requires_grad}
        sharded: Any = fully_shard(module, ignored_params=frozen)
        return sharded  # type: ignore[no-any-return]


@contextmanager
def joined_processes() -> Iterator[Processes]:
    """The group that torchrun's environment names, left at the end; alone without it."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    local = int(os.environ.get("LOCAL_RANK", "0"))
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", local) if has_gpu else torch.device("cpu")
    if world == 1:
        yield Processes(device=device)
        return
    if has_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if has_gpu else "gloo", timeout=_LONGEST_WAIT)
    try:
        yield Processes(dist.get_rank(), world, device)
    finally:
        dist.destroy_process_group()
