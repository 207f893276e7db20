"""Helpers of the tests in a browser."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mgk.inspect import Model, Page, page
from tests.inspect.common import pattern

Show = Callable[..., Any]
SIZE = 24
FIRST = "#show=0.0.0,1.0.0"  # the first head of both models, no token; without an address the page chooses both


def settle(tab: Any) -> None:
    """Wait until every head that is shown is loaded and drawn."""
    tab.wait_for_selector("body[data-busy='0']")


def patterned() -> Page:
    """A page with one known map."""
    return page([Model.of_weights("known", list("abcdefgh"), pattern()[None, None])])


def pixel(tab: Any, query: float, key: float, size: int = 8, panel: int = 0) -> list[int]:
    """Colour of the large map at a pair."""
    return tab.evaluate(  # type: ignore[no-any-return]
        """([query, key, size, panel]) => {
            const canvas = document.querySelectorAll('.map')[panel], box = canvas.clientWidth;
            const pad = Number(canvas.dataset.pad), side = box - pad - 6, scale = canvas.width / box;
            const at = (i) => Math.floor((pad + (i + 0.5) / size * side) * scale);
            return [...canvas.getContext('2d').getImageData(at(key), at(query), 1, 1).data].slice(0, 3);
        }""",
        [query, key, size, panel],
    )


def point(tab: Any, query: int, key: int, size: int, panel: int = 0) -> None:
    """Move the mouse to a pair of the large map."""
    canvas = tab.locator(".map").nth(panel)
    canvas.scroll_into_view_if_needed()
    box, pad = canvas.bounding_box(), int(canvas.get_attribute("data-pad"))
    side = box["width"] - pad - 6
    tab.mouse.move(box["x"] + pad + (key + 0.5) / size * side, box["y"] + pad + (query + 0.5) / size * side)


def shown_number(text: str) -> float:
    digits = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")
    mantissa, _, power = text.partition("·10")
    return float(mantissa) * 10 ** float(power.translate(digits) or 0)


def address(tab: Any) -> str:
    """The state in the address. The page is drawn with the next frame: call `settle` before reading it."""
    return str(tab.evaluate("location.hash"))


def pressed(tab: Any, group: str) -> list[str]:
    settle(tab)
    return tab.locator(f"{group} button[aria-pressed=true]").all_text_contents()  # type: ignore[no-any-return]


def scrolled(tab: Any) -> int:
    return int(tab.evaluate("scrollY"))


def wait_until(tab: Any, condition: str) -> None:
    """Wait for an expression in JavaScript to be true, at most 300 frames.

    Playwright's own `wait_for_function` needs `eval`, which the policy of the page forbids.
    """
    tab.evaluate(
        f"""() => new Promise((done, failed) => {{
            let frames = 0;
            const look = () => {{
                if ({condition}) done();
                else if (++frames > 300) failed(new Error(`still false at ${{location.hash}}, ${{scrollY}}`));
                else requestAnimationFrame(look);
            }};
            look();
        }})"""
    )
