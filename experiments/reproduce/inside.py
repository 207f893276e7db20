"""What the attention of a trained model looks like, in numbers for the record: ranks, how much its heads differ, and
for some runs the maps of one input.

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

LENGTH = 512  # inputs are cut here, and shorter ones left out: ranks of matrices of one size
EXAMPLES = 8  # fewer where there are many layers and heads
MATRICES = 256
BINS = 64  # of a map, each way
DEPTH = 4  # layers of which a record has maps, evenly spread


@torch.no_grad()
def inside(run: Path, data_root: Path | None = None, *, maps: bool = False) -> dict[str, Any] | None:
    """Means over examples (and heads) for each layer, with `maps` those of the first example, too; None if the test
    split has no input long enough.
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
    """Pooled maps of every head of some layers, as text; the layers are counted from 1."""
    last = len(summaries) - 1
    shown = sorted({round(last * part / (DEPTH - 1)) for part in range(DEPTH)})
    return {
        "map_layers": [layer + 1 for layer in shown],
        "maps": [[pack_map(pooled.sum(0)) for pooled in summaries[layer].pooled] for layer in shown],
    }


def pack_map(weights: Float[Tensor, "g g"]) -> str:
    """A square in 256 shades, the roots of its weights, so that faint ones are not lost."""
    shades = (255 * (weights / weights.max()).sqrt()).round().to(torch.uint8)
    return base64.b64encode(zlib.compress(shades.numpy().tobytes(), 9)).decode("ascii")


def unpack_map(text: str) -> Float[Tensor, "g g"]:
    """The weights as shares of the largest; their roots are right to half a part in 255."""
    shades = torch.frombuffer(bytearray(zlib.decompress(base64.b64decode(text))), dtype=torch.uint8)
    side = math.isqrt(len(shades))
    return (shades.view(side, side) / 255).square()
