"""Keys in pages of a pool equal contiguous keys, for rows of different lengths."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import mgk
from mgk.ops.triton import decode
from tests.ops.common import IMPLS, VARIANTS, Case, Inputs, cases
from tests.ops.test_varlen import loop, packed_case, varlen
from tests.ops.triton_env import DEVICE, strict_memory

SOME = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 40)), min_size=1, max_size=4)
ALIKE = st.tuples(st.integers(1, 4), st.lists(st.integers(0, 40), min_size=1, max_size=4)).map(
    lambda drawn: [(drawn[0], keys) for keys in drawn[1]]
)


def scattered(inputs: Inputs, where: dict[str, Any], page: int, seed: int = 0) -> tuple[Inputs, dict[str, Any]]:
    """The same keys in pages of a pool, in random order, among memory that holds NaN."""
    starts = where["cu_seq_k"].tolist()
    lengths = [b - a for a, b in pairwise(starts)]
    columns = max(1, -(-max(lengths) // page))
    needed = [-(-length // page) for length in lengths]
    order = torch.randperm(sum(needed) + 2, generator=torch.Generator().manual_seed(seed)).tolist()
    table = torch.full((len(lengths), columns), -7, dtype=torch.int32)  # what is not needed is not read
    pools = {}
    for name in ("key", "value"):
        given = inputs[name][0].movedim(-2, 0)  # positions first
        pool = given.new_full((len(order), page, *given.shape[1:]), torch.nan)
        taken = iter(order)
        for row, (start, length) in enumerate(zip(starts, lengths, strict=False)):
            for column in range(needed[row]):
                number = next(taken)
                part = given[start + column * page : min(start + length, start + (column + 1) * page)]
                pool[number, : len(part)] = part
                table[row, column] = number
        pools[name] = pool
    options = {name: where[name] for name in ("cu_seq_q", "max_q", "max_k")}
    return pools, options | {"seqused_k": torch.tensor(lengths, dtype=torch.int32), "block_table": table}


def paged(inputs: Inputs, pools: Inputs, **options: Any) -> Any:
    own = {name: tensor.detach() for name, tensor in (inputs | pools).items()}
    own["query"] = own["query"][0].transpose(0, 1)
    function: Any = mgk.smgk_varlen_attention if "shift" in inputs else mgk.mgk_varlen_attention
    with torch.no_grad():
        return function(**own, **options)


@pytest.mark.parametrize("impl", IMPLS)
@settings(max_examples=25)
@given(
    case=cases(masked=False, window=st.sampled_from([None, 1, 3])), lengths=SOME, page=st.sampled_from([1, 3, 16, 64])
)
def test_equals_contiguous_keys(impl: str, case: Case, lengths: list[tuple[int, int]], page: int) -> None:
    inputs, where = packed_case(replace(case, H=4, G=2), lengths)
    options = {"e_step": case.e_step, "is_causal": case.is_causal or case.window is not None, "window": case.window}
    pools, pages = scattered(inputs, where, page)
    found = paged(inputs, pools, **pages, **options, impl=impl, return_lse=True)
    wanted = varlen(inputs, **where, **options, impl=impl, return_lse=True)
    for one, two in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, two.detach(), rtol=1e-12, atol=1e-12)


@settings(max_examples=12)
@given(
    case=cases(masked=False, window=st.sampled_from([None, 1, 9, 30]), D=st.integers(1, 20), Dv=st.integers(1, 20)),
    lengths=SOME | ALIKE, page=st.sampled_from([3, 16, 64]),
)  # fmt: skip
def test_the_decoding_kernel_reads_pages(case: Case, lengths: list[tuple[int, int]], page: int) -> None:
    """In float32 against a loop over the rows in float64, with NaN in memory that is not in use.

    Exponents stay below 1e2, so a weight is right to 1e2 * 6e-8, and so is a mean of values of size 1.
    """
    case = replace(case, H=4, G=2, is_causal=case.is_causal or case.window is not None)
    inputs, where = packed_case(case, lengths)
    pools, pages = scattered(inputs, where, page)
    options: dict[str, Any] = {"e_step": case.e_step, "is_causal": case.is_causal, "window": case.window}
    wanted, wanted_lse = loop({name: x.detach() for name, x in inputs.items()}, where, "reference", **options)
    single, rows = ({name: x.detach().float().to(DEVICE) for name, x in each.items()} for each in (inputs, pools))
    there = {name: x.to(DEVICE) if isinstance(x, Tensor) else x for name, x in pages.items()}
    with pytest.MonkeyPatch.context() as patch, strict_memory():
        patch.setattr(decode, "SPLIT_TILES", 1)  # several splits, some of them empty
        patch.setattr(decode, "multiprocessors", lambda device: 4)
        found, lse = paged(single, rows, **there, **options, impl="triton", return_lse=True)
    torch.testing.assert_close(found.double().cpu(), wanted, rtol=0, atol=2e-5)
    torch.testing.assert_close(lse.double().cpu(), wanted_lse, rtol=0, atol=5e-5)


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # of numbers that Triton's interpreter drops
@pytest.mark.parametrize("variant", VARIANTS)
def test_many_queries_are_computed_from_a_copy(variant: str) -> None:
    """More than the decoding kernel takes, as in a prompt; the copy has as many rows as the longest could need."""
    case = Case(variant, H=2, prior="position", is_causal=True)
    inputs, where = packed_case(case, [(20, 25), (0, 3), (4, 0), (7, 7)])
    pools, pages = scattered(inputs, where, 4)
    wanted, _ = loop({name: x.detach() for name, x in inputs.items()}, where, "reference", is_causal=True)
    single, rows = ({name: x.detach().float().to(DEVICE) for name, x in each.items()} for each in (inputs, pools))
    there = {name: x.to(DEVICE) if isinstance(x, Tensor) else x for name, x in pages.items()}
    found = paged(single, rows, **there, is_causal=True, impl="triton")
    torch.testing.assert_close(found.double().cpu(), wanted, rtol=0, atol=2e-5)


def test_rows_of_a_contiguous_cache_have_lengths_of_their_own() -> None:
    """One page per row: the block table of a cache (S,C,G,D)."""
    case = Case("smgk", B=3, H=4, G=2, Nq=1, Nk=9, prior="head")
    inputs = {name: x.detach() for name, x in case.inputs().items()}
    lengths = [9, 2, 5]
    found = mgk.smgk_varlen_attention(
        inputs["query"][:, :, 0], inputs["key"].transpose(1, 2), inputs["shift"], inputs["value"].transpose(1, 2),
        cu_seq_q=torch.arange(4, dtype=torch.int32), max_q=1, max_k=9, is_causal=True,
        seqused_k=torch.tensor(lengths, dtype=torch.int32), block_table=torch.arange(3, dtype=torch.int32)[:, None],
    )  # fmt: skip
    for row, length in enumerate(lengths):
        alone = mgk.smgk_attention(
            inputs["query"][row : row + 1], inputs["key"][row : row + 1, :, :length], inputs["shift"],
            inputs["value"][row : row + 1, :, :length],
        )  # fmt: skip
        torch.testing.assert_close(found[row : row + 1, :, None], alone, rtol=1e-12, atol=1e-12)


def integers(*numbers: Any) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


GOOD: dict[str, Any] = {
    "cu_seq_q": integers(0, 1, 3), "max_q": 2, "max_k": 6, "seqused_k": integers(6, 3),
    "block_table": integers([2, 0], [1, -1]),
}  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"seqused_k": None}, TypeError, "^seqused_k: expected an int32 tensor .* with block_table, got NoneType"),
        ({"block_table": None}, ValueError, "^key: expected"),
        ({"cu_seq_k": integers(0, 3, 6)}, ValueError, "^cu_seq_k: expected None with block_table"),
        ({"block_table": integers([2, 0])}, ValueError, r"^block_table: expected shape \(S,pages\) = \(2, 2\)"),
        ({"block_table": integers(2, 0)}, ValueError, "^block_table: expected 2 dimensions"),
        ({"block_table": integers([2, 4], [1, 0])}, ValueError, r"^block_table: expected pages from 0 to 3, got \[4\]"),
        ({"block_table": integers([2, -1], [1, 0])}, ValueError, r"^block_table: expected pages from 0 to 3, got \[-1"),
        ({"block_table": integers([2, 0], [1, 0]).long()}, TypeError, "^block_table: expected an int32 tensor"),
        ({"block_table": integers([2, 0], [1, 0]).to("meta")}, ValueError, "^block_table: expected the device of key"),
        ({"seqused_k": integers(6)}, ValueError, r"^seqused_k: expected shape \(S\) = \(2,\)"),
        ({"seqused_k": integers(6, 3).float()}, TypeError, "^seqused_k: expected an int32 tensor"),
        ({"seqused_k": integers(6, 7)}, ValueError, "^seqused_k: expected numbers from 0 to max_k = 6"),
        ({"seqused_k": integers(6, -1)}, ValueError, "^seqused_k: expected numbers from 0 to max_k = 6"),
        ({"max_k": 9}, ValueError, "^max_k: expected at most 8, 2 pages of 4 keys, got 9"),
        ({"dropout_p": 0.1}, ValueError, r"^dropout_p: expected 0 with block_table, got 0\.1"),
        ({"window": 3}, ValueError, "^window: expected None without is_causal"),
        ({"window": 0, "is_causal": True}, ValueError, "^window: expected at least 1, got 0"),
        ({"cu_seq_q": integers(0, 1, 2)}, ValueError, "^cu_seq_q: expected numbers from 0 to 3"),
    ],
)
def test_wrong_pages_are_errors(variant: str, wrong: dict[str, Any], error: type[Exception], message: str) -> None:
    case = Case(variant, B=4, Nq=3, Nk=4, prior="head")
    inputs = {name: x.detach() for name, x in case.inputs().items()}
    pools = {name: inputs[name].movedim(-2, 1) for name in ("key", "value")}
    query = inputs["query"][:1]
    paged(inputs | {"query": query}, pools, **GOOD)
    with pytest.raises(error, match=message):
        paged(inputs | {"query": query}, pools, **GOOD | wrong)


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_and_missing_lengths_are_errors(variant: str) -> None:
    case = Case(variant, B=4, Nq=3, Nk=4, prior="head")
    inputs = case.inputs()
    own = inputs | {name: inputs[name].movedim(-2, 1) for name in ("key", "value")}
    own["query"] = own["query"][0].transpose(0, 1)
    function: Any = mgk.smgk_varlen_attention if "shift" in inputs else mgk.mgk_varlen_attention
    with pytest.raises(ValueError, match=r"^block_table: expected inputs that need no gradient"):
        function(**own, **GOOD)
    plain = own | {"key": own["key"][0], "value": own["value"][0]}
    rest = {"cu_seq_q": integers(0, 3), "max_q": 3, "max_k": 4}
    with pytest.raises(TypeError, match=r"^cu_seq_k: expected an int32 tensor \(S\+1,\), got NoneType None"):
        function(**plain, **rest)
    with pytest.raises(ValueError, match=r"^seqused_k: expected None without block_table"):
        function(**plain, **rest, cu_seq_k=integers(0, 4), seqused_k=integers(4))
