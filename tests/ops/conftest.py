"""Fixtures shared by the tests of the operators."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from mgk.ops.blockwise import blocks

if TYPE_CHECKING:
    from tests.ops.machine import Machine


@pytest.fixture(scope="module")
def small_blocks() -> Iterator[None]:
    """Let small inputs cross many blocks of queries, keys and heads."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "QUERY_BLOCK", 4)
        patch.setattr(blocks, "KEY_BLOCK", 3)
        patch.setattr(blocks, "BLOCK_NUMBERS", 24)  # two heads of full blocks
        yield


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    from tests.ops.machine import take_the_place_of_a_gpu  # with Triton, which not every test wants

    return take_the_place_of_a_gpu(monkeypatch)
