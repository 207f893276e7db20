"""The content of a page is small and precise, and no text can break out of its element."""

from __future__ import annotations

import html
import math
import re
import zlib
from base64 import b64decode
from pathlib import Path

import numpy as np
import pytest
import torch

from mgk.inspect import Chart, Dense, Model, Series, Table, Text, byte_tokens, collect, page, rank, write
from mgk.inspect.blocks import POINTS
from mgk.inspect.pack import Blocks, fits_16_bits, quantise, script_safe
from mgk.nn import MixtureAttention
from tests.disk import small_files
from tests.inspect.common import WICKED, attention, embedded, factors, pattern


def block(blocks: Blocks, index: int = 0) -> bytes:
    found = re.fullmatch(
        r'<script type="text/plain" id="block-\d+"( data-deflated)?>(.*)</script>', blocks.elements[index]
    )
    assert found
    data = b64decode(found[2])
    return zlib.decompress(data) if found[1] else data


def test_a_page_of_the_usual_size_is_small() -> None:
    """2 layers, 4 heads, 512 tokens: the limit is 5 MB, and half of it is enough."""
    assert len(page([attention("smgk", 4, 512)], ranks_up_to=0).html) < 2.5e6


def test_nothing_is_fetched() -> None:
    """The page has no URL of a script, style, font or image, and a policy that forbids requests."""
    text = page([attention("smgk", 2, 16)]).html
    assert "default-src 'none'" in text
    assert not re.search(r'(src|href)\s*=\s*"(?!data:)', re.sub(r"<script>.*</script>", "", text, flags=re.S))
    assert "@import" not in text
    assert "url(" not in text


@pytest.mark.parametrize("text", [WICKED, "</SCRIPT >", "<!--<script>", "x" * 100_000])
def test_text_cannot_end_its_element(text: str) -> None:
    safe = script_safe({"text": text})
    assert "<" not in safe
    assert "\u2028" not in safe
    made = page(
        [Model.of_weights(text, [text] * 8, pattern()[None, None], unseen=text)], title=text, report=[Text(text)]
    )
    data = embedded(made.html)
    assert data["models"][0]["name"] == data["models"][0]["tokens"][3] == data["report"][0]["text"] == text
    printable = text.translate(dict.fromkeys([0, 7, 0xD800], "\ufffd"))
    assert f"<h1>{html.escape(printable)}</h1>" in made.html
    made.html.encode("utf-8")


def test_16_bits_hold_half_a_step() -> None:
    values = torch.randn(50, 6).numpy() * [1e-3, 1, 10, 1e4, 0, 1]
    steps, codes = quantise(values)
    assert (np.abs(codes * steps.astype(float) - values) <= 0.51 * steps).all()


@pytest.mark.parametrize(("kind", "relative"), [("u8", 0.03), ("u16", 2e-4)])
def test_logarithms_keep_relative_precision(kind: str, relative: float) -> None:
    blocks, values = Blocks(), np.array([0, 1e-5, 3e-4, 0.02, 0.5])
    facts = blocks.logs(values, kind)
    codes = np.frombuffer(block(blocks), "<u1" if kind == "u8" else "<u2").astype(float)
    back = np.where(codes, facts["largest"] * np.exp((codes - codes.max()) * facts["step"]), 0)
    np.testing.assert_allclose(back, values, rtol=relative)


def test_precision_follows_the_logits() -> None:
    """Ordinary queries and keys are stored in 16 bits; logits in the thousands need 32."""
    model = attention("mgk", 1, 40, layers=1)
    head = factors(model)
    assert fits_16_bits(head)
    assert embedded(page([model]).html)["models"][0]["layers"][0]["heads"][0]["query"]["type"] == "i16"
    large = Model(
        "large", model.tokens, [[head.__class__(60 * head.query, 60 * head.key, head.scale, head.row, head.column)]]
    )
    assert not fits_16_bits(factors(large))
    assert embedded(page([large]).html)["models"][0]["layers"][0]["heads"][0]["query"]["type"] == "f32"


def test_numbers_beside_the_maps() -> None:
    weights = pattern()
    model = Model.of_weights("m", list("abcdefgh"), weights[None, None])
    (head,) = embedded(page([model]).html)["models"][0]["layers"][0]["heads"]
    assert head["rank"] == rank(weights.sum(0)) == 8
    assert head["share"] == [0.75, 0.25]
    (without,) = embedded(page([model], ranks_up_to=7).html)["models"][0]["layers"][0]["heads"]
    assert without["rank"] is None


def test_component_distance_uses_the_variance_of_the_layer() -> None:
    module = MixtureAttention(16, 2, variant="smgk", learn_variance=True)
    assert module.log_variance is not None
    assert module.shift is not None
    module.log_variance.data[0] = math.log(100)
    made = page([Model.of_layers("m", list("abcde"), collect(module, torch.randn(1, 5, 16)))])
    apart = [head["separation"] for head in embedded(made.html)["models"][0]["layers"][0]["heads"]]
    distance = (module.shift[:, 0] - module.shift[:, 1]).norm(dim=-1)
    assert apart == pytest.approx((distance / torch.tensor([10, 8**0.25])).tolist(), abs=1e-3)


def test_weights_may_require_gradients() -> None:
    weights = pattern()[None, None]
    plain, traced = (Model.of_weights("m", list("abcdefgh"), x) for x in (weights, weights.clone().requires_grad_()))
    assert page([plain]).html == page([traced]).html


def test_report_blocks() -> None:
    blocks: list[Table | Chart] = [
        Table(["a"], [["1"]], "T"),
        Chart([Series("s", [1, 2], [3, 4])], "C", "x", "y", log_y=True),
    ]
    data = embedded(page([], report=blocks).html)
    assert [block["kind"] for block in data["report"]] == ["table", "chart"]
    assert data["report"][1]["series"][0]["y"] == [3, 4]


def test_a_long_line_keeps_its_ends_and_extremes() -> None:
    values = np.random.default_rng(0).normal(size=130_000)
    values[77_777], values[3] = 50, -50
    lines = [Series("long", list(range(130_000)), values.tolist()), Series("short", [1, 2], [3, 4])]
    data = embedded(page([], report=[Chart(lines, "C", "x", "y")]).html)
    long, short = data["report"][0]["series"]
    assert len(long["x"]) == len(long["y"]) <= POINTS
    assert long["x"] == sorted(set(long["x"]))
    assert {(0, values[0]), (129_999, values[-1]), (77_777, 50), (3, -50)} <= set(
        zip(long["x"], long["y"], strict=True)
    )
    assert short["y"] == [3, 4]


def test_a_full_disk_leaves_the_page_that_was_there(tmp_path: Path) -> None:
    path = page([], report=[Text("old")]).write(tmp_path / "page.html")
    before = path.read_text()
    with small_files(1000), pytest.raises(OSError, match=r"page.html: cannot be written \(File too large\)"):
        page([], report=[Text("new")]).write(path)
    assert path.read_text() == before
    assert list(tmp_path.iterdir()) == [path]


def test_bytes_have_labels() -> None:
    assert byte_tokens("aé😀\n".encode()) == ["a", "é", "", "😀", "", "", "", "\n"]
    assert byte_tokens(b"a\xff\x00") == ["a", "\\xff", "\\x00"]
    assert len(byte_tokens("\ufffd".encode())) == 3


def test_files_and_notebooks(tmp_path: Path) -> None:
    model = attention("softmax", 1, 12, layers=1)
    path = write(tmp_path / "new" / "page.html", [model], title="T")
    made = page([model], title="T")
    assert path.read_text(encoding="utf-8") == made.html
    assert made._repr_html_().startswith("<iframe srcdoc=")
    assert "iframe" not in repr(made)


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="models: expected at least one, or a report, got neither"):
        page([])
    with pytest.raises(ValueError, match="layers: expected at least one layer with at least one head"):
        Model("m", [], [])
    with pytest.raises(
        ValueError, match="tokens: expected one for each position of self-attention, got 3 for 8 queries"
    ):
        Model.of_weights("m", ["a", "b", "c"], pattern()[None, None])
    with pytest.raises(TypeError, match=r"weights: expected one tensor \(L,H,N,N\) or \(L,H,M,N,N\), got a tuple"):
        Model.of_weights("m", list("abcdefgh"), (pattern(), pattern()))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"weights: expected \(L,H,N,N\) or \(L,H,M,N,N\), got a tensor of shape"):
        Model.of_weights("m", list("abcdefgh"), pattern())
    nothing = Model.of_weights("m", list("abcdefgh"), 0 * pattern()[None, None])
    nan = Model.of_layers("m", ["a", "b"], collect(MixtureAttention(16, 2), torch.full((1, 2, 16), torch.nan)))
    for model in (nothing, nan):
        with pytest.raises(ValueError, match="layers: expected finite weights, not all of them 0, got others in"):
            page([model])
    with pytest.raises(ValueError, match="layers: expected at most 2048 positions for heads given by full matrices"):
        Model("m", [""] * 2049, [[Dense(torch.zeros(1, 2049, 2049))]])
