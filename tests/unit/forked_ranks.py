"""Bodies that run on several ranks of a gloo group, each in a forked process."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from det_callbacks.ranks.group import RankGroup


def start(rank: int, world_size: int, folder: str, body: Callable[[RankGroup, int], Any]) -> None:
    store = dist.FileStore(f"{folder}/store", world_size)
    torch.set_num_threads(1)  # the threads that the parent may have started are not in a forked child
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    RankGroup.timeout_seconds = 2.0
    group = RankGroup().open()
    try:
        said = repr(body(group, rank))
    except Exception as error:  # what is raised is what is tested
        said = f"{type(error).__name__}: {error}"
    Path(folder, f"{rank}.txt").write_text(said)
    os._exit(0)


def run(body: Callable[[RankGroup, int], Any], folder: Path, world_size: int = 2) -> list[str]:
    # forked, since importing torch takes a child longer than the test
    mp.start_processes(start, (world_size, str(folder), body), nprocs=world_size, start_method="fork")
    return [(folder / f"{rank}.txt").read_text() for rank in range(world_size)]
