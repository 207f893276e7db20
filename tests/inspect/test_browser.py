"""The page in a real browser, opened from disk without a network: what it shows and what each control does."""

from __future__ import annotations

import io
import itertools
import struct
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from mgk.inspect import Answer, Bar, Bars, Chart, Model, Series, Table, Text, page
from tests.inspect.common import WICKED, attention, factors, pattern
from tests.inspect.conftest import settle

Show = Callable[..., Any]
SIZE = 24
FIRST = "#show=0.0.0,1.0.0"  # the first head of both models, no token; without an address the page chooses both


@pytest.fixture(scope="module")
def two() -> Any:
    return page([attention("softmax", 4, SIZE), attention("smgk", 2, SIZE)])


def patterned() -> Any:
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


def test_opens_with_two_models_side_by_side(show: Show, two: Any) -> None:
    tab = show(two)
    assert tab.locator(".panel:visible").count() == 2
    assert tab.locator(".thumb").count() == 2 * 4 + 2 * 2
    painted = tab.evaluate("[...document.querySelectorAll('.thumb canvas')].every((c) => c.width === 24)")
    assert painted
    assert tab.locator(".panel").nth(1).locator(".components thead th").all_text_contents() == ["Component", "1", "2"]


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


def test_opens_with_a_mixture_beside_the_first_model(show: Show) -> None:
    models = [attention(variant, 2, 8, layers=1) for variant in ("softmax", "softmax", "smgk")]
    tab = show(page(models))
    shown = tab.evaluate("[...document.querySelectorAll('.panel select')].map((s) => s.selectedIndex)")
    assert shown == [0, 2]


def test_pixels_of_a_known_map(show: Show) -> None:
    """A diagonal of 3/4 by component 1, a column of 1/4 by component 2, the background elsewhere."""
    tab = show(patterned(), at="#theme=light")
    white, full = [255, 255, 255], [38, 10, 74]
    assert pixel(tab, 5, 5) == full
    assert pixel(tab, 5, 4) == pixel(tab, 0, 7) == white
    column = pixel(tab, 5, 2)
    assert white != column != full
    assert pixel(tab, 2, 2) == full  # both components: 1
    tab.keyboard.press("1")
    settle(tab)
    assert pixel(tab, 5, 5) == [0, 104, 172]
    assert pixel(tab, 5, 2) == white
    tab.keyboard.press("2")
    settle(tab)
    assert pixel(tab, 5, 5) == white
    tab.keyboard.press("r")
    settle(tab)
    red, _, blue = pixel(tab, 5, 2)
    assert red > blue  # component 2 is orange
    red, _, blue = pixel(tab, 5, 5)
    assert blue > red  # component 1 is blue
    tab.keyboard.press("l")
    settle(tab)
    stronger = pixel(tab, 5, 2)
    tab.keyboard.press("l")
    settle(tab)
    assert sum(stronger) < sum(pixel(tab, 5, 2))  # a quarter is brighter on a logarithmic scale
    tab.keyboard.press("d")
    settle(tab)
    assert pixel(tab, 5, 4) == [14, 17, 24]


@pytest.mark.parametrize(
    ("variant", "options"),
    [
        ("softmax", {}),
        ("mgk", {"num_components": 3}),
        ("smgk", {}),
        ("smgk", {"e_step": "hard"}),
        ("smgk", {"learn_variance": True}),
        ("smlk", {"feature_map": "favor"}),
    ],
)
def test_numbers_are_those_of_the_library(show: Show, variant: str, options: dict[str, Any]) -> None:
    """Weights, contributions and responsibilities under the pointer, to the four digits shown."""
    model = attention(variant, 1, SIZE, layers=1, causal=variant == "mgk", **options)
    rows = factors(model).rows()
    tab = show(page([model]))
    for query, key in [(3, 1), (20, 7), (23, 23), (9, 9)]:
        point(tab, query, key, SIZE)
        tab.locator("#tip:not([hidden])", has_text=f"t{query} {query} → t{key} {key}").wait_for()
        weight = shown_number(tab.locator("#tip b").text_content())
        # four digits are shown, and 16 bits of queries and keys are right to 2e-4
        assert weight == pytest.approx(float(rows.weights[query, key]), rel=5e-4 + 2e-4)
        parts = tab.locator("#tip .part").all_text_contents()
        assert len(parts) == (model.layers[0][0].num_components if model.layers[0][0].num_components > 1 else 0)
        for r, text in enumerate(parts):
            part, responsibility = text.split(" responsibility ")
            assert shown_number(part) == pytest.approx(float(rows.components[r, query, key]), rel=7e-4, abs=1e-9)
            assert shown_number(responsibility) == pytest.approx(
                float(rows.responsibilities[r, query, key]), rel=6e-3, abs=1e-9
            )


def test_lists_name_the_largest(show: Show) -> None:
    """The keys that token 5 attends to and the queries that attend to it, largest first."""
    model = attention("smgk", 1, SIZE, layers=1)
    weights = factors(model).rows().weights
    tab = show(page([model]), at="#token=5")
    for title, values in (("t5 reads", weights[5]), ("t5 is read by", weights[:, 5])):
        items = tab.locator(".lists > div", has_text=title)
        best = values.topk(8)
        assert [int(text) for text in items.locator(".index").all_text_contents()] == best.indices.tolist()
        shown = [shown_number(text) for text in items.locator(".value").all_text_contents()]
        assert shown == pytest.approx(best.values.tolist(), rel=6e-3)
    here = tab.locator(".strip .here")
    assert here.text_content() == "t5 "
    darkest = tab.evaluate("[...document.querySelectorAll('.strip .s10')].map((s) => +s.dataset.i)")
    assert int(weights[5].argmax()) in darkest


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


def test_export(show: Show, two: Any) -> None:
    """Both maps as PNG and as SVG that parses, with their titles."""
    tab = show(two, at=f"{FIRST}&view=gamma&zoom=0_0.5_0_0.5")
    with tab.expect_download() as download:
        tab.get_by_role("button", name="PNG").click()
    data = download.value.path().read_bytes()
    width, height = struct.unpack(">II", data[16:24])
    assert data.startswith(b"\x89PNG")
    assert width > height > 1000
    assert download.value.suggested_filename == "softmax-4-heads-layer1-head1-vs-smgk-2-heads-layer1-head1.png"
    with tab.expect_download() as download:
        tab.keyboard.press("Shift+E")
    root = ElementTree.parse(io.BytesIO(download.value.path().read_bytes())).getroot()
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "smgk, 2 heads, layer 1, head 1" in texts
    assert "t3" in texts
    images = [element.get("href") or "" for element in root.iter("{http://www.w3.org/2000/svg}image")]
    assert len(images) >= 4
    assert all(image.startswith("data:image/png;base64,") for image in images)


def test_any_text_shows_as_text(show: Show) -> None:
    """Tags, quotes, emoji, right-to-left letters, control characters and 100,000 letters are shown as text."""
    text = WICKED.replace("\ud800", "")
    tokens = [text, "<img src=x onerror=alert(2)>", "😀", "ש", "", "\n", " ", "x" * 100_000]
    model = Model.of_weights(text, tokens, pattern()[None, None], note=text, unseen=text * 500)
    model = replace(model, answer=Answer(text, [(text, 0.5), ("<b>", 0.5)], text))
    chart = Chart([Series(text, [0, 1], [0, 1])], text, text, text, note=text)
    bars = Bars([Bar(text, 1, text, 0, 2)], text, text)
    made = page([model], title=text, report=[Text(text, text), Table([text], [[text]]), chart, bars])
    tab = show(made, at="#token=1")
    assert tab.locator("h1").text_content() == text.replace("\x00", "\ufffd").replace("\x07", "\ufffd")
    assert (
        tab.locator(".strip").text_content().replace("\ufffd", "\x00")
        == "".join(tokens).replace("\n", "↵\n") + text * 500
    )
    assert tab.locator(".strip img, .strip b, h1 script, .answer b, .barlist :is(script, dt b)").count() == 0
    point(tab, 3, 4, 8)
    tab.locator("#tip:not([hidden])", has_text="ש +1").wait_for()
    with tab.expect_download() as download:
        tab.keyboard.press("Shift+E")
    ElementTree.parse(download.value.path())
    assert tab.evaluate("document.scrollingElement.scrollWidth <= innerWidth")


def test_without_decompression_stream(show: Show) -> None:
    """Browsers older than 2023 inflate with the page's own code, with the same pixels."""
    made = page([attention("smgk", 2, 60, layers=1)])

    def drawn(script: str) -> str:
        tab = show(made, script=script)
        return str(tab.evaluate("[...document.querySelectorAll('canvas')].map((c) => c.toDataURL()).join()"))

    assert "data-deflated" in made.html
    assert drawn("delete window.DecompressionStream; delete Uint8Array.fromBase64;") == drawn("")


def test_long_inputs_are_pooled_and_exact_on_demand(show: Show) -> None:
    """Beyond 1,024 tokens the map is pooled; zooming in computes single weights, equal to those of the library."""
    model = attention("smgk", 1, 1300, layers=1)
    tab = show(page([model]), height=1000)
    assert "means of 3 \u00d7 3" in tab.locator(".legend").text_content()
    weights = factors(model).rows().weights
    tab.evaluate("location.hash = '#show=0.0.0&zoom=0.5_0.51_0.2_0.21'")
    tab.wait_for_selector(".pooled", state="detached")
    settle(tab)
    point(tab, 5, 6, 13)
    tab.locator("#tip:not([hidden])", has_text="t655 655 → t266 266").wait_for()
    assert shown_number(tab.locator("#tip b").text_content()) == pytest.approx(float(weights[655, 266]), rel=7e-4)
    shades = np.array([[sum(pixel(tab, i, j, 13)) for j in range(13)] for i in range(13)])
    exact = weights[650:663, 260:273]
    assert np.corrcoef(shades.ravel(), -exact.ravel().clamp(max=float(exact.max()) / 2))[0, 1] > 0.5


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


def test_inline_in_a_notebook(show: Show, two: Any, browser: Any) -> None:
    """In a frame that has no address."""
    context = browser.new_context(offline=True)
    tab, complaints = context.new_page(), []
    tab.on("pageerror", lambda error: complaints.append(str(error)))
    tab.set_content(two._repr_html_())
    frame = tab.frame_locator("iframe")
    frame.locator(".thumb").nth(3).click()
    frame.locator(".where", has_text="Layer 1 · Head 4").wait_for()
    context.close()
    assert not complaints
