"""The first page of the results says what the records say, whatever that is."""

from __future__ import annotations

import re

import pytest

from experiments.lm.grid import FULL, HALF, Row
from experiments.lm.page import page
from experiments.reproduce import report
from tests.experiments.test_lm import NOISE, SWEEP, seeds

WIDE, GROUPED, FOUR = Row("softmax", 4, head_dim=128), Row("softmax", 8, 4), Row("softmax", 4)
STEPS = {"nano": {"rows": {row.name: 0.01 for row in (FULL, HALF, WIDE, GROUPED, FOUR)}}}
OLDER = [
    ("4 language tasks: sMGK 4 against softmax 8", "no", "gain -2.7% (-4.1% to -1.4%)"),
    ("4 language tasks: MGK 4 against softmax 8", "no", "gain -4.1% (-6.2% to -2.0%)"),
]


def near(value: float) -> list[float]:
    return [value, value + 0.001, value - 0.001]


GOOD = [*SWEEP, *seeds("nano", FULL, NOISE), *seeds("nano", HALF, near(1.49)), *seeds("nano", FOUR, near(1.52))]


def test_a_good_result() -> None:
    text = page(GOOD, STEPS, OLDER)
    assert text.startswith(
        "**sMGK 4 is on the Pareto frontier of parameters, time of a training step, FLOPs and cache.**"
    )
    holds, fails = text.split("## What holds")[1].split("## What does not")
    assert re.search(r"- sMGK 4 against softmax 8: \*\*better\*\*, \+0\.67% \(.* to .*\); seeds: 3 and 5\.", holds)
    assert "sMGK 4 against softmax 4: **better**, +1.97%" in holds
    assert fails.split("## What is open")[0].strip() == "Nothing."
    assert text.count("](figures/study-") == 3
    assert "no: gain -2.7% (-4.1% to -1.4%) | better: +0.67%" in text  # the older verdict stays beside the new one
    assert "MGK 4 against softmax 8 |" not in text.replace("sMGK 4", "")


def test_a_bad_result() -> None:
    """A wide and a grouped row are better at no more cost: the first sentence says so."""
    cheap = {"parameters": 10**6, "flops": 10**6}
    found = [
        *SWEEP, *seeds("nano", FULL, NOISE), *seeds("nano", HALF, near(1.55)),
        *seeds("nano", GROUPED, near(1.50), **cheap),
    ]  # fmt: skip
    text = page(found, STEPS, OLDER)
    first = "**sMGK 4 is beaten by a softmax row that costs no more, at all four costs**: parameters (by softmax 8/4)"
    assert text.startswith(first)
    assert "- sMGK 4 against softmax 8: **worse**, -3.33%" in text.split("## What does not")[1]
    assert "Where the older rules say otherwise" not in text  # they agree


def test_a_small_loss_is_named_as_one() -> None:
    text = page([*SWEEP, *seeds("nano", FULL, NOISE), *seeds("nano", HALF, [1.503] * 5)], STEPS)
    assert "sMGK 4 against softmax 8: **worse**, a loss below the margin, -0.20%" in text


@pytest.mark.parametrize("found", [[], SWEEP])
def test_without_main_rows_there_is_no_page(found: list[object]) -> None:
    assert page(found) == ""  # type: ignore[arg-type]
    assert report([]).startswith("# Results\n\nThis page is generated")


def test_the_page_comes_first() -> None:
    text = report([], page="the page\n")
    assert text.startswith("# Results\n\nthe page\n\n## The paper's tables\n\nThis page is generated")
