"""A picture of time against N: `python -m mgk.bench.plot results/bench-cuda.json docs/growth`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from mgk.analysis.figures import curves, save

NAMES = {"softmax": "softmax, 16 heads (the faster of flash and cuDNN)", "mgk": "MGK, 8 heads", "smgk": "sMGK, 8 heads"}


def growth_figure(growth: dict[str, dict[str, float]]) -> Figure:
    """`growth` is the part of that name: {N: {backend or kind: milliseconds per 2^15 tokens}}."""
    lengths = sorted(int(length) for length in growth)
    lines: dict[str, list[float]] = {name: [] for name in NAMES}
    for length in lengths:
        times = growth[str(length)]
        lines["softmax"].append(min(times["flash"], times["cudnn"]))
        for kind in ("mgk", "smgk"):
            lines[kind].append(times[kind])
    quantity = "ms per 32,768 tokens, forward and backward"
    figure = curves({quantity: {NAMES[k]: (lengths, y) for k, y in lines.items()}}, x_label="N", log_y=[quantity])
    (axes,) = figure.axes
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{length // 1024}k" for length in lengths])
    return figure


def main(source: str, stem: str) -> list[Path]:
    result: dict[str, Any] = json.loads(Path(source).read_text())
    if "growth" not in result:
        made = "python -m mgk.bench.cuda --parts growth"
        raise ValueError(f"{source}: expected a part 'growth', as `{made}` writes it, got {', '.join(result)}")
    return save(growth_figure(result["growth"]), stem)


if __name__ == "__main__":
    main(*sys.argv[1:3])
