"""Draw time against N: `python -m benchmarks.plot results/bench-cuda.json docs/growth`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from mgk.inspect.figures import COLOURS, MARKERS, save, styled

NAMES = {
    "flash": "FlashAttention, 16 heads", "cudnn": "cuDNN, 16 heads", "mgk": "MGK, 8 heads", "smgk": "sMGK, 8 heads",
}  # fmt: skip


def growth_figure(growth: dict[str, dict[str, float]]) -> Figure:
    """Draw the part "growth" of the results, {N: {backend or variant: milliseconds per 2^15 tokens}}."""
    lengths = sorted(int(length) for length in growth)
    with styled():
        figure = Figure(figsize=(6, 3.2), layout="constrained")
        axes = figure.subplots()
        for (variant, name), colour, marker in zip(NAMES.items(), reversed(COLOURS), MARKERS, strict=False):
            axes.plot(lengths, [growth[str(n)][variant] for n in lengths], color=colour, marker=marker, label=name)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xticks(lengths, [f"{length // 1024}k" for length in lengths])
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set(xlabel="N", ylabel="milliseconds", title="Forward and backward, 32,768 tokens in sequences of N")
        axes.legend()
        return figure


def main(source: str, stem: str) -> list[Path]:
    """Draw the figure of the results in `source` as STEM.svg and STEM.png."""
    result: dict[str, Any] = json.loads(Path(source).read_text())
    if "growth" not in result:
        made = "python -m benchmarks.attention --device cuda --parts growth"
        raise ValueError(f"{source}: expected a part 'growth', as `{made}` writes it, got {', '.join(result)}")
    return save(growth_figure(result["growth"]), stem)


if __name__ == "__main__":
    main(*sys.argv[1:3])
