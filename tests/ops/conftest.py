"""Fixtures shared by the tests of the operators."""

from collections.abc import Iterator

import pytest

from mgk.ops import blockwise_kernels


@pytest.fixture(scope="module")
def small_blocks() -> Iterator[None]:
    """Let small inputs cross many blocks of queries, keys and heads."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blockwise_kernels, "QUERY_BLOCK", 4)
        patch.setattr(blockwise_kernels, "KEY_BLOCK", 3)
        patch.setattr(blockwise_kernels, "BLOCK_NUMBERS", 24)  # two heads of full blocks
        yield
