"""A checkpoint stores a tensor with two names once, and a part of a tensor on its own."""

from __future__ import annotations

import torch

from mgk.train.checkpoint import unique


def test_only_equal_views_of_one_memory_are_one_tensor() -> None:
    weight = torch.arange(6.0).view(2, 3)
    names = {"a": weight, "tied": weight, "row": weight[0], "turned": weight.view(3, 2), "step": weight[:, 0]}
    kept = unique(names | {"one": torch.empty(0), "two": torch.empty(0)})
    assert set(kept) == {"a", "row", "turned", "step", "one", "two"}
    for name, value in kept.items():
        assert torch.equal(value, names.get(name, torch.empty(0)))
