"""Run a function in two processes of one process group."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from tests.processes import quick_context


def in_two_processes(work: Callable[[int, str], None], folder: str) -> None:
    """`work(rank, folder)` for rank 0 and 1, connected by gloo. It leaves its results in files."""
    method = quick_context().get_start_method()
    start_processes(_one, (work, folder), nprocs=2, start_method=method)  # type: ignore[no-untyped-call]


def _one(rank: int, work: Callable[[int, str], None], folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    work(rank, folder)
    dist.barrier()
    # Not by way of the interpreter's end: a thread of gloo's that lets go of a tensor then aborts the process.
    os._exit(0)
