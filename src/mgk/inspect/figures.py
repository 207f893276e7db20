"""The paper's figures for any numbers: arrays in, a matplotlib `Figure` out, in one style for all eyes.

Needs the extra `plot`. No figure touches pyplot or a global setting.

L layers, H heads, G bins of a pooled map.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mgk.inspect.costs import Curve

try:
    import matplotlib
    from matplotlib.colors import LinearSegmentedColormap, LogNorm, Normalize
    from matplotlib.figure import Figure
except ImportError:
    raise ImportError("figures need matplotlib; pip install 'mgk[plot]'") from None

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

COLOURS = ("#0068ac", "#cd5500", "#008a66", "#b6548c", "#786e00", "#3c3c3c")  # after Okabe and Ito, as on the page
DASHES = ("-", "--", ":", "-.")
MARKERS = ("o", "s", "^", "D", "v", "P")
STYLE: dict[str, Any] = {
    "font.size": 9, "font.family": "DejaVu Sans", "axes.spines.top": False, "axes.spines.right": False,
    "axes.grid": True, "grid.color": "#d9dbe2", "grid.linewidth": 0.6, "axes.edgecolor": "#5c6270",
    "axes.axisbelow": True, "axes.titlesize": 10, "axes.titleweight": "bold", "legend.frameon": False,
    "lines.linewidth": 1.8, "lines.markersize": 5, "figure.dpi": 110, "savefig.dpi": 200, "svg.fonttype": "none",
    "svg.hashsalt": "mgk", "image.interpolation": "nearest",
}  # fmt: skip
PURPLE = LinearSegmentedColormap.from_list("attention", ["#ffffff", "#e2e2f2", "#a498d0", "#623c98", "#260a4a"])

Points = tuple[Sequence[float], Sequence[float]]


def styled() -> AbstractContextManager[None]:
    """Our style, for the lines within."""
    return matplotlib.rc_context(STYLE)  # type: ignore[no-any-return]


def curves(panels: Mapping[str, Mapping[str, Points]], *, x_label: str = "step", log_y: Sequence[str] = ()) -> Figure:
    """Figures 1 and 4: one panel for each quantity, one line for each model, {quantity: {model: (steps, values)}}."""
    with styled():
        figure = Figure(figsize=(4.2 * len(panels), 3), layout="constrained")
        for axes, (quantity, lines) in zip(_row(figure, len(panels)), panels.items(), strict=True):
            for index, (name, (x, y)) in enumerate(lines.items()):
                axes.plot(x, y, DASHES[index % 4], color=COLOURS[index % 6], label=name)
            axes.set(xlabel=x_label, ylabel=quantity)
            if quantity in log_y:
                axes.set_yscale("log")
        if any(panels.values()):
            figure.axes[0].legend()
        return figure


def attention_maps(
    models: Mapping[str, Sequence[Sequence[Float[Tensor, "g g"]]]],
    *,
    log: bool = False,
    size: float = 0.9,
    names: Sequence[int] | None = None,
) -> Figure:
    """Figures 2 (left), 5 and 8: every head (across) of every layer (down), models side by side.

    `names` are the numbers of the layers, 1, 2, ... if none are given. Colours go to the weight that three rows in four
    stay below, map by map, as on the page.
    """
    depth = max(len(layers) for layers in models.values())
    widths = [max(map(len, layers)) for layers in models.values()]
    numbers = range(1, depth + 1) if names is None else names
    with styled(), matplotlib.rc_context({"axes.grid": False}):
        figure = Figure(figsize=(size * sum(widths) + 0.5 * len(widths), size * depth + 0.6), layout="constrained")
        parts = figure.subfigures(1, len(models), width_ratios=widths, squeeze=False)[0]
        for part, (name, layers), width in zip(parts, models.items(), widths, strict=True):
            part.suptitle(name, fontsize=10, fontweight="bold")
            grid = part.subplots(depth, width, squeeze=False)
            for axes in grid.flat:
                axes.set_axis_off()
            for row, heads in enumerate(layers):
                for column, weights in enumerate(heads):
                    axes = grid[row, column]
                    axes.set_axis_on()
                    axes.set(xticks=[], yticks=[])
                    for spine in axes.spines.values():
                        spine.set(visible=True, linewidth=0.4)
                    image = np.asarray(weights, dtype=float)
                    peak = float(np.quantile(image.max(1), 0.75)) or 1.0
                    norm = LogNorm(peak * 1e-4, peak, clip=True) if log else Normalize(0, peak)
                    axes.imshow(np.maximum(image, peak * 1e-9), cmap=PURPLE, norm=norm)
                    if column == 0:
                        axes.set_ylabel(f"{numbers[row]}", rotation=0, labelpad=8, va="center")
        return figure


def rank_histograms(
    ranks: Mapping[str, Int[Tensor, "l n"]], *, size: int | None = None, layers: Sequence[int] | None = None
) -> Figure:
    """Figures 2 (right) and 6: how the ranks of attention matrices are distributed, a panel for each layer.

    The axis ends at `size`, for matrices that are all `size` x `size`, or at the largest rank there is.
    """
    arrays = {name: np.asarray(values) for name, values in ranks.items()}
    shown = list(range(max(map(len, arrays.values())))) if layers is None else list(layers)
    low = min(int(array.min()) for array in arrays.values())
    high = max([size or 0, *(int(array.max()) for array in arrays.values())])
    step = -(-(high - low + 3) // 32)  # whole ranks, and at most 32 bars
    bins = np.arange(low - 1, high + 1 + step, step) - 0.5
    with styled():
        figure = Figure(figsize=(3.6 * len(shown), 2.8), layout="constrained")
        for axes, layer in zip(_row(figure, len(shown)), shown, strict=True):
            for index, (name, array) in enumerate(arrays.items()):
                if layer < len(array):
                    style = {"color": COLOURS[index % 6], "label": f"{name} (median {np.median(array[layer]):.0f})"}
                    axes.hist(array[layer], bins, histtype="stepfilled", alpha=0.25, **(style | {"label": None}))
                    axes.hist(array[layer], bins, histtype="step", linestyle=DASHES[index % 4], linewidth=1.4, **style)
            axes.set(title=f"layer {layer + 1}", xlabel="rank", ylabel="matrices")
            axes.set_ylim(top=1.3 * axes.get_ylim()[1])  # room for the names
            axes.legend(fontsize=7.5, loc="upper left")
        return figure


def costs(lines: Sequence[Curve], *, heads: Sequence[int]) -> Figure:
    """Figures 3 and 7: FLOPs and parameters against the number of heads of the baseline."""
    with styled():
        figure = Figure(figsize=(8.4, 3), layout="constrained")
        for axes, quantity in zip(_row(figure, 2), ("flops", "parameters"), strict=True):
            for index, curve in enumerate(lines):
                values = [value / (1e9 if quantity == "flops" else 1e3) for value in getattr(curve, quantity)]
                axes.plot(
                    heads,
                    values,
                    DASHES[index % 4],
                    marker=MARKERS[index % 6],
                    color=COLOURS[index % 6],
                    label=curve.name,
                )
            label = "GFLOPs of a forward" if quantity == "flops" else "thousand parameters of the layers"
            axes.set(xlabel="heads of the baseline", ylabel=label, xticks=list(heads), ylim=(0, None))
        figure.axes[0].legend()
        return figure


def bars(panels: Mapping[str, Mapping[str, tuple[float, float]]]) -> Figure:
    """Figure 7 and comparisons of techniques: {quantity: {technique: (value, half of its interval or 0)}}."""
    with styled():
        figure = Figure(figsize=(4.2 * len(panels), 3), layout="constrained")
        for axes, (quantity, values) in zip(_row(figure, len(panels)), panels.items(), strict=True):
            heights, errors = [value for value, _ in values.values()], [error for _, error in values.values()]
            colours = [COLOURS[index % 6] for index in range(len(values))]
            axes.bar(list(values), heights, yerr=errors if any(errors) else None, color=colours, width=0.6, capsize=3)
            axes.set(ylabel=quantity)
            axes.grid(visible=False, axis="x")
            axes.tick_params(axis="x", rotation=20)
        return figure


def save(figure: Figure, stem: str | Path) -> list[Path]:
    """STEM.svg and STEM.png; the same numbers give the same bytes."""
    stem = Path(stem)
    stem.parent.mkdir(parents=True, exist_ok=True)
    paths = [stem.with_name(stem.name + ending) for ending in (".svg", ".png")]
    with styled():
        figure.savefig(paths[0], metadata={"Date": None})
        figure.savefig(paths[1], metadata={"Software": None})
    return paths


def _row(figure: Figure, count: int) -> list[Any]:
    return list(figure.subplots(1, count, squeeze=False)[0])
