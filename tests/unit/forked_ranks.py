"""Bodies that run on several ranks of a gloo group, each in a forked process."""

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from det_callbacks.ranks.group import RankGroup

Body = Callable[[RankGroup, int], Any]


def start(rank: int, world_size: int, folder: str, body: Body) -> None:
    # the threads that the parent may have started are not in a forked child
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(f"{folder}/store", world_size),
        rank=rank,
        world_size=world_size,
    )
    RankGroup.timeout_seconds = 2.0
    group = RankGroup().open()
    try:
        said = body(group, rank)
    except Exception as error:  # what is raised is what is tested
        said = f"{type(error).__name__}: {error}"
    Path(folder, str(rank)).write_bytes(pickle.dumps(said))
    os._exit(0)


def run(body: Body, folder: Path, world_size: int = 2) -> list[Any]:
    # forked, since importing torch takes a child longer than the test
    mp.start_processes(
        start, (world_size, str(folder), body), nprocs=world_size, start_method="fork"
    )
    return [pickle.loads((folder / str(rank)).read_bytes()) for rank in range(world_size)]
