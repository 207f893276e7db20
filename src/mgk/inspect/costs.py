"""FLOPs and parameters against the number of heads, mixtures with half of the baseline's: Figures 3 and 7."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mgk.ops.arguments import check_count
from mgk.ops.cost import Dimensions, attention_flops, parameters, projection_flops
from mgk.variants import LABELS, MIXTURES


@dataclass(frozen=True)
class Curve:
    """One model over the baseline's numbers of heads; `heads` are its own."""

    name: str
    heads: tuple[int, ...]
    flops: tuple[int, ...]
    parameters: tuple[int, ...]


def cost_curves(
    variants: Sequence[str] = ("softmax", "mgk", "smgk"),
    *,
    heads: Sequence[int] = (2, 4, 8, 16),
    head_dim: int = 32,
    width: int = 64,
    hidden: int = 128,
    layers: int = 2,
    length: int = 4000,
    causal: bool = False,
    halve: bool = True,
) -> list[Curve]:
    """Forward FLOPs of one input and parameters of the layers (attention and feed-forward) of each variant.

    With `halve`, a mixture has half of the baseline's heads, as in the paper. Defaults: the paper's retrieval task.
    """
    for name, number in (("head_dim", head_dim), ("hidden", hidden), ("layers", layers)):
        check_count(name, number)
    curves = []
    for variant in variants:
        halved = halve and variant in MIXTURES
        own = [max(1, n // 2) if halved else n for n in heads]
        calls = [
            Dimensions(
                variant=variant, heads=n, head_dim=head_dim, queries=length, keys=length, embed_dim=width, causal=causal
            )
            for n in own
        ]
        feed_forward = 2 * width * hidden
        flops = [
            layers * (attention_flops(d).forward + projection_flops(d).forward + 2 * feed_forward * length)
            for d in calls
        ]
        sizes = [layers * (parameters(d) + feed_forward + hidden + width + 4 * width) for d in calls]
        curves.append(
            Curve(LABELS.get(variant, variant) + ", half the heads" * halved, tuple(own), tuple(flops), tuple(sizes))
        )
    return curves
