"""The six variants of attention, their families and their labels: the only place that lists them."""

from __future__ import annotations

from typing import Literal

Variant = Literal["softmax", "linear", "mgk", "smgk", "mlk", "smlk"]
Prior = Literal["sgd", "em", "uniform"]
FeatureMapName = Literal["elu", "favor", "dpfp"]

LABELS: dict[str, str] = {
    "softmax": "softmax", "linear": "linear", "mgk": "MGK", "smgk": "sMGK", "mlk": "MLK", "smlk": "sMLK",
}  # fmt: skip
VARIANTS = tuple(LABELS)
GAUSSIAN = ("mgk", "smgk")
LINEAR = ("linear", "mlk", "smlk")
PROJECTED = ("mgk", "mlk")  # one key projection per component
SHIFTED = ("smgk", "smlk")  # one key projection, and one shift per component
MIXTURES = (*PROJECTED, *SHIFTED)
PRIORS = ("sgd", "em", "uniform")
FEATURE_MAPS = ("elu", "favor", "dpfp")
