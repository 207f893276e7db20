"""torch.compile takes forward and backward of every model as one graph: nothing in it waits for a number."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.models.common import MODERN, batch, make
from tests.nn.common import EXACT

CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("classifier", "softmax", {}),
    ("classifier", "mgk", {"positions": "rotary", "recompute": True}),
    ("classifier", "smgk", {"pooling": "padded"}),
    ("classifier", "smlk", {}),
    ("matcher", "smgk-em", {}),
    ("language", "softmax", {"cutoffs": ()}),
    ("language", "smlk", {"cutoffs": ()}),
    ("language", "mgk-hard", {"cutoffs": (), "positions": "learned"}),
    ("language", "smgk", MODERN),
    ("vision", "mgk-variance", {"pooling": "class"}),
]


@pytest.mark.parametrize(("name", "kind", "options"), CASES)
def test_one_graph(name: str, kind: str, options: dict[str, Any]) -> None:
    torch.compiler.reset()
    models = [make(name, kind, layers=1, **options).train() for _ in range(2)]
    data, results = batch(name), []
    for model, compiled in zip(models, (False, True), strict=True):
        loss = torch.compile(model.loss, fullgraph=True, backend="aot_eager") if compiled else model.loss
        value = loss(data)["loss"]
        value.backward()
        results.append([value, *(p.grad for p in model.parameters()), *model.buffers()])
    torch.testing.assert_close(results[0], results[1], **EXACT)
