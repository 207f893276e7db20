"""What Transformers' ecosystem expects of a model class, beside its results."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from mgk.hf import MGKModel, merge_heads
from mgk.merge.attention import warn_dense_weights
from tests.hf.common import FOREIGN, config, foreign, stirred


def test_an_image_model_can_be_called_from_several_threads() -> None:
    """No call leaves a trace in the modules that all calls share."""
    model = stirred(MGKModel(config("vision")))
    images = torch.randn(24, 3, 8, 8, generator=torch.Generator().manual_seed(0))

    def run(number: int) -> list[torch.Tensor]:
        found = model(pixel_values=images[number : number + 1], output_hidden_states=True)
        return [found.last_hidden_state, found.pooler_output, *found.hidden_states]

    expected = [run(number) for number in range(24)]
    with ThreadPoolExecutor(8) as pool:
        for one, two in zip(pool.map(run, range(24)), expected, strict=True):
            assert len(one) == len(two)
            assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("name", FOREIGN)
def test_attention_weights_of_merged_models(name: str) -> None:
    """They sum to one for every query that sees a key, and reproduce the layer's output through its values."""
    model, batch = foreign(name)
    small, _ = merge_heads(model, [batch])
    warn_dense_weights.cache_clear()
    with pytest.warns(UserWarning, match="stores the weights of all pairs"):
        found = small(**batch, output_attentions=True).attentions
    heads, length = small.config.mixture_heads, found[0].shape[-1]
    assert [tuple(each.shape) for each in found] == [(3, heads, length, length)] * small.config.num_hidden_layers
    total = found[0].sum(-1)
    assert bool(((total - 1).abs() < 1e-9).logical_or(total == 0).all())
    assert (total == 0).any() == ("attention_mask" in batch and name not in ("bert",))
