"""FLOPs and parameters as functions of the number of heads: the paper's Figures 3 and 7."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mgk.ops.arguments import check_count
from mgk.ops.cost import Dimensions, attention_flops, parameters, projection_flops
from mgk.variants import LABELS, MIXTURES


@dataclass(frozen=True)
class Curve:
    """Costs of one model for each number of heads of the baseline; `heads` is the model's own number of heads."""

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
    """Return the forward FLOPs of one input and the parameters of all layers (attention and feed-forward).

    With `halve`, a mixture has half of the baseline's heads, as in the paper. The defaults are those of the paper's
    retrieval task.
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
        label = LABELS.get(variant, variant) + ", half the heads" * halved
        curves.append(Curve(label, tuple(own), tuple(flops), tuple(sizes)))
    return curves
