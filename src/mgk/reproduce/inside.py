"""What the attention of a trained model looks like, in numbers for the record: ranks, and how much its heads differ.

L layers, H heads, N positions.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from mgk.analysis.inertia import ranks
from mgk.analysis.runs import Run
from mgk.analysis.summary import summarise

LENGTH = 512  # inputs are cut here, and shorter ones left out: ranks of matrices of one size
EXAMPLES = 8  # fewer where there are many layers and heads
MATRICES = 256


@torch.no_grad()
def inside(run: Path, data_root: Path | None = None) -> dict[str, Any] | None:
    """Means over examples (and heads) for each layer; None if the test split has no input long enough."""
    opened = Run.open(run, data_root=data_root)
    length = min(LENGTH, getattr(opened.config.model, "max_length", LENGTH))
    each = opened.config.model.layers * opened.config.model.heads
    count = min(EXAMPLES, max(2, MATRICES // each))
    found: list[tuple[list[float], list[float]]] = []
    for given in opened.examples(length):
        if len(given.tokens) < length:
            continue
        layers = [layer.heads() for layer in opened.layers(given)]
        rank = [float(ranks(head.rows().weights for head in heads).double().mean()) for heads in layers]
        found.append((rank, [summarise(heads).effective_heads for heads in layers]))
        if len(found) == count:
            break
    if not found:
        return None
    rank_means, head_means = (torch.tensor(values).mean(0).tolist() for values in zip(*found, strict=True))
    return {"length": length, "examples": len(found), "rank": rank_means, "effective_heads": head_means}
