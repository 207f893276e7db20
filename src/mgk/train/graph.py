"""CUDA graphs of full training steps, one per batch shape: a small model's step is hundreds of launches otherwise.

The first batch of a shape runs eagerly as an ordinary step. It compiles kernels (and the model, under torch.compile)
and creates the optimiser's state. The second is captured, which computes nothing, and replayed, as are all later ones.
So every batch is processed exactly once, and a shape that occurs once costs no graph.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mgk.ops.graph import capture, side_stream

Batch = dict[str, Tensor]
Work = Callable[[Batch], None]


class Graphs:
    """Call `work(batch)` with the batch on the GPU, from a graph if possible. `work` leaves its results in tensors.

    All graphs share one memory pool: they never run at the same time, so together they need what the largest needs.
    """

    def __init__(self, work: Work, device: torch.device, pool: Any = None) -> None:
        self.work, self.device = work, device
        self.pool = torch.cuda.graph_pool_handle() if pool is None else pool
        self.seen: set[tuple[Any, ...]] = set()
        self.captured: dict[tuple[Any, ...], tuple[torch.cuda.CUDAGraph, Batch]] = {}

    def __call__(self, batch: Batch) -> None:
        shape = tuple((name, tensor.shape, tensor.dtype) for name, tensor in batch.items())
        if shape not in self.seen:
            self.seen.add(shape)
            self.warm_up(to_device(batch, self.device))
            return
        if shape not in self.captured:
            self.captured[shape] = self.capture(to_device(batch, self.device))
        graph, inputs = self.captured[shape]
        for name, tensor in inputs.items():
            tensor.copy_(batch[name], non_blocking=True)
        graph.replay()

    def warm_up(self, batch: Batch) -> None:
        """Run eagerly on a side stream, as CUDA requires before a capture."""
        with side_stream(self.device) as stream:
            self.work(batch)
        for tensor in batch.values():
            tensor.record_stream(stream)

    def capture(self, inputs: Batch) -> tuple[torch.cuda.CUDAGraph, Batch]:
        work = partial(self.work, inputs)
        return capture(work, self.device, pool=self.pool, advice="add --graphs off")[0], inputs


def to_device(batch: Batch, device: torch.device) -> Batch:
    return {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
