"""From `torchrun` to a DCP group, for commands and examples."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from graphattn.dcp import DCP, Reduce
from graphattn.errors import wrong
from graphattn.groups import VirtualGroup


@contextmanager
def context_parallel(size: int, interleave: int, reduce: Reduce) -> Iterator[DCP | None]:
    """A DCP of `size` ranks: the processes that torchrun has started, else virtual ones.

    None for one rank. Under torchrun the process group is opened, with gloo on a CPU and NCCL on
    a GPU, and closed at the end. Raises `ConfigError` when torchrun has started another number.
    """
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if processes == 1:
        yield DCP(VirtualGroup(size), interleave, reduce) if size > 1 else None
        return
    if size != processes:
        raise wrong("dcp", f"{processes}, the processes of torchrun", size, "Make them equal.")
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if cuda else "gloo")
    try:
        members = dist.group.WORLD
        assert members is not None
        yield DCP(members, interleave, reduce)
    finally:
        dist.destroy_process_group()
