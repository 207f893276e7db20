"""CUDA graph capture, for training steps (`mgk.train`), generation (`mgk.hf`) and benchmarks (`mgk.ops.measure`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

T = TypeVar("T")


@contextmanager
def side_stream(device: torch.device) -> Iterator[Any]:
    """Run what is inside on a stream of its own, as CUDA requires of work before it is captured."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield stream
    torch.cuda.current_stream(device).wait_stream(stream)


def capture(
    work: Callable[[], T], device: torch.device, *, pool: Any = None, advice: str
) -> tuple[torch.cuda.CUDAGraph, T]:
    """Record `work()` in a CUDA graph and return the graph and the result.

    Capturing computes nothing: the result is filled by `graph.replay()`.

    Args:
        work: a function that has run before, so that its kernels are compiled, and that never waits for the device.
        device: the GPU.
        pool: memory pool to share with other graphs that never run at the same time.
        advice: what the error message tells the user to do if capturing fails.
    """
    graph = torch.cuda.CUDAGraph()
    try:
        # thread_local: other threads may use CUDA meanwhile, for example to pin memory or to decode text.
        with torch.cuda.device(device), torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            return graph, work()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise RuntimeError(f"a step cannot be captured in a CUDA graph ({reason}); {advice}") from error
