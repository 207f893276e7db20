"""A cache of 4 bits, whose layers quantise keys and values again every few tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mgk.hf.cache import stack_of
from tests.hf.common import make

pytest.importorskip("optimum.quanto", reason="needs optimum-quanto")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["softmax", "mgk", "smgk"])
def test_a_cache_of_four_bits(kind: str) -> None:
    """While nothing has been quantised twice, the first step is exact; later ones read what 4 bits keep."""
    model, tokens = make("language", kind), torch.arange(1, 17).repeat(2, 1)
    config = {"backend": "quanto", "nbits": 4, "q_group_size": 4, "residual_length": 4}
    options: dict[str, Any] = {"max_new_tokens": 8, "pad_token_id": 0, "do_sample": False, "output_logits": True}
    options["return_dict_in_generate"] = True
    found = model.generate(tokens, cache_implementation="quantized", cache_config=config, **options)
    exact = model.generate(tokens, **options)
    torch.testing.assert_close(found.logits[0], exact.logits[0], rtol=1e-5, atol=1e-5)
    assert found.sequences.shape == exact.sequences.shape == (2, 24)
    assert 0 < (found.logits[1] - exact.logits[1]).abs().max() < 0.5 * exact.logits[1].abs().max()
    assert stack_of(found.past_key_values).bytes < exact.past_key_values.bytes
