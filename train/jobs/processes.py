"""The process group of a run: one process, or several started by `torchrun`.

Every process runs the same code on its share of each batch. Weights, gradients and the optimizer
state are sharded over the processes (FSDP); numbers that concern the whole batch are summed over
all processes.
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

# The other processes wait while one of them exports the target or writes answers.
_LONGEST_WAIT = timedelta(hours=24)


@dataclass(frozen=True)
class Processes:
    """The place of this process in its group.

    rank: index of this process. world: number of processes. device: where this process computes.
    """

    rank: int = 0
    world: int = 1
    device: torch.device = torch.device("cpu")

    @property
    def is_first(self) -> bool:
        """True for the process that writes the files which are written once per run."""
        return self.rank == 0

    def sum(self, x: Tensor) -> Tensor:
        """Sum x over all processes, in place, and return it."""
        if self.world > 1:
            dist.all_reduce(x)
        return x

    def wait(self) -> None:
        """Block until every process has called this method."""
        if self.world > 1:
            dist.barrier()

    def shard(self, module: nn.Module) -> nn.Module:
        """Shard the trained weights of `module` over the processes and return it.

        Every process keeps a full copy of the frozen weights.
        """
        if self.world == 1:
            return module
        from torch.distributed.fsdp import fully_shard

        frozen = {p for p in module.parameters() if not p.requires_grad}
        sharded: Any = fully_shard(module, ignored_params=frozen)
        return sharded  # type: ignore[no-any-return]


@contextmanager
def joined_processes() -> Iterator[Processes]:
    """Join the process group that torchrun's environment variables describe.

    The group is left at the end of the block. Without these variables the group is this process
    alone. The device is the GPU of this process's local rank if there is a GPU, else the CPU.
    """
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
