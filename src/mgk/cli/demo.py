"""The short tour: every variant beside the dense formula of the paper, then two models trained side by side.

B batch, H heads, M components, N positions, D width of a head (of a value too).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch import Tensor

import mgk
import mgk.data
from mgk.ops.arguments import check_count
from mgk.ops.measure import relative_error
from mgk.recipes import Comparison, compare, recipe
from mgk.train import Config, replace

VARIANTS = ("mgk soft", "mgk hard", "smgk soft", "smgk hard", "mlk", "smlk")
ATTENTIONS = ("softmax:4", "smgk:2")
STEPS = 1500
# Expressions short enough to be learnt in a minute, such as [MAX 2 [MIN 4 7 ] 0 ].
LISTOPS: dict[str, Any] = {"sizes": (20_000, 500, 1_000), "lengths": (6, 30), "depth": 3, "arguments": 4}


@dataclass(frozen=True)
class Agreement:
    """The largest relative error of one variant against its dense formula in float64."""

    variant: str
    float32: float
    float64: float
    extreme: float  # float64, entries of std 300: where unshifted exponentials are 0 / 0


def agreement(variant: str, *, batch: int = 2, heads: int = 2, length: int = 200, width: int = 16) -> Agreement:
    """Run the default implementation of a variant and the formula of the paper on the same numbers."""

    def error(dtype: torch.dtype, scale: float) -> float:
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

        shifted = variant.startswith("s")
        query = scale * normal(batch, heads, length, width)
        key = scale * (normal(batch, heads, length, width) if shifted else normal(batch, heads, 2, length, width))
        value = normal(batch, heads, length, width)
        shift = scale * normal(heads, 2, width)
        log_prior = normal(heads, 2).log_softmax(-1)
        name, _, e_step = variant.partition(" ")
        operator: Callable[..., Tensor] = getattr(mgk, f"{name}_attention")
        arguments = (query, key, shift, value, log_prior) if shifted else (query, key, value, log_prior)
        found = operator(*arguments, **({"e_step": e_step} if e_step else {}))

        query, key, shift, value, log_prior = (x.double() for x in (query, key, shift, value, log_prior))
        keys = key[:, :, None] + shift[:, :, None] if shifted else key
        if name.endswith("mlk"):
            weights = linear_weights(query, keys, log_prior)
        else:
            weights = mgk.attention_weights(query, keys, log_prior, e_step=e_step)
        return relative_error(found, weights @ value)

    return Agreement(variant, error(torch.float32, 1), error(torch.float64, 1), error(torch.float64, 300))


def linear_weights(query: Tensor, key: Tensor, log_prior: Tensor) -> Tensor:
    """The N x N matrix that Eqn 14 never forms: sum_r prior[r] phi(q_i).phi(k_jr), each row divided by its sum."""
    phi_q, phi_k = (torch.nn.functional.elu(x) + 1 for x in (query, key))
    scores = torch.einsum("bhid,bhrjd,hr->bhij", phi_q, phi_k, log_prior.exp())
    return scores / scores.sum(-1, keepdim=True)


def settings(steps: int = 0) -> Config:
    """The recipe of ListOps, made small: short expressions, no dropout, a higher learning rate."""
    steps = check_count("steps", steps or STEPS)
    return replace(
        recipe("lra-listops"),
        model__max_length=LISTOPS["lengths"][1],
        model__dropout=0.0,
        model__attention_dropout=0.0,
        data__options=tuple(
            f"{name}={list(value) if isinstance(value, tuple) else value}" for name, value in LISTOPS.items()
        ),
        data__pad_multiple=16,
        optimiser__lr=2e-3,
        optimiser__warmup=min(100, steps),
        steps=steps,
        eval_every=max(1, steps // 6),
        log_every=25,
        workers=0,
        device="cpu",
    )


def folder(out: str | Path, steps: int = 0) -> Path:
    """Where the runs go; runs of another length are other runs."""
    return Path(out) / f"steps-{settings(steps).steps}"


def demo(
    *, steps: int = 0, out: str | Path = "runs/demo", console: Console | None = None
) -> tuple[list[Agreement], Comparison]:
    """Compare the variants with their formulas, then train; with a console, show it."""
    agreements = [agreement(variant) for variant in VARIANTS]
    if console is not None:
        title = "largest relative error against the dense formula in float64"
        table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
        for column in ("variant", "float32", "float64", "float64, entries of std 300"):
            table.add_column(column, justify="left" if column == "variant" else "right")
        for row in agreements:
            table.add_row(row.variant, *(f"{error:.0e}" for error in (row.float32, row.float64, row.extreme)))
        console.print(table)
        console.print("training softmax with 4 heads, then sMGK with 2, on short ListOps (10 classes: chance is 10%)")
    data = Path(out) / "data"
    path = mgk.data.prepare("listops", root=data, **LISTOPS)
    config, runs = settings(steps), folder(out, steps)
    found = compare(config, ATTENTIONS, out=runs, data_root=data, quiet=console is None)
    if console is not None:
        print(found.table())
        print(f"data: {path}\nruns: {runs}\ntable: {runs / 'comparison.md'}")
    return agreements, found
