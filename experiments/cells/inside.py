"""Measure the attention of a trained model for its record: ranks, effective heads, and for some runs attention maps.

G bins of a pooled map.
"""

from __future__ import annotations

import base64
import math
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mgk.inspect.rank import ranks
from mgk.inspect.runs import Run
from mgk.inspect.summary import Summary, summarise

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

LENGTH = 512  # longer inputs are cut and shorter ones skipped, so that all matrices have one size
EXAMPLES = 8  # at most; fewer if there are many layers and heads
MATRICES = 256  # about as many attention matrices in all
BINS = 64  # of a map, in each direction
DEPTH = 4  # number of layers with maps, evenly spaced


@torch.no_grad()
def inside(run: Path, data_root: Path | None = None, *, maps: bool = False) -> dict[str, Any] | None:
    """Return means over examples (and heads) for each layer, with `maps` also the attention maps of one example.

    Returns None if no input of the test split is long enough.
    """
    opened = Run.open(run, data_root=data_root)
    length = min(LENGTH, getattr(opened.config.model, "max_length", LENGTH))
    each = opened.config.model.layers * opened.config.model.heads
    count = min(EXAMPLES, max(2, MATRICES // each))
    found: list[tuple[list[float], list[float]]] = []
    seen: dict[str, list[Any]] = {}
    for given in opened.examples(length):
        if len(given.tokens) < length:
            continue
        layers = [layer.heads() for layer in opened.layers(given)]
        rank = [float(ranks(head.rows().weights for head in heads).double().mean()) for heads in layers]
        summaries = [summarise(heads, bins=BINS) for heads in layers]
        found.append((rank, [summary.effective_heads for summary in summaries]))
        if maps and not seen:
            seen = pack_maps(summaries)
        if len(found) == count:
            break
    if not found:
        return None
    rank_means, head_means = (torch.tensor(values).mean(0).tolist() for values in zip(*found, strict=True))
    return {"length": length, "examples": len(found), "rank": rank_means, "effective_heads": head_means} | seen


def pack_maps(summaries: Sequence[Summary]) -> dict[str, list[Any]]:
    """Return the pooled maps of every head of some layers as text; layers are counted from 1."""
    last = len(summaries) - 1
    shown = sorted({round(last * part / (DEPTH - 1)) for part in range(DEPTH)})
    return {
        "map_layers": [layer + 1 for layer in shown],
        "maps": [[pack_map(pooled.sum(0)) for pooled in summaries[layer].pooled] for layer in shown],
    }


def pack_map(weights: Float[Tensor, "g g"]) -> str:
    """Encode a map in 256 shades of the square root of its weights, so that small weights remain visible."""
    shades = (255 * (weights / weights.max()).sqrt()).round().to(torch.uint8)
    return base64.b64encode(zlib.compress(shades.numpy().tobytes(), 9)).decode("ascii")


def unpack_map(text: str) -> Float[Tensor, "g g"]:
    """Decode a map as shares of its largest weight. Their square roots have an error of at most 1/510."""
    shades = torch.frombuffer(bytearray(zlib.decompress(base64.b64decode(text))), dtype=torch.uint8)
    side = math.isqrt(len(shades))
    return (shades.view(side, side) / 255).square()
