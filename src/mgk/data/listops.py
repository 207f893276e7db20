"""ListOps: nested operators on digits, whose value is the label. LRA's procedure, and LRA's files.

The procedure grows a tree from its root: a node above the greatest depth is an operator with probability 1/4, and else
a digit; an operator has 2 to 10 arguments. Trees whose number of tokens is not strictly between the bounds are thrown
away, and so are duplicates. Most trees go for their length: so first only the shapes of many trees are drawn, all nodes
of a depth at once, and operators and digits for those that stay.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import count as count_from

import numpy as np

from mgk.data.sources import Source
from mgk.data.splits import Array, Sequences
from mgk.data.store import Built, DataError
from mgk.ops.arguments import check_count

OPERATORS = ("[MIN", "[MAX", "[MED", "[SM")
SYMBOLS = (*"0123456789", *OPERATORS, "]")  # numbered from 1; 0 is padding
DIGIT, OPERATOR, CLOSE = 1, 11, 15  # the numbers of "0", "[MIN" and "]"
OPERATOR_SHARE = 0.25
SIZES = (96_000, 2_000, 2_000)
TREES = 1 << 14  # drawn at a time from one random stream: part of what a seed means
BARREN_BLOCKS = 50
FACTS = {"vocabulary": len(SYMBOLS) + 1, "classes": 10, "shift": 0, "symbols": ["", *SYMBOLS]}

Example = tuple[bytes, int]


@dataclass(frozen=True)
class Shape:
    """Which trees are drawn."""

    lengths: tuple[int, int] = (500, 2000)
    """A tree's tokens are more than the first and fewer than the second."""
    depth: int = 10
    arguments: int = 10


def build(
    source: Source,
    *,
    sizes: tuple[int, int, int] = SIZES,
    lengths: tuple[int, int] = (500, 2_000),
    depth: int = 10,
    arguments: int = 10,
    seed: int = 0,
) -> Built:
    """Generated; or LRA's basic_train.tsv, basic_val.tsv and basic_test.tsv where a source is named."""
    shape = Shape(lengths, depth, arguments)
    if source.given is not None:
        if (shape, sizes, seed) != (Shape(), SIZES, 0):
            raise DataError(
                "source: expected none with sizes, lengths, depth, arguments or seed, which are for generating"
            )
        files = {"train": "basic_train.tsv", "dev": "basic_val.tsv", "test": "basic_test.tsv"}
        splits = {split: _sequences(list(read(source, file))) for split, file in files.items()}
        return Built(dict(splits), FACTS)
    examples = generate(sum(sizes), shape, seed)
    ends = np.cumsum(sizes)
    names = ("train", "dev", "test")
    return Built(
        {name: _sequences(examples[end - size : end]) for name, size, end in zip(names, sizes, ends, strict=True)},
        FACTS,
        origin={"generated": "ListOps as in the Long Range Arena"},
    )


def generate(count: int, shape: Shape, seed: int, threads: int | None = None) -> list[Example]:
    """`count` different examples (tokens, value), the same for any number of threads."""
    check_count("sizes", count)
    low, high = shape.lengths
    if high - low < 2 or high < 5 or shape.depth < 2 or shape.arguments < 2:
        raise ValueError(
            "lengths, depth, arguments: expected a depth and arguments of at least 2, and room between the lengths for "
            f"the 4 tokens [OP x y ], got {shape}"
        )
    found: dict[bytes, int] = {}
    barren = 0
    for block in _blocks(shape, seed, threads or os.cpu_count() or 1):
        before = len(found)
        found.update(block)
        barren = 0 if len(found) > before else barren + 1
        if len(found) >= count:
            break
        if barren == BARREN_BLOCKS:
            raise ValueError(
                f"sizes, lengths: expected {count} different expressions between {low} and {high} tokens, found "
                f"{len(found)}, and no other in {BARREN_BLOCKS * TREES} draws; ask for fewer or for other lengths"
            )
    return list(found.items())[:count]


def _blocks(shape: Shape, seed: int, threads: int) -> Iterator[list[Example]]:
    """Endless: block i depends on (seed, i) alone. NumPy lets threads run side by side where its arrays are large."""
    with ThreadPoolExecutor(threads) as pool:
        for start in count_from(0, 2 * threads):
            yield from pool.map(partial(draw, shape, seed), range(start, start + 2 * threads))


def draw(shape: Shape, seed: int, block: int) -> list[Example]:
    """The trees of one block whose length fits.

    A depth has one array entry per node: the tree it belongs to, its number of arguments (0: a digit). Arguments of the
    nodes of one depth stand in the next, in order.
    """
    random = np.random.default_rng([seed, block])
    low, high = shape.lengths
    tree = np.arange(TREES)
    size = np.zeros(TREES, np.int64)  # tokens: an operator has two, with its bracket
    trees, arities = [], []
    for depth in range(1, shape.depth + 1):
        arity = np.zeros(len(tree), np.int64)
        if depth < shape.depth:
            operator = random.random(len(tree), np.float32) < OPERATOR_SHARE
            arity[operator] = random.integers(2, shape.arguments + 1, np.count_nonzero(operator))
        size += np.bincount(tree, 1 + (arity > 0), TREES).astype(np.int64)
        trees.append(tree)
        arities.append(arity)
        tree = np.repeat(tree, arity)
        if len(tree) == 0:
            break
    fits = (size > low) & (size < high)
    kept = [arity[fits[tree]] for tree, arity in zip(trees, arities, strict=True)]
    return fill(random, [arity for arity in kept if len(arity)]) if fits.any() else []


def fill(random: np.random.Generator, arities: list[Array]) -> list[Example]:
    """Operators and digits for trees given by their arities, depth by depth: (tokens, value) of each."""
    symbols, sizes = [], []  # of every node: its token, and how many tokens it has with all that is below it
    value = size = np.zeros(0, np.int64)
    for arity in reversed(arities):  # the deepest first: arguments before their operators
        inner = arity > 0
        count = arity[inner]
        operator = random.integers(0, len(OPERATORS), len(count))
        arguments, argument_sizes = value, size
        value, size = random.integers(0, 10, len(arity)), np.ones(len(arity), np.int64)
        symbols.append(DIGIT + value)
        symbols[-1][inner] = OPERATOR + operator
        if len(count):
            value[inner] = apply(operator, arguments, count)
            size[inner] = 2 + np.add.reduceat(argument_sizes, np.cumsum(count) - count)
        sizes.append(size)
    tokens = place(arities, symbols[::-1], sizes[::-1])
    ends = np.cumsum(size)
    return [(tokens[end - n : end].tobytes(), v) for end, n, v in zip(ends, size, value.tolist(), strict=True)]


def place(arities: list[Array], symbols: list[Array], sizes: list[Array]) -> Array:
    """All trees as tokens, one after the other: an operator, its arguments, a bracket."""
    tokens = np.zeros(int(sizes[0].sum()), np.uint8)
    start = np.cumsum(sizes[0]) - sizes[0]
    for depth, arity in enumerate(arities):
        inner = arity > 0
        count = arity[inner]
        tokens[start] = symbols[depth]
        tokens[(start + sizes[depth] - 1)[inner]] = CLOSE
        if len(count):  # the first argument starts right after its operator, and each other where the one before ends
            before = np.cumsum(sizes[depth + 1]) - sizes[depth + 1]
            start = before + np.repeat(start[inner] + 1 - before[np.cumsum(count) - count], count)
    return tokens


def apply(operator: Array, values: Array, count: Array) -> Array:
    """The value of each operator on its `count` arguments, which stand one after the other in `values`."""
    first = np.cumsum(count) - count
    owner = np.repeat(np.arange(len(count)), count)
    ordered = values[np.lexsort((values, owner))]
    lower, upper = ordered[first + (count - 1) // 2], ordered[first + count // 2]
    median = (lower + upper) // 2  # as LRA: cut to an integer
    results = (ordered[first], ordered[first + count - 1], median, np.add.reduceat(values, first) % 10)
    return np.choose(operator, results)  # in the order of OPERATORS


def read(source: Source, file: str) -> Iterator[Example]:
    """A file of LRA: a head line, then expression and value; the parentheses of the binary form carry nothing."""
    path = source.require(file)
    number = {symbol: index for index, symbol in enumerate(SYMBOLS, 1)}
    with source.text(path) as lines:
        for row in csv.DictReader(lines, delimiter="\t"):
            try:
                words = row["Source"].replace("(", " ").replace(")", " ").split()
                yield bytes(number[word] for word in words), int(row["Target"])
            except (KeyError, ValueError, TypeError, AttributeError):
                raise DataError(f"{path}: expected ListOps lines 'Source<tab>Target'; {source.advice}") from None


def _sequences(examples: list[Example]) -> Sequences:
    tokens = np.frombuffer(b"".join(tokens for tokens, _ in examples), np.uint8)
    offsets = np.concatenate([[0], np.cumsum([len(tokens) for tokens, _ in examples], dtype=np.int64)])
    return Sequences(tokens, offsets, labels=np.array([value for _, value in examples], np.uint8))
