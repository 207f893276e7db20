"""What a process of `benchmarks.training` does: build one model, compile it, time it, and profile it."""

from __future__ import annotations

import gc
import math
import time
import traceback
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from benchmarks.training_models import SIZES, make, make_batch
from mgk.nn import output
from mgk.ops import linear_cross_entropy as chunked
from mgk.train.graph import Graphs

TOKENS = 32_768  # of a step
SECONDS = 0.35  # for which a mode is timed at a time


@dataclass(frozen=True)
class Row:
    """One model of a group. The methods "loss" and "recompile" are studies of their own."""

    size: str
    method: str
    length: int
    compiles: bool = True

    @property
    def heads(self) -> int:
        parts = self.method.split(":")
        return int(parts[1]) if len(parts) > 1 else SIZES[self.size].heads

    @property
    def rows(self) -> int:
        return max(1, TOKENS // self.length)


def serve(pipe: Connection, row: Row, device: str) -> None:
    """Answer requests (name, arguments...) with what the method of `Measured` of that name returns."""
    if device == "cpu":
        quick_compile()
    measured: Any = None
    while True:
        name, *arguments = pipe.recv()
        try:
            if measured is None:
                measured = STUDIES.get(row.method, Measured)(row, device)
            pipe.send(getattr(measured, name)(*arguments))
        except Exception as error:  # another model may still run
            pipe.send({"error": f"{type(error).__name__}: {str(error)[:300]}", "trace": traceback.format_exc()[-1500:]})


def quick_compile() -> None:
    """Let torch.compile trace but not generate code, which takes minutes on a small CPU."""
    compile = torch.compile
    torch.compile = lambda *args, **options: compile(*args, **options, backend="aot_eager")  # type: ignore[assignment]


class Measured:
    """A model and the times of its steps."""

    def __init__(self, row: Row, device: str) -> None:
        self.row, self.device, self.cuda = row, device, device == "cuda"
        self.size = SIZES[row.size]
        self.batch = make_batch(self.size, row.rows if self.cuda else 2, row.length, device)
        self.graph: Graphs | None = None

    def prepare(self) -> dict[str, Any]:
        """Build and compile; return the seconds of the first step, the peak memory and the loss after two steps."""
        start = time.perf_counter()
        self.model = make(self.row.method, self.size, self.row.length, self.device, self.row.compiles)
        built = time.perf_counter()
        self.model.step(self.batch)
        self.synchronise()
        first = time.perf_counter() - built
        if self.cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        self.estimate = self.seconds(lambda: self.model.step(self.batch), 1)
        peak = torch.cuda.max_memory_allocated() / 2**30 if self.cuda else None
        loss = self.model.loss()
        chance = math.log(self.size.vocabulary if self.size.causal else 2)
        if not abs(loss - chance) < 0.3 * chance:  # random tokens, initial weights, two steps
            raise RuntimeError(f"the loss is {loss}, expected about {chance}; a wrong result is not timed")
        return self.rest() | {
            "build_seconds": built - start, "first_step_seconds": first, "peak_gib": peak, "loss": loss,
            "parameters": self.model.parameters, "graphs_compiled": compiled_graphs(),
        }  # fmt: skip

    def capture(self) -> dict[str, Any]:
        """Record the step in a CUDA graph, or return why that is not possible."""
        graph = Graphs(self.model.step, torch.device("cuda", torch.cuda.current_device()))
        graph(self.batch)
        torch.cuda.empty_cache()
        try:
            graph(self.batch)
            self.synchronise()
        except RuntimeError as error:
            return {"not_captured": str(error)[:300]}
        self.graph = graph
        return self.rest()

    def time(self, mode: str) -> dict[str, Any]:
        """Milliseconds of a step."""
        step = self.graph if mode == "graph" and self.graph is not None else self.model.step
        milliseconds = self.milliseconds(lambda: step(self.batch))
        return {"milliseconds": milliseconds}

    def profile(self) -> dict[str, Any]:
        """Milliseconds of one step by kind of kernel, with the slowest kernels."""
        from torch.profiler import ProfilerActivity, profile

        self.model.step(self.batch)
        self.synchronise()
        with profile(activities=[ProfilerActivity.CUDA if self.cuda else ProfilerActivity.CPU]) as found:
            self.model.step(self.batch)
            self.synchronise()
        kinds: dict[str, float] = defaultdict(float)
        kernels, launches = [], 0
        for each in found.key_averages():
            spent = (each.self_device_time_total if self.cuda else each.self_cpu_time_total) / 1e3
            if spent > 0:
                kinds[kind_of(each.key)] += spent
                launches += each.count
                kernels.append((round(spent, 3), each.count, each.key[:90]))
        return {"kinds": dict(kinds), "kernels": sorted(kernels, reverse=True)[:30], "launches": launches} | self.rest()

    def milliseconds(self, call: Callable[[], object]) -> float:
        """Of one call, over as many as take SECONDS."""
        count = max(3, min(100, round(SECONDS / self.estimate))) if self.cuda else 1
        self.seconds(call, 1)
        return 1e3 * self.seconds(call, count)

    def seconds(self, call: Callable[[], object], count: int) -> float:
        """Seconds of one of `count` calls in a row."""
        self.synchronise()
        start = time.perf_counter()
        for _ in range(count):
            call()
        self.synchronise()
        return (time.perf_counter() - start) / count

    def rest(self) -> dict[str, Any]:
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()
        return {}

    def synchronise(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()


class Loss(Measured):
    """The loss over the vocabulary alone, forward and backward, in several ways."""

    def prepare(self) -> dict[str, Any]:
        rows, (width, vocabulary) = self.batch["tokens"].numel(), (self.size.width, self.size.vocabulary)
        self.hidden = torch.randn(rows, width, device=self.device, requires_grad=True)
        self.weight = torch.randn(vocabulary, width, device=self.device).mul_(0.02).requires_grad_()
        self.target = self.batch["target"].flatten()
        self.estimate, found = 0.01, {}
        for name, loss in self.ways().items():
            try:
                found[name] = self.measure(loss)
            except Exception as error:  # one that this version of PyTorch lacks, or that does not fit
                found[name] = {"error": f"{type(error).__name__}: {str(error)[:200]}"}
            torch.compiler.reset()
            self.rest()
        return {"ways": found}

    def ways(self) -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
        target = self.target

        def full(hidden: Tensor, weight: Tensor) -> Tensor:
            return F.cross_entropy(F.linear(hidden, weight), target, reduction="sum")

        def recomputed(hidden: Tensor, weight: Tensor) -> Tensor:
            return output._losses(hidden, weight, None, target).sum()

        def in_chunks(count: int) -> Callable[[Tensor, Tensor], Tensor]:
            def chunks(hidden: Tensor, weight: Tensor) -> Tensor:
                chunked.CHUNKS, chunked.FEW_BYTES = count, 0
                return chunked.linear_cross_entropy(hidden, weight, None, target, output.IGNORE)

            return chunks

        found: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
            "full": torch.compile(full),
            "recomputed": torch.compile(recomputed),
        }
        for count in (1, 2, 4, 8):
            found[f"{count} chunks"] = torch.compile(in_chunks(count), fullgraph=True)
        found["4 chunks, eager"] = in_chunks(4)
        if hasattr(F, "linear_cross_entropy"):
            options = torch.nn.LinearCrossEntropyOptions()

            def torchs(hidden: Tensor, weight: Tensor) -> Tensor:
                dtype = torch.bfloat16 if hidden.is_cuda else torch.float32
                hidden, weight = hidden.to(dtype), weight.to(dtype)
                return F.linear_cross_entropy(hidden, weight, target, reduction="sum", options=options)

            found["torch's chunks"] = torchs
        return found

    def measure(self, loss: Callable[[Tensor, Tensor], Tensor]) -> dict[str, Any]:
        def step() -> Tensor:
            self.hidden.grad = self.weight.grad = None
            with torch.autocast(self.device, torch.bfloat16, enabled=self.cuda):
                value = loss(self.hidden, self.weight)
            torch.autograd.backward(value / len(self.target))
            return value

        start = time.perf_counter()
        value = float(step().detach()) / len(self.target)
        compiled = time.perf_counter() - start
        if self.cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        step()
        peak = (torch.cuda.max_memory_allocated() - before) / 2**30 if self.cuda else None
        times = [self.milliseconds(step) for _ in range(3)]
        return {"milliseconds": sorted(times)[1], "peak_gib": peak, "first_seconds": compiled, "loss": value}


class Recompile(Measured):
    """How often the model compiles when batch and length change, and how long each first step takes."""

    def prepare(self) -> dict[str, Any]:
        model = make("smgk:6" if self.cuda else "smgk:1", self.size, self.row.length, self.device, True)
        found: list[dict[str, Any]] = []
        rows, length = (32, 1024) if self.cuda else (4, 16)
        for divisors in ((1, 1), (2, 1), (1, 2), (1.5, 1.5), (1, 1)):
            shape = int(rows / divisors[0]), int(length / divisors[1])
            batch = make_batch(self.size, *shape, self.device)
            seconds = [self.seconds(partial(model.step, batch), 1) for _ in range(3)]
            found.append({"shape": list(batch["tokens"].shape), "seconds": seconds, "graphs": compiled_graphs()})
        return {"shapes": found}


STUDIES = {"loss": Loss, "recompile": Recompile}


def compiled_graphs() -> int:
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def kind_of(kernel: str) -> str:
    """What a kernel of a training step is for, by its name."""
    name = kernel.lower()
    if name.startswith(("triton_", "void triton_")):
        return "loss" if "softmax" in name else "fused by torch.compile"
    if any(part in name for part in ("flash", "fmha", "sdpa", "attention", "cudnn")):
        return "attention"
    if any(part in name for part in ("gemm", "nvjet", "cutlass", "xmma", "cublas", "splitk")):
        return "products"
    if name == "gradient_kernel":
        return "loss"
    if name.endswith("_kernel") and " " not in name and ":" not in name:  # ours have plain names
        return "attention"
    if "adam" in name or "multi_tensor" in name:
        return "optimiser"
    if "memcpy" in name or "memset" in name:
        return "copies"
    return "other"
