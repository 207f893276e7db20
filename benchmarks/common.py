"""What a benchmark is made of: cases, methods, their inputs, and the report with the environment it was made in.

B batch, H heads, M components, N positions, D width of a head (of a value too).
"""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import mgk
from mgk.environment import commit
from mgk.files import write_json

COMPONENTS = 2
DIRECTIONS = ("forward", "forward+backward")


@dataclass(frozen=True)
class Case:
    """One attention problem. `heads` are the baseline's; a mixture gets half of them."""

    name: str
    batch: int
    heads: int
    length: int
    width: int
    is_causal: bool = False

    def __post_init__(self) -> None:
        for name in ("batch", "heads", "length", "width"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if self.heads % 2:
            raise ValueError(f"heads: expected an even number, which a mixture can halve, got {self.heads}")


@dataclass(frozen=True)
class Method:
    """What computes a case: "sdpa" with all heads, or "mgk" or "smgk" with half of them."""

    operator: str
    e_step: str = "soft"

    @property
    def name(self) -> str:
        return self.operator if self.operator == "sdpa" else f"{self.operator} {self.e_step}"


BASELINE = Method("sdpa")
MIXTURES = (Method("smgk", "soft"), Method("smgk", "hard"), Method("mgk", "soft"), Method("mgk", "hard"))


@dataclass(frozen=True)
class Row:
    """One method on one case. Memory is None where the device cannot tell."""

    case: Case
    method: str
    heads: int
    direction: str
    milliseconds: float  # median over the rounds
    speedup: float  # median over the rounds of baseline / this; the next two are the extremes
    speedup_lowest: float
    speedup_highest: float
    extra_bytes: int | None  # at the peak, beyond the inputs
    error: float  # largest relative error against float64, values and gradients


class Device(Protocol):
    """A machine that can be measured."""

    name: str  # as torch.device takes it

    def describe(self) -> dict[str, Any]: ...
    def seconds(self, call: Callable[[], object]) -> float: ...
    def peak_bytes(self, call: Callable[[], object]) -> int | None: ...


@dataclass(frozen=True)
class Report:
    environment: dict[str, Any]
    rows: list[Row]

    def save(self, path: str | Path) -> Path:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, dataclasses.asdict(self))
        return path

    def tables(self) -> Group:
        """A table per case, a line per method, both directions side by side, and the environment below."""
        tables: dict[Case, Table] = {}
        lines: dict[tuple[Case, str], list[str]] = {}
        for row in self.rows:
            line = lines.setdefault((row.case, row.method), [row.method, str(row.heads)])
            speed = "" if row.method == BASELINE.name else f"{row.speedup:.2f}x"
            memory = "-" if row.extra_bytes is None else f"{row.extra_bytes / 2**20:.1f}"
            line += [f"{row.milliseconds:.1f}", speed, memory]
            if row.direction == DIRECTIONS[-1]:
                line.append(f"{row.error:.0e}")
        for (case, _), line in lines.items():
            if case not in tables:
                title = (
                    f"{case.name}: B={case.batch} N={case.length} D={case.width}{' causal' if case.is_causal else ''}"
                )
                tables[case] = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
                tables[case].add_column("method", min_width=9, no_wrap=True)
                for name in ("heads", "fwd ms", "speed", "MiB", "f+b ms", "speed", "MiB", "error"):
                    tables[case].add_column(name, justify="right", min_width=5, no_wrap=True)
            tables[case].add_row(*line)
        legend = (
            "fwd: forward, f+b: forward and backward; speed: times as fast as sdpa in the same run; "
            "MiB: peak memory beyond the inputs; error: against the dense formula in float64"
        )
        return Group(*tables.values(), legend, ", ".join(f"{name} {value}" for name, value in self.environment.items()))


def environment(device: Device, dtype: torch.dtype) -> dict[str, Any]:
    """What a number depends on beside the code: written with every result."""
    return {
        **device.describe(),
        "dtype": str(dtype).removeprefix("torch."),
        "mgk": mgk.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": commit(),
    }


def make_inputs(case: Case, method: Method, *, device: str, dtype: torch.dtype, seed: int = 0) -> dict[str, Tensor]:
    """Standard normal inputs that require grad; with the paper's shifts (standard normal) and priors that differ."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()

    heads = case.heads if method == BASELINE else case.heads // 2
    each = (case.batch, heads, case.length, case.width)
    inputs = {"query": normal(*each)}
    inputs["key"] = normal(case.batch, heads, COMPONENTS, *each[2:]) if method.operator == "mgk" else normal(*each)
    if method.operator == "smgk":
        inputs["shift"] = normal(heads, COMPONENTS, case.width)
    inputs["value"] = normal(*each)
    if method != BASELINE and method.e_step == "soft":  # the hard E-step has no prior
        inputs["log_prior"] = normal(heads, COMPONENTS).detach().log_softmax(-1).requires_grad_()
    return inputs


def attend(method: Method, inputs: dict[str, Tensor], *, is_causal: bool, impl: str = "auto") -> Tensor:
    if method == BASELINE:
        return scaled_dot_product_attention(inputs["query"], inputs["key"], inputs["value"], is_causal=is_causal)
    operator: Callable[..., Tensor] = getattr(mgk, f"{method.operator}_attention")
    return operator(**inputs, e_step=method.e_step, is_causal=is_causal, impl=impl)
