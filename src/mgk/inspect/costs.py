"""FLOPs and parameters as functions of the number of heads: the paper's Figures 3 and 7."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from mgk.models import TransformerConfig
from mgk.models.cost import layer_parameters, stack_flops
from mgk.variants import LABELS, MIXTURES

RETRIEVAL = TransformerConfig()


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
    model: TransformerConfig = RETRIEVAL,
    heads: Sequence[int] = (2, 4, 8, 16),
    length: int = 4000,
    causal: bool = False,
    halve: bool = True,
) -> list[Curve]:
    """Return the forward FLOPs of one input and the parameters of all layers (attention and feed-forward).

    With `halve`, a mixture has half of the baseline's heads, as in the paper. The default model is that of the paper's
    retrieval task. Options that only one variant has, such as a hard E-step, are left out.
    """
    plain = dataclasses.replace(
        model, head_dim=model.width_of_head, prior="sgd", e_step="soft", feature_map="elu", learn_variance=False
    )
    curves = []
    for variant in variants:
        halved = halve and variant in MIXTURES
        own = [max(1, n // 2) if halved else n for n in heads]
        models = [dataclasses.replace(plain, attention=variant, heads=n) for n in own]  # type: ignore[arg-type]
        flops = [stack_flops(each, length, causal=causal).forward for each in models]
        sizes = [each.layers * layer_parameters(each) for each in models]
        label = LABELS.get(variant, variant) + ", half the heads" * halved
        curves.append(Curve(label, tuple(own), tuple(flops), tuple(sizes)))
    return curves
