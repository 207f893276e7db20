"""What the page shows in a real browser, opened from disk without a network."""

from __future__ import annotations

import io
import struct
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mgk.inspect import Answer, Bar, Bars, Chart, Model, Series, Table, Text, page
from tests.inspect.browser import (
    FIRST,
    SIZE,
    Show,
    patterned,
    pixel,
    point,
    settle,
    shown_number,
)
from tests.inspect.common import WICKED, attention, factors, pattern


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
