"""What each control of the page does: mouse, wheel, keyboard and address."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mgk.inspect import Model, page
from tests.inspect.browser import (
    FIRST,
    SIZE,
    Show,
    address,
    pixel,
    point,
    pressed,
    scrolled,
    settle,
    wait_until,
)
from tests.inspect.common import attention, pattern


def test_clicks_choose_heads_and_tokens(show: Show, two: Any) -> None:
    tab = show(two, at=FIRST)
    tab.locator(".panel").nth(1).get_by_label("Layer 2, head 2", exact=True).click()
    assert "show=0.0.0,1.1.1" in address(tab)
    assert "active=1" in address(tab)
    settle(tab)
    assert tab.locator(".panel").nth(1).locator(".where").text_content() == "Layer 2 · Head 2"
    tab.locator(".panel").nth(0).locator(".strip span[data-i='7']").click()
    assert "token=7" in address(tab)
    settle(tab)
    items = tab.locator(".panel").nth(1).locator(".list li", has_not_text="t7")
    index = items.first.locator(".index").text_content()
    items.first.hover()
    tab.mouse.down()  # on the inactive panel: it becomes active, and the click still counts
    settle(tab)
    tab.mouse.up()
    assert f"token={index}" in address(tab)
    assert "active=1" in address(tab)
    tab.get_by_role("button", name="Responsibility").click()
    assert pressed(tab, "#views") == ["Responsibility"]


def test_clicking_the_map_chooses_the_query(show: Show, two: Any) -> None:
    tab = show(two)
    point(tab, 11, 3, SIZE)
    tab.mouse.down()
    tab.mouse.up()
    assert "token=11" in address(tab)
    tab.keyboard.press("x")
    point(tab, 11, 3, SIZE)
    tab.mouse.down()
    tab.mouse.up()
    assert "token=3" in address(tab)


def test_keyboard(show: Show, two: Any) -> None:
    """Heads, layers, views, tokens, panels and models without a mouse."""
    tab = show(two, at=FIRST)
    steps = [
        ("ArrowRight", "show=0.0.1,1.0.0"), ("ArrowDown", "show=0.1.1,1.0.0"), ("ArrowUp", "show=0.0.1,1.0.0"),
        ("ArrowLeft", "show=0.0.0,1.0.0"), ("ArrowLeft", "show=0.0.0,1.0.0"), ("a", "active=1"),
        ("ArrowRight", "show=0.0.0,1.0.1"), ("ArrowRight", "show=0.0.0,1.0.1"), ("2", "view=c2"), ("r", "view=gamma"),
        ("l", "log=1"), ("s", "same=1"), ("]", "token=0"), ("]", "token=1"), ("x", "from=in"),
        ("m", "show=0.0.0,0.0.1"), ("+", "zoom="), ("d", "theme="), ("p", "show=0.0.1"),
    ]  # fmt: skip
    for key, expected in steps:
        tab.keyboard.press(key)
        assert expected in address(tab), key
    tab.keyboard.press("0")
    tab.keyboard.press("t")
    tab.keyboard.press("Escape")
    assert not any(part in address(tab) for part in ("zoom", "view", "token"))
    tab.keyboard.press("?")
    assert tab.locator("#help").is_visible()
    assert tab.locator("#help").evaluate("(e) => e.scrollTop") == 0
    tab.keyboard.press("Escape")
    assert not tab.locator("#help").is_visible()


def test_pin_and_close(show: Show) -> None:
    """With one model, "Compare two heads" keeps this head and opens a second panel."""
    tab = show(page([attention("smgk", 3, SIZE)]), at="#show=0.0.0")
    assert tab.locator(".panel:visible").count() == 1
    tab.get_by_role("button", name="Compare two heads").click()
    tab.keyboard.press("ArrowRight")
    assert "show=0.0.0,0.0.1" in address(tab)
    settle(tab)
    assert tab.locator(".panel:visible").count() == 2
    tab.locator(".panel").nth(0).get_by_label("Close this panel").click()
    assert address(tab).startswith("#show=0.0.1")
    settle(tab)
    assert tab.locator(".panel:visible").count() == 1


def test_one_scale_for_both_panels(show: Show) -> None:
    """With the same scale, the colours of one map depend on the other."""
    flat = torch.full((1, 1, 8, 8), 1 / 8)
    models = [
        Model.of_weights("sharp", list("abcdefgh"), pattern().sum(0)[None, None]),
        Model.of_weights("flat", list("abcdefgh"), flat),
    ]
    tab = show(page(models), at="#theme=light")
    assert pixel(tab, 4, 4, panel=1) == [38, 10, 74]
    tab.keyboard.press("s")
    settle(tab)
    assert sum(pixel(tab, 4, 4, panel=1)) > sum([164, 152, 208])
    assert pixel(tab, 4, 4, panel=0) == [38, 10, 74]


def test_the_address_restores_the_view(show: Show, two: Any) -> None:
    at = "#show=1.1.1,0.0.2&active=1&view=gamma&log=1&same=1&token=9&from=in&zoom=0.25_0.75_0.1_0.6&theme=dark"
    tab = show(two, at=at)
    assert pressed(tab, "#views") == ["Responsibility"]
    assert pressed(tab, "#scales") == ["Log"]
    assert tab.locator("html").get_attribute("data-theme") == "dark"
    assert tab.locator(".where:visible").all_text_contents() == ["Layer 2 · Head 2", "Layer 1 · Head 3"]
    tab.keyboard.press("l")
    assert address(tab) == at.replace("&log=1", "")


@pytest.mark.parametrize(
    "at", ["#show=99.99.99,x.y&view=c9&token=-3&zoom=5_1", "#show=&view=<b>&token=1e9&zoom=0.5_0.5_1_0", "#%%%"]
)
def test_a_broken_address_breaks_nothing(show: Show, two: Any, at: str) -> None:
    tab = show(two, at=at)
    assert tab.locator(".panel:visible").count() in (1, 2)
    assert pressed(tab, "#views") == ["Attention"]


def test_a_changed_address_is_followed(show: Show, two: Any) -> None:
    tab = show(two)
    tab.evaluate("location.hash = '#show=1.0.1&view=c2'")
    tab.locator(".where", has_text="Layer 1 · Head 2").wait_for()
    assert tab.locator("#views button[aria-pressed=true]").text_content().endswith("2")


def test_finding_tokens(show: Show, two: Any) -> None:
    tab = show(two, at=FIRST)
    tab.keyboard.press("/")
    tab.keyboard.type("t1")
    assert "token=1" in address(tab)
    assert tab.locator(".hits:visible").first.text_content() == "1 of 11"  # t1, t10, ..., t19
    tab.keyboard.press("Enter")
    assert "token=10" in address(tab)
    tab.keyboard.press("Shift+Enter")
    assert address(tab).endswith("token=1")
    tab.locator("input").first.fill("t4 t5")  # across a token boundary
    assert "token=4" in address(tab)
    tab.locator("input").first.fill("nothing")
    assert tab.locator(".hits:visible").first.text_content() == "none"
    tab.keyboard.press("Escape")
    tab.keyboard.press("ArrowRight")
    assert "show=0.0.1" in address(tab)


def test_the_wheel_scrolls_the_page(show: Show, two: Any) -> None:
    """Over a map too, unless Ctrl is held or the map is zoomed; zoomed out again, the page scrolls as before."""
    tab = show(two, height=500)
    point(tab, 12, 12, SIZE)
    before = scrolled(tab)
    tab.mouse.wheel(0, 60)
    wait_until(tab, f"scrollY > {before}")
    assert "zoom" not in address(tab)
    point(tab, 12, 12, SIZE)
    before = scrolled(tab)
    tab.keyboard.down("Control")
    tab.mouse.wheel(0, -120)
    tab.wait_for_url("**zoom=**")
    tab.keyboard.up("Control")
    closer = address(tab)
    tab.mouse.wheel(0, -120)
    wait_until(tab, f"location.hash !== '{closer}'")
    tab.mouse.wheel(0, 120)
    wait_until(tab, f"location.hash === '{closer}'")
    tab.mouse.wheel(0, 120)
    wait_until(tab, "!location.hash.includes('zoom')")  # despite rounding, the whole map
    assert scrolled(tab) == before
    tab.mouse.wheel(0, 120)
    wait_until(tab, f"scrollY > {before}")
    tab.mouse.move(2, 2)  # beside the zoomed map
    settle(tab)
    tab.keyboard.press("+")
    closer = address(tab)
    before = scrolled(tab)
    tab.mouse.wheel(0, 60)
    wait_until(tab, f"scrollY > {before}")
    assert address(tab) == closer


def test_wheel_and_drag_move_the_window(show: Show, two: Any) -> None:
    tab = show(two, at=FIRST)
    point(tab, 12, 12, SIZE)
    tab.keyboard.down("Control")
    tab.mouse.wheel(0, -300)
    tab.keyboard.up("Control")
    tab.wait_for_url("**zoom=**")
    before = address(tab)
    tab.mouse.down()
    tab.mouse.move(300, 500, steps=3)
    tab.mouse.up()
    assert address(tab) != before
    assert "token" not in address(tab)  # a drag is not a click
    tab.locator(".map").first.dblclick()
    assert "zoom" not in address(tab)
