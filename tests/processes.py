"""Processes that begin with what takes seconds to import: for tests of what they do, not of how they start."""

from __future__ import annotations

from multiprocessing import get_context
from multiprocessing.context import ForkServerContext

MODULES = [
    "lightning_fabric", "mgk.recipes.compare", "experiments.cells.runner", "torch._dynamo",
    "torch.distributed.tensor.parallel", "torch.distributed.fsdp",
]  # fmt: skip


def quick_context() -> ForkServerContext:
    """In place of spawn's: processes get their arguments as its own do, and nothing else of this one."""
    context = get_context("forkserver")
    context.set_forkserver_preload(MODULES)
    return context
