"""`mgk demo`: every variant against the dense formula of the paper, then three small models trained.

B batch, H heads, M components, N positions, D width of a head (of a value too).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import mgk
import mgk.data
from mgk.cli.train import RUNS, write_report
from mgk.ops.arguments import check_count
from mgk.recipes import compare, recipe
from mgk.tables import Table
from mgk.train import Config, replace

VARIANTS = ("mgk soft", "mgk hard", "smgk soft", "smgk hard", "mlk", "smlk")
ATTENTIONS = ("softmax:4", "softmax:2", "smgk:2")  # the second is the control: half the heads, without mixtures
SEEDS = 2
STEPS = 1200
# Expressions such as [MAX 2 [MIN 4 7 ] 0 ], long enough for attention to take a good part of a step.
LISTOPS: dict[str, Any] = {"sizes": (20_000, 500, 1_000), "lengths": (20, 62), "depth": 3, "arguments": 5}
MEANING = (
    f"The table shows what a step costs with half the heads (ms/step). {SEEDS} seeds of models this small do not show "
    "which attention learns better; docs/results.md has the comparisons that do."
)
# The columns of the first table. Without a maximum taken out, exponentials of the last one would be 0 / 0.
INPUTS = {
    "float32": (torch.float32, 1.0),
    "float64": (torch.float64, 1.0),
    "float64, entries of std 300": (torch.float64, 300.0),
}


def error_of(variant: str, dtype: torch.dtype, scale: float, *, length: int = 200, width: int = 16) -> float:
    """Return the largest relative error of a variant's default implementation against its dense formula in float64."""
    batch, heads, generator = 2, 2, torch.Generator().manual_seed(0)

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
    expected = weights @ value
    return float((found.double() - expected).abs().amax() / expected.abs().amax())


def linear_weights(query: Tensor, key: Tensor, log_prior: Tensor) -> Tensor:
    """Compute the N x N weights of Eqn 14, sum_r prior[r] phi(q_i).phi(k_jr), with rows that sum to one."""
    phi_q, phi_k = (torch.nn.functional.elu(x) + 1 for x in (query, key))
    scores = torch.einsum("bhid,bhrjd,hr->bhij", phi_q, phi_k, log_prior.exp())
    return scores / scores.sum(-1, keepdim=True)


def settings(steps: int = 0) -> Config:
    """Return the ListOps recipe made small: short expressions, no dropout, a higher learning rate."""
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


def demo(steps: int = 0, out: Path = RUNS / "demo") -> None:
    """Check every variant against its dense formula, then train softmax with 4 heads and with 2, and sMGK with 2.

    The task is short ListOps, generated on the fly. The demo takes about three minutes on two cores. It ends with a
    table, the paths of the files it wrote and commands that open them. Run it again to continue a demo that was
    stopped.

    In Python: `mgk.cli.demo.demo()`.

    Args:
        steps: training steps of each model; 0 is long enough to see them learn.
        out: folder for the data, the runs and the table.
    """
    config = settings(steps)
    errors = [[variant, *(f"{error_of(variant, *inputs):.0e}" for inputs in INPUTS.values())] for variant in VARIANTS]
    caption = "Largest relative error against the dense formula in float64"
    print(Table(["variant", *INPUTS], errors, caption).markdown())
    print(f"Training {', '.join(ATTENTIONS)} with {SEEDS} seeds on short ListOps (10 classes: chance is 10%)")
    data = Path(out) / "data"
    runs = Path(out) / f"steps-{config.steps}"  # a run of another length is another run
    path = mgk.data.prepare("listops", root=data, **LISTOPS)
    found = compare(config, ATTENTIONS, seeds=SEEDS, out=runs, data_root=data, quiet=False)
    print(f"{found.table()}\n{MEANING}\ndata: {path}\nruns: {runs}\ntable: {runs / 'comparison.md'}")
    write_report(runs, data)
    for command, run in (("eval", runs / "smgk-2" / "seed-0"), ("explore", runs)):
        print(f"mgk {command} {run} --data-root {data}")
