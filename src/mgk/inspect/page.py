"""One self-contained HTML file in which anyone can look inside mixture-key attention.

    page = mgk.inspect.page([Model.of_layers("sMGK, 4 heads", tokens, mgk.inspect.collect(model, inputs))])
    page.write("attention.html")        # or show it inline: the last expression of a notebook cell

H heads, M components, N positions, G bins of a pooled map.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mgk.inspect.collect import Layer
from mgk.inspect.heads import Dense, Factors, Head
from mgk.inspect.pack import Blocks, fits_16_bits, script_safe
from mgk.inspect.rank import rank
from mgk.inspect.summary import Summary, separation, summarise
from mgk.ops.arguments import describe

if TYPE_CHECKING:
    from jaxtyping import Float

EXACT = 1024  # positions up to which the page computes whole maps, and ranks are found
BINS = {True: 128, False: 512}  # of the map that is shown at once: small where the exact one follows within a moment
DENSE_LIMIT = 2048
UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\ud800-\udfff]")  # what HTML or UTF-8 has no place for
SCRIPTS = ("codec", "heads", "colour", "state", "map", "inspect", "panel", "export", "report", "app")


@dataclass(frozen=True)
class Model:
    """A model on an input: its heads by layer, and what the positions are called."""

    name: str
    tokens: Sequence[str]
    """Of each position; "" goes on with the token before (the second byte of a letter)."""
    layers: Sequence[Sequence[Head]]
    priors: Sequence[Float[Tensor, "h m"]] | None = None
    separations: Sequence[Float[Tensor, " h"]] | None = None
    """How far apart two components are, in standard deviations: the largest distance of each head."""
    note: str = ""
    unseen: str = ""
    """Text after the last token, which the model never saw."""

    def __post_init__(self) -> None:
        if not self.layers or not all(self.layers):
            raise ValueError("layers: expected at least one layer with at least one head, got none")
        for heads in self.layers:
            for head in heads:
                if not head.num_queries == head.num_keys == len(self.tokens):
                    raise ValueError(
                        f"tokens: expected one for each position of self-attention, got {len(self.tokens)} for "
                        f"{head.num_queries} queries and {head.num_keys} keys"
                    )
                if isinstance(head, Dense) and head.num_keys > DENSE_LIMIT:
                    raise ValueError(
                        f"layers: expected at most {DENSE_LIMIT} positions where whole matrices are given, got "
                        f"{head.num_keys}; give queries and keys (mgk.inspect.heads) instead"
                    )

    @classmethod
    def of_layers(
        cls,
        name: str,
        tokens: Sequence[str],
        layers: Sequence[Layer],
        *,
        sample: int = 0,
        note: str = "",
        unseen: str = "",
    ) -> Model:
        """Of what `mgk.inspect.collect` returns."""

        def apart(layer: Layer, h: int) -> Tensor:
            variance = None if layer.variance is None else layer.variance[h]
            return separation(layer.component_keys(h, sample), variance).max()

        separations = [torch.stack([apart(layer, h) for h in range(layer.num_heads)]) for layer in layers]
        heads = [layer.heads(sample) for layer in layers]
        return cls(name, tokens, heads, [layer.prior for layer in layers], separations, note, unseen)

    @classmethod
    def of_weights(
        cls,
        name: str,
        tokens: Sequence[str],
        weights: Float[Tensor, "l h n n"] | Float[Tensor, "l h m n n"],
        *,
        note: str = "",
        unseen: str = "",
    ) -> Model:
        """Of attention matrices of any model, or of what each component adds to them."""
        if isinstance(weights, list | tuple):
            raise TypeError(f"weights: expected one tensor (L,H,N,N) or (L,H,M,N,N), got a {type(weights).__name__}")
        tensor = torch.as_tensor(weights).detach()
        if tensor.dim() not in (4, 5):
            raise ValueError(f"weights: expected (L,H,N,N) or (L,H,M,N,N), got {describe(tensor)}")
        heads = [[Dense.of(head) for head in layer] for layer in tensor]
        return cls(name, tokens, heads, note=note, unseen=unseen)


@dataclass(frozen=True)
class Text:
    """A paragraph of a report."""

    text: str
    title: str = ""


@dataclass(frozen=True)
class Table:
    """A table of a report; the best cell of a column may be marked by its row."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""


@dataclass(frozen=True)
class Series:
    name: str
    x: Sequence[float]
    y: Sequence[float]


@dataclass(frozen=True)
class Chart:
    """Lines over a common axis."""

    series: Sequence[Series]
    title: str = ""
    x_label: str = ""
    y_label: str = ""
    log_x: bool = False
    log_y: bool = False


Block = Text | Table | Chart


@dataclass(frozen=True)
class Page:
    """The finished page. `html` is all of it."""

    html: str = field(repr=False)

    def write(self, path: str | Path) -> Path:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.html, encoding="utf-8")
        return path

    def _repr_html_(self) -> str:
        """Inline in a notebook, in a frame of its own."""
        frame = 'style="width:100%;height:900px;border:0" sandbox="allow-scripts allow-downloads allow-popups"'
        return f'<iframe srcdoc="{html.escape(self.html)}" {frame}></iframe>'


def page(
    models: Sequence[Model],
    *,
    title: str = "Inside mixture-key attention",
    report: Sequence[Block] = (),
    ranks_up_to: int = EXACT,
    progress: Callable[[int, int], None] | None = None,
) -> Page:
    """Put models, and what is to be said about them first, on one page.

    Args:
        models: the first two are shown side by side.
        report: paragraphs, tables and charts above the explorer.
        ranks_up_to: ranks are found for matrices up to so many positions (a few seconds each at 4,000).
        progress: called with (layers done, layers in all).
    """
    if not models and not report:
        raise ValueError("models: expected at least one, or a report, got neither")
    blocks = Blocks()
    facts = []
    done, total = 0, sum(len(model.layers) for model in models)
    for model in models:
        layers = []
        for index, heads in enumerate(model.layers):
            layers.append(_layer(model, index, heads, blocks, ranks_up_to))
            done += 1
            if progress is not None:
                progress(done, total)
        facts.append(
            {
                "name": model.name,
                "note": model.note,
                "tokens": list(model.tokens),
                "unseen": model.unseen,
                "layers": layers,
            }
        )
    sections = [{"kind": type(block).__name__.lower(), **asdict(block)} for block in report]
    return Page(_fill(title, {"title": title, "models": facts, "report": sections}, blocks))


def write(path: str | Path, models: Sequence[Model], **options: Any) -> Path:
    """`page(models, **options).write(path)`."""
    return page(models, **options).write(path)


def byte_tokens(data: bytes) -> list[str]:
    """A label for every byte of a UTF-8 text: a letter stands at its first byte, "" at the others."""
    text = data.decode("utf-8", errors="replace")
    labels: list[str] = []
    for letter in text:
        labels += [letter] + [""] * (len(letter.encode("utf-8")) - 1)
    # Bytes that are no UTF-8 became one replacement letter for one to three of them: name them one by one.
    return labels if len(labels) == len(data) and "\ufffd" not in text else [_byte(value) for value in data]


def _byte(value: int) -> str:
    return chr(value) if 32 <= value < 127 or value == 10 else f"\\x{value:02x}"


def _layer(model: Model, index: int, heads: Sequence[Head], blocks: Blocks, ranks_up_to: int) -> dict[str, Any]:
    size = len(model.tokens)
    summary = summarise(heads, bins=BINS[size <= EXACT])
    if not bool(summary.cosine.trace() > 0):  # NaN, or nothing
        raise ValueError(
            f"layers: expected finite weights, not all of them 0, got others in layer {index + 1} of {model.name!r}"
        )
    rank_of = [rank(head.rows().weights) if size <= ranks_up_to else None for head in heads]
    prior = None if model.priors is None else model.priors[index]
    apart = None if model.separations is None else model.separations[index]
    return {
        "effective": summary.effective_heads,
        "cosine": _rounded(summary.cosine),
        "overlap": _rounded(summary.overlap),
        "heads": [
            {
                **_stored(head, summary.log_total[h], blocks),
                **_measured(summary, h, head.num_components),
                "rank": rank_of[h],
                "prior": None if prior is None else _rounded(prior[h]),
                "separation": None if apart is None else round(float(apart[h]), 3),
                "bin": summary.bin_size,
                "base": blocks.logs((summary.pooled[h] / summary.bin_size).double().numpy(), "u8"),
            }
            for h, head in enumerate(heads)
        ],
    }


def _measured(summary: Summary, h: int, components: int) -> dict[str, Any]:
    return {
        "entropy": round(float(summary.entropy[h].mean()), 4),
        "peak": float(summary.peak[h].quantile(0.75)),
        "share": _rounded(summary.share[h, :components]),
        "wins": _rounded(summary.wins[h, :components]),
        "removal": _rounded(summary.removal[h, :components]),
        "componentOverlap": _rounded(summary.component_overlap[h, :components, :components]),
    }


def _stored(head: Head, log_total: Tensor, blocks: Blocks) -> dict[str, Any]:
    """What the page needs to compute any weight of a head."""
    facts: dict[str, Any] = {"size": head.num_keys, "components": head.num_components}
    if not isinstance(head, Factors):
        return facts | {"weights": blocks.logs(head.rows().components.double().numpy(), "u16")}
    head = head.to("cpu")
    pack = blocks.steps if fits_16_bits(head) else blocks.floats
    smallest = torch.finfo(torch.float32).min  # -inf: JSON knows none, and an array on the page need not
    return facts | {
        "query": pack(head.query.numpy()),
        "key": pack(head.key.numpy()),
        "scale": head.scale.tolist(),
        "row": blocks.floats(head.row.clamp(min=smallest).numpy()),
        "column": blocks.floats(head.column.clamp(min=smallest).numpy()),
        "total": blocks.floats(log_total.clamp(min=smallest).numpy()),
        "log": head.link == "log",
        "hard": head.hard,
        "causal": head.is_causal,
    }


def _rounded(values: Tensor) -> Any:
    return [_rounded(value) if value.dim() else round(float(value), 4) for value in values]


def _fill(title: str, data: dict[str, Any], blocks: Blocks) -> str:
    template = _asset("page.html")
    parts = {
        "title": html.escape(UNPRINTABLE.sub("\ufffd", title)),
        "style": _asset("page.css"),
        "data": script_safe(data),
        "blocks": "\n".join(blocks.elements),
        "script": "\n".join(_asset(f"{name}.js") for name in SCRIPTS),
    }
    return "".join(_substituted(template, parts))


def _substituted(template: str, parts: dict[str, str]) -> Iterator[str]:
    """The template with every {{name}} replaced, once: what is put in is not looked at again."""
    for index, piece in enumerate(template.split("{{")):
        name, end, rest = piece.partition("}}")
        yield piece if index == 0 else parts[name] + rest if end else "{{" + piece


def _asset(name: str) -> str:
    return resources.files("mgk.inspect").joinpath("assets", name).read_text(encoding="utf-8")
