"""The first screen, other screens and the report above the explorer."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from mgk.inspect import Answer, Bar, Bars, Chart, Model, Series, Table, Text, page
from tests.inspect.browser import (
    SIZE,
    Show,
    address,
    settle,
)
from tests.inspect.common import attention


def test_the_first_screen_explains_itself(show: Show) -> None:
    """One sentence per part, a chosen token, the prediction and the true value; the toolbar is above the maps."""
    weights = torch.full((2, 2, 8, 8), 1 / 8)
    weights[1, 1] = torch.eye(8)
    weights[1, 1, 6] = torch.eye(8)[1]  # the only query that attends far from itself
    answer = Answer("value", [("7", 0.75), ("3", 0.2)], "7")
    models = [
        Model.of_weights(name, list("abcdefgh"), weights, answer=each)
        for name, each in (("right", answer), ("wrong", replace(answer, truth="3")))
    ]
    tab = show(page(models, report=[Text("above")]))
    assert "(the query)" in tab.locator("#intro").text_content()
    assert tab.locator(".where:visible").all_text_contents() == ["Layer 2 · Head 2"] * 2
    assert tab.locator(".strip .here").all_text_contents() == ["g", "g"]
    for section in (".heads", ".middle", ".text"):
        assert tab.locator(f".panel:first-child {section} .say").is_visible()
    first, second = tab.locator(".answer").all_text_contents()
    assert first == "Predicted value: 7 75\u00a0%, then 3 20\u00a0%. True value: 7 ✓ right"
    assert second.endswith("True value: 3 ✗ wrong")
    boxes = {name: tab.locator(name).bounding_box() for name in ("#report", ".tools", "#panels")}
    assert boxes["#report"]["y"] < boxes[".tools"]["y"] < boxes["#panels"]["y"]
    gap = boxes["#panels"]["y"] - boxes[".tools"]["y"] - boxes[".tools"]["height"]
    assert abs(gap) < 2  # next to what it changes


def test_opens_with_two_models_side_by_side(show: Show, two: Any) -> None:
    tab = show(two)
    assert tab.locator(".panel:visible").count() == 2
    assert tab.locator(".thumb").count() == 2 * 4 + 2 * 2
    painted = tab.evaluate("[...document.querySelectorAll('.thumb canvas')].every((c) => c.width === 24)")
    assert painted
    assert tab.locator(".panel").nth(1).locator(".components thead th").all_text_contents() == ["Component", "1", "2"]


def test_opens_with_a_mixture_beside_the_first_model(show: Show) -> None:
    models = [attention(variant, 2, 8, layers=1) for variant in ("softmax", "softmax", "smgk")]
    tab = show(page(models))
    shown = tab.evaluate("[...document.querySelectorAll('.panel select')].map((s) => s.selectedIndex)")
    assert shown == [0, 2]


def test_a_phone(show: Show, two: Any) -> None:
    """One column, nothing wider than the screen, a map of full width, and a tap chooses a token."""
    tab = show(two, width=390, height=844, has_touch=True, is_mobile=True)
    assert tab.evaluate("document.scrollingElement.scrollWidth") <= 390
    assert tab.locator(".map").first.bounding_box()["width"] > 330
    left = [box.bounding_box()["x"] for box in tab.locator(".panel").all()]
    assert left[0] == left[1]
    tab.locator(".strip span[data-i='3']").first.tap()
    assert "token=3" in address(tab)


def test_a_phone_has_no_blank_gaps(show: Show, two: Any) -> None:
    """Toolbar and table are usable: nothing is cut off, and no part of a panel is far from the part above it."""
    table = Table(["model", *(f"column {i}" for i in range(9))], [["a", *"123456789"]], "Scores")
    bars = Bars([Bar("a model with a long name", 2, "2.00 ± 1.00 GFLOPs", 1, 3)], "Costs", "What it takes.")
    made = page([attention("softmax", 4, SIZE), attention("smgk", 2, SIZE)], report=[bars, table])
    tab = show(made, width=390, height=844, has_touch=True, is_mobile=True)
    assert tab.evaluate("document.scrollingElement.scrollWidth") <= 390
    for button in tab.locator(".tools button:visible, .barlist b").all():
        box = button.bounding_box()
        assert button.evaluate("(e) => e.scrollWidth <= e.clientWidth")
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 390
    scroll = tab.locator(".scroll")
    assert scroll.evaluate("(e) => e.scrollWidth > e.clientWidth && getComputedStyle(e).overflowX === 'auto'")
    for panel in range(2):
        parts = tab.locator(".panel").nth(panel).locator(":scope > header, section:visible, details")
        boxes = sorted((part.bounding_box() for part in parts.all()), key=lambda box: float(box["y"]))
        gaps = [b["y"] - a["y"] - a["height"] for a, b in itertools.pairwise(boxes)]
        assert len(gaps) == 5
        assert 0 <= min(gaps) <= max(gaps) <= 24


@pytest.mark.parametrize("width", [800, 1000, 1180])
def test_a_tablet_shows_everything(show: Show, two: Any, width: int) -> None:
    """No part is wider than the window, with one panel or with two."""
    tab = show(two, width=width, height=900)
    for _ in range(2):
        assert tab.evaluate("document.scrollingElement.scrollWidth") <= width
        tab.keyboard.press("p")
        settle(tab)


def test_theme_follows_the_system_and_can_be_changed(show: Show, two: Any) -> None:
    tab = show(two, color_scheme="dark")
    assert tab.locator("html").get_attribute("data-theme") == "dark"
    tab.emulate_media(color_scheme="light")
    tab.wait_for_selector("html[data-theme=light]")
    tab.keyboard.press("d")
    tab.wait_for_selector("html[data-theme=dark]")


def test_report(show: Show) -> None:
    """A page can have a report without models."""
    chart = Chart(
        [Series("a", [1, 10, 100], [3.0, 2.0, 1.0]), Series("b", [1, 10], [2.0, float(10)])],
        "Loss",
        "step",
        "loss",
        log_x=True,
    )
    tab = show(
        page([], title="Report", report=[Table(["model", "score"], [["a", "1"]], "Scores"), chart, Text("Words")])
    )
    assert tab.locator("#report td").all_text_contents() == ["a", "1"]
    assert tab.locator("#report path.curve").count() == 4  # two lines, two keys
    tab.locator(".chart").hover()
    assert tab.locator(".readout").text_content() == "step 10: a 2, b 10"
    assert not tab.locator("#explorer").is_visible()


def test_bars_start_at_zero_and_show_intervals(show: Show) -> None:
    """Lengths are in proportion to the values, the number is written as given, and the interval lies around the end."""
    bars = Bars([Bar("a", 50, "50.0 ± 10.0 %", 40, 60), Bar("b", 25, "25.0 %")], "Accuracy", "Higher is better.")
    tab = show(page([], report=[bars]))
    assert tab.locator(".barlist dt").all_text_contents() == ["a", "b"]
    assert tab.locator(".barlist b").all_text_contents() == ["50.0 ± 10.0 %", "25.0 %"]
    assert tab.locator(".block .say").text_content() == "Higher is better."
    track = tab.locator(".track").first.bounding_box()
    widths = [box.bounding_box()["width"] for box in tab.locator(".filled").all()]
    assert widths == pytest.approx([track["width"] * 50 / 60, track["width"] * 25 / 60], abs=0.5)
    (whisker,) = (box.bounding_box() for box in tab.locator(".whisker").all())
    assert whisker["x"] - track["x"] == pytest.approx(track["width"] * 40 / 60, abs=0.5)
    assert whisker["width"] == pytest.approx(track["width"] * 20 / 60, abs=0.5)


def test_a_chart_shows_exact_values_and_bands(show: Show) -> None:
    """The nearest step with its digits, and only the lines that have a point there."""
    lines = [
        Series("a", [12_345, 12_346], [1.0, 2.0], [0.5, 1.5], [1.5, 2.5]),
        Series("b", [12_345], [3.0]),
    ]
    tab = show(page([], report=[Chart(lines, "Loss", "step", "loss")]))
    assert tab.locator("path.band").count() == 1
    box = tab.locator(".chart").bounding_box()
    tab.mouse.move(box["x"] + box["width"] - 5, box["y"] + 60)
    assert tab.locator(".readout").text_content() == "step 12,346: a 2 (1.5 to 2.5)"
    tab.mouse.move(box["x"] + 60, box["y"] + 60)
    assert tab.locator(".readout").text_content() == "step 12,345: a 1 (0.5 to 1.5), b 3"


def test_a_report_of_many_points(show: Show) -> None:
    """The extent of 160,000 points: more than a function can have arguments."""
    lines = [Series(f"{i}", list(range(4000)), [float(i + j % 7) for j in range(4000)]) for i in range(40)]
    tab = show(page([], report=[Chart(lines, "Loss", "step", "loss")]))
    assert tab.locator("#report path.curve").count() == 80  # with the keys
    assert "NaN" not in tab.locator("#report path.curve").first.get_attribute("d")
