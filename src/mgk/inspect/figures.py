"""The paper's figures: each function takes plain arrays and returns a matplotlib `Figure`.

Needs the extra `plot`. Pyplot and global settings are not used. Colours are safe for colour-blind readers.

L layers, H heads, G bins of a pooled map.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mgk.files import new_file
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
    """Use the style of these figures within a `with` block."""
    return matplotlib.rc_context(STYLE)  # type: ignore[no-any-return]


def curves(panels: Mapping[str, Mapping[str, Points]], *, x_label: str = "step", log_y: Sequence[str] = ()) -> Figure:
    """Figures 1 and 4: one panel per quantity, one line per model, {quantity: {model: (steps, values)}}.

    Quantities named in `log_y` have a logarithmic axis.
    """
    with styled():
        figure, row = _panels(len(panels))
        for axes, (quantity, lines) in zip(row, panels.items(), strict=True):
            for index, (name, (x, y)) in enumerate(lines.items()):
                axes.plot(x, y, DASHES[index % 4], color=COLOURS[index % 6], label=name)
            axes.set(xlabel=x_label, ylabel=quantity)
            if quantity in log_y:
                axes.set_yscale("log")
        if any(panels.values()):
            row[0].legend()
        return figure


def attention_maps(
    models: Mapping[str, Sequence[Sequence[Float[Tensor, "g g"]]]],
    *,
    log: bool = False,
    size: float = 0.9,
    names: Sequence[int] | None = None,
) -> Figure:
    """Figures 2 (left), 5 and 8: the maps of all layers (rows) and heads (columns) of some models.

    `names` are the numbers of the layers, by default 1, 2, ... `size` is the side of a map in inches. The colour scale
    of each map ends at the 75% quantile of the row maxima, as on the explorer page.
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
                for axes, weights in zip(grid[row], heads, strict=False):
                    _draw_map(axes, np.asarray(weights, dtype=float), log)
                grid[row, 0].set_ylabel(f"{numbers[row]}", rotation=0, labelpad=8, va="center")
        return figure


def _draw_map(axes: Any, weights: np.ndarray[Any, Any], log: bool) -> None:
    axes.set_axis_on()
    axes.set(xticks=[], yticks=[])
    for spine in axes.spines.values():
        spine.set(visible=True, linewidth=0.4)
    peak = float(np.quantile(weights.max(1), 0.75)) or 1.0
    norm = LogNorm(peak * 1e-4, peak, clip=True) if log else Normalize(0, peak)
    axes.imshow(np.maximum(weights, peak * 1e-9), cmap=PURPLE, norm=norm)


def rank_histograms(ranks: Mapping[str, Int[Tensor, "l n"]], *, size: int | None = None) -> Figure:
    """Figures 2 (right) and 6: histograms of the ranks of attention matrices, one panel per layer.

    The axis ends at `size`, the largest possible rank, or at the largest rank found.
    """
    arrays = {name: np.asarray(values) for name, values in ranks.items()}
    low = min(int(array.min()) for array in arrays.values())
    high = max([size or 0, *(int(array.max()) for array in arrays.values())])
    step = -(-(high - low + 3) // 32)  # integer bins, at most 32
    bins = np.arange(low - 1, high + 1 + step, step) - 0.5
    with styled():
        figure, row = _panels(max(map(len, arrays.values())), 3.6, 2.8)
        for layer, axes in enumerate(row):
            for index, (name, array) in enumerate(arrays.items()):
                if layer < len(array):
                    colour, label = COLOURS[index % 6], f"{name} (median {np.median(array[layer]):.0f})"
                    line = {"linestyle": DASHES[index % 4], "linewidth": 1.4, "label": label}
                    axes.hist(array[layer], bins, histtype="stepfilled", alpha=0.25, color=colour)
                    axes.hist(array[layer], bins, histtype="step", color=colour, **line)
            axes.set(title=f"layer {layer + 1}", xlabel="rank", ylabel="matrices")
            axes.set_ylim(top=1.3 * axes.get_ylim()[1])  # leaves space for the legend
            axes.legend(fontsize=7.5, loc="upper left")
        return figure


def costs(lines: Sequence[Curve], *, heads: Sequence[int]) -> Figure:
    """Figures 3 and 7: FLOPs and parameters against the number of heads of the baseline."""
    quantities = (("flops", 1e9, "GFLOPs of a forward"), ("parameters", 1e3, "thousand parameters of the layers"))
    with styled():
        figure, row = _panels(2)
        for axes, (quantity, unit, label) in zip(row, quantities, strict=True):
            for index, curve in enumerate(lines):
                style = {"marker": MARKERS[index % 6], "color": COLOURS[index % 6], "label": curve.name}
                axes.plot(heads, np.asarray(getattr(curve, quantity)) / unit, DASHES[index % 4], **style)
            axes.set(xlabel="heads of the baseline", ylabel=label, xticks=list(heads), ylim=(0, None))
        row[0].legend()
        return figure


def bars(panels: Mapping[str, Mapping[str, tuple[float, float]]]) -> Figure:
    """Bar charts to compare models: {quantity: {model: (value, half of its confidence interval or 0)}}."""
    with styled():
        figure, row = _panels(len(panels))
        for axes, (quantity, values) in zip(row, panels.items(), strict=True):
            heights, errors = zip(*values.values(), strict=True)
            colours = [COLOURS[index % 6] for index in range(len(values))]
            axes.bar(list(values), heights, yerr=errors if any(errors) else None, color=colours, width=0.6, capsize=3)
            axes.set(ylabel=quantity)
            axes.grid(visible=False, axis="x")
            axes.tick_params(axis="x", rotation=20)
        return figure


def save(figure: Figure, stem: str | Path) -> list[Path]:
    """Write STEM.svg and STEM.png; equal figures give identical files."""
    stem = Path(stem)
    stem.parent.mkdir(parents=True, exist_ok=True)
    paths = [stem.with_name(stem.name + ending) for ending in (".svg", ".png")]
    for path, metadata in zip(paths, ({"Date": None}, {"Software": None}), strict=True):
        with styled(), new_file(path) as temporary:
            figure.savefig(temporary, format=path.suffix[1:], metadata=metadata)
    return paths


def _panels(count: int, width: float = 4.2, height: float = 3.0) -> tuple[Figure, list[Any]]:
    """Create a figure with a row of panels."""
    figure = Figure(figsize=(width * count, height), layout="constrained")
    return figure, list(figure.subplots(1, count, squeeze=False)[0])
