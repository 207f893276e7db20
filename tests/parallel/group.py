"""Many checks in one group of processes, because starting processes takes longer than the checks.

A check is a function `check_...()` that every process calls. It finds its group in `torch.distributed`, and raises if
the property does not hold.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from tests.processes import quick_context

Check = Callable[[], None]
MODULES = ("tests.parallel.operator_checks", "tests.parallel.model_checks")
WORLDS: dict[int, dict[str, Check]] = {}


def on(*worlds: int) -> Callable[[Check], Check]:
    """Run the check in groups of these sizes."""

    def add(check: Check) -> Check:
        for world in worlds:
            WORLDS.setdefault(world, {})[check.__name__] = check
        return check

    return add


def checks(world: int) -> dict[str, Check]:
    """The checks for groups of this size."""
    for module in MODULES:
        import_module(module)
    return WORLDS[world]


def run(world: int, folder: Path) -> None:
    """Run all checks for groups of this size. Each process leaves a file with the error of each, empty if none."""
    method = quick_context().get_start_method()
    start_processes(_process, (world, str(folder)), nprocs=world, start_method=method)  # type: ignore[no-untyped-call]


def _process(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    meeting, patience = f"file://{folder}/meeting", timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world, timeout=patience)
    for name, check in checks(world).items():
        error = ""
        torch.manual_seed(0)
        try:
            check()
        except Exception:
            error = traceback.format_exc()
        Path(folder, f"{name}-{rank}").write_text(error)
        if error:  # the others wait for this process in vain, or are out of step
            os._exit(0)
    dist.barrier()
    # Not by way of the interpreter's end: a thread of gloo's that lets go of a tensor then aborts the process.
    os._exit(0)
