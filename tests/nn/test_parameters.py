"""How many parameters: the cost model's number for every module, and the authors' totals but for the priors."""

from __future__ import annotations

import itertools

import pytest

from mgk import variants
from mgk.nn import MixtureAttention
from mgk.ops import cost

# Of the authors' retrieval model at 1, 2, 4 and 8 heads of width 32.
AUTHORS = {
    "softmax": (378_562, 395_138, 428_290, 494_594),
    "smgk": (378_694, 395_398, 428_806, 495_622),
    "mgk": (382_726, 403_462, 444_934, 527_878),
}
LAYERS, WIDTH, FEED_FORWARD, COMPONENTS = 2, 64, 128, 2


def count(module: MixtureAttention) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def model_parameters(attention: int) -> int:
    """The two-document matcher around `attention`: embeddings, two pre-LN layers, a LayerNorm, a classifier."""
    embeddings = (512 + 4096) * WIDTH  # bytes and positions
    feed_forward = WIDTH * FEED_FORWARD + FEED_FORWARD + FEED_FORWARD * WIDTH + WIDTH
    norm = 2 * WIDTH
    classifier = 4 * WIDTH * 128 + 128 + 128 * 2 + 2
    return embeddings + LAYERS * (attention + feed_forward + 2 * norm) + norm + classifier


@pytest.mark.parametrize("variant", AUTHORS)
@pytest.mark.parametrize(("place", "heads"), list(enumerate((1, 2, 4, 8))))
def test_authors_totals_differ_only_by_the_priors(variant: str, place: int, heads: int) -> None:
    """The authors' code has one prior per component and layer; the paper, and ours, one per component and head.

    So the totals are equal for softmax and for one head, and ours has M (H - 1) more per layer otherwise.
    """
    ours = model_parameters(count(MixtureAttention(WIDTH, heads, head_dim=32, variant=variant)))
    more = 0 if variant == "softmax" else LAYERS * COMPONENTS * (heads - 1)
    assert ours == AUTHORS[variant][place] + more
    # Without any prior the difference is exactly theirs.
    bare = model_parameters(count(MixtureAttention(WIDTH, heads, head_dim=32, variant=variant, prior="uniform")))
    assert bare == AUTHORS[variant][place] - (0 if variant == "softmax" else LAYERS * COMPONENTS)


@pytest.mark.parametrize("variant", variants.VARIANTS)
@pytest.mark.parametrize("e_step", ["soft", "hard"])
@pytest.mark.parametrize("prior", variants.PRIORS)
def test_cost_model_counts_the_real_module(variant: str, e_step: str, prior: str) -> None:
    gaussian = variant in variants.GAUSSIAN
    if (e_step == "hard" and not gaussian) or (prior == "em" and not (gaussian and e_step == "soft")):
        with pytest.raises(ValueError, match=r"e_step|prior"):
            MixtureAttention(12, 3, variant=variant, e_step=e_step, prior=prior)
        return
    for bias, learn_variance, components, other in itertools.product(
        (True, False), (False, gaussian), (1, 3), (None, 5)
    ):
        module = MixtureAttention(
            12, 3, head_dim=5, variant=variant, num_components=components, e_step=e_step, prior=prior, bias=bias,
            learn_variance=learn_variance, kdim=other, vdim=other,
        )  # fmt: skip
        d = cost.Dimensions(
            variant=variant, heads=3, head_dim=5, queries=1, keys=1, components=components, embed_dim=12, e_step=e_step
        )
        options = {"bias": bias, "prior": prior, "learn_variance": learn_variance, "kdim": other, "vdim": other}
        assert cost.parameters(d, **options) == count(module)  # type: ignore[arg-type]
