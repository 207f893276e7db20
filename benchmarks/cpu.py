"""The CPU as a device to measure, and the cases worth measuring on it."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import Case

CASES = {
    case.name: case
    for case in (
        Case("lra-1024", batch=4, heads=8, length=1024, width=32),
        Case("lra-2048", batch=4, heads=8, length=2048, width=32),
        Case("lra-4096", batch=4, heads=8, length=4096, width=32),
        Case("wikitext", batch=16, heads=8, length=256, width=16, is_causal=True),
        Case("wide", batch=2, heads=8, length=2048, width=64),
    )
}


class Cpu:
    """Wall-clock seconds, and the growth of the process's resident memory."""

    name = "cpu"

    def describe(self) -> dict[str, Any]:
        """The load is that of the minute before: above 0.5 or so, other programs share the cores and the numbers."""
        load = round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None
        return {"device": cpu_model(), "threads": torch.get_num_threads(), "load": load}

    def seconds(self, call: Callable[[], object]) -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    def peak_bytes(self, call: Callable[[], object]) -> int | None:
        """How far the resident memory rises above where it stood, as Linux counts it; None elsewhere.

        It is what the machine must have, in pages of 4 KiB: kernels' own buffers count, memory reserved but never
        written does not. A first call pays for what is made once; what the C library holds back is returned before
        the second one, lest it be used again unseen.
        """
        status, clear = Path("/proc/self/status"), Path("/proc/self/clear_refs")
        if not (status.exists() and clear.exists()):
            return None
        call()
        gc.collect()
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is None:
            return None
        trim(0)
        clear.write_text("5")  # sets the peak to the present

        def read(field: str) -> int:
            return (
                next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith(field)) * 1024
            )

        before = read("VmRSS:")
        call()
        return max(0, read("VmHWM:") - before)


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
