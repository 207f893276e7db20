"""The generator against the published procedure: an independent sample, an independent evaluator, and its own laws."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from mgk.data import listops
from mgk.data.listops import SYMBOLS, Example, Shape, generate
from mgk.data.sources import Source

FIXTURES = Path(__file__).parent / "fixtures"
SAMPLE = json.loads((FIXTURES / "listops_statistics.json").read_text())  # of 2,000 examples by another program
# The chance to fail is 1/1000 for each if the distributions are the same; the seed is fixed, so it is now or never.
CHI_SQUARE = {3: 16.27, 8: 26.12, 9: 27.88}  # by degrees of freedom
KOLMOGOROV = 1.95
NORMAL = 3.29


def words(tokens: bytes) -> list[str]:
    return [SYMBOLS[token - 1] for token in tokens]


def evaluate(expression: list[str]) -> tuple[int, int, list[int]]:
    """A stack machine: the value, the greatest nesting, and the numbers of arguments, the root's last."""
    stack: list[list[str | int]] = [[]]
    deepest, arguments = 0, []
    for word in expression:
        if word.startswith("["):
            stack.append([word])
            deepest = max(deepest, len(stack) - 1)
        elif word == "]":
            operator, *values = stack.pop()
            numbers = [int(value) for value in values]
            arguments.append(len(numbers))
            results = {
                "[MIN": min(numbers),
                "[MAX": max(numbers),
                "[MED": int(statistics.median(numbers)),
                "[SM": sum(numbers) % 10,
            }
            stack[-1].append(results[str(operator)])
        else:
            stack[-1].append(int(word))
    ((value,),) = stack
    return int(value), deepest, arguments


@pytest.fixture(scope="module")
def generated() -> list[Example]:
    return generate(4_000, Shape(), seed=1, threads=1)


def chi_square(ours: list[int], theirs: list[int]) -> float:
    """Of two samples against what they are together."""
    table = np.array([ours, theirs], float)
    expected = table.sum(1, keepdims=True) * table.sum(0) / table.sum()
    return float(((table - expected) ** 2 / expected).sum())


def z_score(ours: list[float], theirs: list[float]) -> float:
    error = np.sqrt(np.var(ours) / len(ours) + np.var(theirs) / len(theirs))
    return float(abs(np.mean(ours) - np.mean(theirs)) / error)


def test_lengths_are_distributed_as_in_the_sample(generated: list[Example]) -> None:
    ours, theirs = np.sort([len(tokens) for tokens, _ in generated]), np.sort(SAMPLE["lengths"])
    assert ours[0] > 500
    assert ours[-1] < 2000
    everything = np.concatenate([ours, theirs])
    shares = [np.searchsorted(part, everything, side="right") / len(part) for part in (ours, theirs)]
    distance = np.abs(shares[0] - shares[1]).max()
    assert distance * np.sqrt(len(ours) * len(theirs) / len(everything)) < KOLMOGOROV


def test_labels_are_distributed_as_in_the_sample(generated: list[Example]) -> None:
    labels = Counter(value for _, value in generated)
    assert chi_square([labels[value] for value in range(10)], SAMPLE["labels"]) < CHI_SQUARE[9]


def test_operators_and_their_arguments_are_distributed_as_in_the_sample(generated: list[Example]) -> None:
    """One root per example, so that what is counted is independent; and the share of operators among the tokens."""
    roots = Counter(words(tokens)[0] for tokens, _ in generated)
    assert chi_square([roots[each] for each in SAMPLE["roots"]], list(SAMPLE["roots"].values())) < CHI_SQUARE[3]
    arguments = Counter(evaluate(words(tokens))[2][-1] for tokens, _ in generated[:1500])
    assert chi_square([arguments[number] for number in range(2, 11)], SAMPLE["root_arguments"]) < CHI_SQUARE[8]
    ours = [sum(word[0] == "[" for word in words(tokens)) / len(tokens) for tokens, _ in generated]
    theirs = [number / length for number, length in zip(SAMPLE["operators"], SAMPLE["lengths"], strict=True)]
    assert z_score(ours, theirs) < NORMAL


def test_every_label_agrees_with_a_second_evaluator(generated: list[Example]) -> None:
    for tokens, value in generated[:1000]:
        assert evaluate(words(tokens))[0] == value


def test_depth_and_arguments_stay_in_bounds(generated: list[Example]) -> None:
    """Depth 10 with the digits; nearly all trees of this length are as deep as they may be, and all in the sample."""
    seen = [evaluate(words(tokens)) for tokens, _ in generated[:500]]
    assert Counter(deepest for _, deepest, _ in seen).most_common(1)[0][0] == 9
    assert max(deepest for _, deepest, _ in seen) == 9
    assert {number for _, _, arguments in seen for number in arguments} == set(range(2, 11))
    shallow = generate(200, Shape((4, 60), depth=3, arguments=4), seed=0, threads=1)
    limits = [evaluate(words(tokens))[1:] for tokens, _ in shallow]
    assert max(deepest for deepest, _ in limits) == 2
    assert {number for _, arguments in limits for number in arguments} == {2, 3, 4}


def test_lras_file_format_and_values(tmp_path: Path) -> None:
    """What another program wrote is read, with its parentheses, and its values are those of our evaluator and ours."""
    source = Source("listops", FIXTURES, tmp_path, (), "")
    examples = list(listops.read(source, "listops_sample.tsv"))
    assert [len(tokens) for tokens, _ in examples] == SAMPLE["lengths"][: len(examples)]
    assert [evaluate(words(tokens))[0] for tokens, _ in examples] == [value for _, value in examples]


def test_the_seed_decides_and_the_number_of_threads_does_not() -> None:
    shape = Shape((16, 128))
    first = generate(3_000, shape, seed=7, threads=1)
    assert generate(3_000, shape, seed=7, threads=3) == first
    assert generate(1_000, shape, seed=7, threads=2) == first[:1_000]
    assert generate(3_000, shape, seed=8, threads=1) != first
    assert all(16 < len(tokens) < 128 for tokens, _ in first)


def test_no_example_comes_twice() -> None:
    """[OP x y ] is all that has 4 tokens: there are 400 of it, and a request for more ends with an error."""
    shape = Shape((3, 5))
    found = generate(400, shape, seed=0, threads=1)
    assert len({tokens for tokens, _ in found}) == 400
    with pytest.raises(ValueError, match=r"sizes, lengths: expected 401 different.*found 400"):
        generate(401, shape, seed=0, threads=2)


@pytest.mark.parametrize("shape", [Shape((10, 11)), Shape((0, 4)), Shape(depth=1), Shape(arguments=1)])
def test_impossible_shapes_are_refused(shape: Shape) -> None:
    with pytest.raises(ValueError, match="lengths, depth, arguments: expected"):
        generate(1, shape, seed=0)
