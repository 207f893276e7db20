"""A cache in pages: every row decodes what it decodes alone, rows come and go, and pages are used again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mgk.nn import PagedCache
from tests.models.common import MODERN, make, random_tokens
from tests.nn.common import make as make_module
from tests.nn.common import normal
from tests.ops.triton_env import DEVICE, strict_memory

# Logits are float32, of sums of a dozen numbers of the order of 1.
CLOSE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5}
FORMS: dict[str, dict[str, Any]] = {
    "paper": {},
    "modern": MODERN,
    "learned": {"positions": "learned"},
    "grouped": {"heads": 4, "num_kv_heads": 2},
    "window": {"window": 4},
    "global": {"window": 4, "global_every": 2, "layers": 3},
}


def served(model: Any, cache: PagedCache, script: list[tuple[str, list[int], int]], texts: dict[int, Tensor]) -> None:
    """Follow a script: ("step", rows, new) gives each row its next tokens, ("new", [row], text) begins a text."""
    alone = {number: model(text[None])[0] for number, text in texts.items()}
    text_of: dict[int, int] = {}
    for what, rows, number in script:
        if what == "new":
            if rows[0] in text_of:
                cache.release(rows[0])
            text_of[rows[0]] = number
            continue
        starts = [cache.lengths[row] for row in rows]
        tokens = [texts[text_of[row]][start : start + number] for row, start in zip(rows, starts, strict=True)]
        logits = model(torch.stack(tokens), cache=cache.at(rows))
        for found, row, start in zip(logits, rows, starts, strict=True):
            torch.testing.assert_close(found, alone[text_of[row]][start : start + number], **CLOSE)


SCRIPT: list[tuple[str, list[int], int]] = [
    ("new", [2], 0), ("step", [2], 7), ("new", [0], 1), ("step", [0], 3), ("step", [0, 2], 1), ("step", [2, 0], 1),
    ("new", [1], 2), ("step", [1], 1), ("step", [0, 1, 2], 2), ("new", [0], 3), ("step", [0], 9), ("step", [1, 0], 1),
    ("step", [2, 1, 0], 1), ("new", [2], 1), ("step", [2], 12), ("step", [0, 2], 1),
]  # fmt: skip


@pytest.mark.parametrize("kind", ["softmax", "mgk", "mgk-hard", "smgk", "smgk-positions", "mgk-variance"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("page_size", [3, 20])
@torch.no_grad()
def test_rows_decode_what_they_decode_alone(kind: str, form: str, page_size: int) -> None:
    """Texts of different lengths, which begin at different times; with 20 positions a page is a row."""
    model = make("language", kind, **FORMS[form])
    texts = {number: random_tokens(20, seed=number) for number in range(4)}
    pages = 3 if page_size == 20 else 15
    cache = model.new_paged_cache(rows=3, num_pages=pages, page_size=page_size, max_length=20)
    served(model, cache, SCRIPT, texts)
    for row in range(3):
        cache.release(row)
    assert cache.free_pages == pages
    assert cache.lengths == [0, 0, 0]


@pytest.mark.parametrize("kind", ["softmax", "mgk", "smgk"])
@pytest.mark.parametrize("window", [None, 5])
@torch.no_grad()
def test_the_kernel_reads_the_pages(kind: str, window: int | None) -> None:
    """In float32, one and several new positions, against one call in float64."""
    module = make_module(kind, causal=True, window=window)
    x = [normal(14, 12, seed=seed) for seed in range(2)]
    wanted = [module(each[None])[0][0] for each in x]
    single = make_module(kind, causal=True, window=window, impl="triton").to(DEVICE, torch.float32)
    cache = PagedCache([window], 3, 8, 4, 16, torch.device(DEVICE))
    with strict_memory():
        for row, new in ((2, 9), (0, 4)):
            found = single(x[row // 2][None, :new].float().to(DEVICE), cache=cache.at([row]).layers[0])[0][0]
            torch.testing.assert_close(found.double().cpu(), wanted[row // 2][:new], rtol=1e-4, atol=1e-4)
        for new in (1, 1, 3):
            starts = [cache.lengths[row] for row in (0, 2)]
            given = torch.stack([each[start : start + new] for each, start in zip(x, starts, strict=True)])
            found = single(given.float().to(DEVICE), cache=cache.at([0, 2]).layers[0])[0]
            for each, expected, start in zip(found, wanted, starts, strict=True):
                torch.testing.assert_close(each.double().cpu(), expected[start : start + new], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_window_gives_pages_back() -> None:
    """Where every layer has one, a row keeps the pages that its window reaches; else it keeps all."""
    for options, most in (({"window": 4}, 2), ({"window": 4, "global_every": 2}, 10)):
        model = make("language", "smgk", **options)
        cache = model.new_paged_cache(rows=1, num_pages=10, page_size=2, max_length=20)
        text = random_tokens(1, 20)
        for position in range(20):
            step = model(text[:, position : position + 1], cache=cache.at([0]))
        assert 10 - cache.free_pages == most
        torch.testing.assert_close(step, model(text)[:, -1:], **CLOSE)


@torch.no_grad()
def test_bytes_are_those_of_the_rows() -> None:
    module = make_module("smgk")
    cache = PagedCache([None], 2, 8, 4, None, torch.device("cpu"))
    module(normal(1, 5, 12), cache=cache.at([1]).layers[0])
    module(normal(2, 1, 12), cache=cache.at([0, 1]).layers[0])
    assert cache.at([0, 1]).bytes == 7 * 3 * (4 + 4) * 8
    other = module.new_cache(1)
    module(normal(1, 6, 12), cache=other)
    assert cache.at([1]).bytes == other.bytes


@torch.no_grad()
def test_wrong_calls_are_errors() -> None:
    model = make("language", "smgk")
    cache = model.new_paged_cache(rows=2, num_pages=3, page_size=4, max_length=8)
    tokens = random_tokens(1, 6)
    for rows in ([], [0, 0], [2], [0, 5]):
        with pytest.raises(ValueError, match=r"^rows: expected different numbers from 0 to 1, got"):
            cache.at(rows)
    with pytest.raises(TypeError, match=r"^rows: expected an integer, got str"):
        cache.at(["a"])  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"^row: expected a number from 0 to 1, got 2"):
        cache.release(2)
    model(tokens, cache=cache.at([0]))
    with pytest.raises(ValueError, match=r"^cache: expected 2 free pages for 6 more positions of 1 rows, got 1"):
        model(tokens, cache=cache.at([1]))
    with pytest.raises(ValueError, match=r"^cache: expected at most max_length = 8 positions in a row, got 9 in row 0"):
        model(tokens[:, :3], cache=cache.at([0]))
    assert cache.lengths == [6, 0]
    assert cache.free_pages == 1
    with pytest.raises(ValueError, match=r"^cache: expected one for a batch of 1, got one for 2"):
        model(tokens, cache=cache.at([0, 1]))
    with pytest.raises(ValueError, match=r"^key_padding_mask: expected None with a cache in pages"):
        model(tokens[:, :1], torch.ones(1, 7, dtype=torch.bool), cache=cache.at([0]))
    with pytest.raises(TypeError, match=r"^cache: expected one that is not in pages, for beam search"):
        cache.at([0]).reorder(torch.tensor([0]))
    layer = model.encoder.stack.layers[0].attention
    with pytest.raises(ValueError, match=r"^need_weights: expected False with a cache in pages"):
        layer(normal(1, 1, 12), cache=cache.at([0]).layers[0], need_weights=True)
    with pytest.raises(ValueError, match=r"^variant: expected softmax, mgk or smgk for a cache in pages, got 'mlk'"):
        make("language", "mlk").new_paged_cache(rows=2, num_pages=3)
    for name in ("rows", "num_pages", "page_size", "max_length"):
        with pytest.raises(ValueError, match=f"^{name}: expected at least 1, got 0"):
            model.new_paged_cache(**{"rows": 2, "num_pages": 3, "page_size": 4, "max_length": 8} | {name: 0})
