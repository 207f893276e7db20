"""The explorer: one self-contained HTML file that shows the attention of models, head by head.

    page = mgk.inspect.page([Model.of_layers("sMGK, 4 heads", tokens, mgk.inspect.collect(model, inputs))])
    page.write("attention.html")        # in a notebook, a page as the last expression of a cell is shown inline

L layers, H heads, M components, N positions.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mgk.files import write_text
from mgk.inspect.blocks import Block, thinned
from mgk.inspect.collect import Layer
from mgk.inspect.heads import Dense, Factors, Head
from mgk.inspect.pack import Blocks, fits_16_bits, script_safe
from mgk.inspect.rank import rank
from mgk.inspect.summary import Summary, separation, summarise
from mgk.ops.arguments import describe

if TYPE_CHECKING:
    from jaxtyping import Float

EXACT = 1024  # up to this many positions the page computes full maps (as in assets/map.js) and ranks are computed
DENSE_LIMIT = 2048
UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\ud800-\udfff]")  # not allowed in HTML or UTF-8
SCRIPTS = (
    "codec", "heads", "colour", "state", "map", "axes", "text", "thumbs", "facts", "panel", "export",
    "chart", "bars", "report", "controls", "keys", "app",
)  # fmt: skip


@dataclass(frozen=True)
class Answer:
    """What a model predicts for its input: the most probable options, and the true one if it is known."""

    what: str
    """For example "class" or "next token"."""
    options: Sequence[tuple[str, float]]
    """Names and probabilities, the most probable first."""
    truth: str | None = None

    @classmethod
    def of_logits(
        cls, what: str, logits: Float[Tensor, " c"], names: Callable[[int], str], truth: str | None = None
    ) -> Answer:
        """Create the answer from the logits of all options."""
        best = logits.float().softmax(-1).topk(min(3, len(logits)))
        found = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        return cls(what, [(names(index), probability) for index, probability in found], truth)


@dataclass(frozen=True)
class Model:
    """A model on one input: its heads by layer, and a label for each position."""

    name: str
    tokens: Sequence[str]
    """Label of each position; "" continues the token before (the second byte of a character)."""
    layers: Sequence[Sequence[Head]]
    priors: Sequence[Float[Tensor, "h m"]] | None = None
    separations: Sequence[Float[Tensor, " h"]] | None = None
    """Largest distance between two components of each head, in standard deviations."""
    note: str = ""
    unseen: str = ""
    """Text after the last token that the model did not read."""
    answer: Answer | None = None

    def __post_init__(self) -> None:
        if not self.layers or not all(self.layers):
            raise ValueError("layers: expected at least one layer with at least one head, got none")
        for head in (head for heads in self.layers for head in heads):
            if not head.num_queries == head.num_keys == len(self.tokens):
                raise ValueError(
                    f"tokens: expected one for each position of self-attention, got {len(self.tokens)} for "
                    f"{head.num_queries} queries and {head.num_keys} keys"
                )
            if isinstance(head, Dense) and head.num_keys > DENSE_LIMIT:
                raise ValueError(
                    f"layers: expected at most {DENSE_LIMIT} positions for heads given by full matrices, got "
                    f"{head.num_keys}; give queries and keys (mgk.inspect.Factors) instead"
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
        answer: Answer | None = None,
    ) -> Model:
        """Create a model from the result of `mgk.inspect.collect`; `sample` is the index in the batch."""

        def distance(layer: Layer, h: int) -> Tensor:
            variance = None if layer.variance is None else layer.variance[h]
            return separation(layer.component_keys(h, sample), variance).max()

        separations = [torch.stack([distance(layer, h) for h in range(layer.num_heads)]) for layer in layers]
        heads = [layer.heads(sample) for layer in layers]
        return cls(name, tokens, heads, [layer.prior for layer in layers], separations, note, unseen, answer)

    @classmethod
    def of_weights(
        cls,
        name: str,
        tokens: Sequence[str],
        weights: Float[Tensor, "l h n n"] | Float[Tensor, "l h m n n"],
        *,
        note: str = "",
        unseen: str = "",
        answer: Answer | None = None,
    ) -> Model:
        """Create a model from attention matrices, or from the contribution of each component to them."""
        if isinstance(weights, list | tuple):
            raise TypeError(f"weights: expected one tensor (L,H,N,N) or (L,H,M,N,N), got a {type(weights).__name__}")
        tensor = torch.as_tensor(weights).detach()
        if tensor.dim() not in (4, 5):
            raise ValueError(f"weights: expected (L,H,N,N) or (L,H,M,N,N), got {describe(tensor)}")
        heads = [[Dense.of(head) for head in layer] for layer in tensor]
        return cls(name, tokens, heads, note=note, unseen=unseen, answer=answer)


@dataclass(frozen=True)
class Page:
    """A finished page; `html` is the full text of the file."""

    html: str = field(repr=False)

    def write(self, path: str | Path) -> Path:
        """Write the page; on an error, such as a full disk, an older file stays as it is."""
        path = Path(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, self.html)
        except OSError as error:
            told = f"{path}: cannot be written ({error.strerror}); free disk space or choose another file"
            raise OSError(told) from None
        return path

    def _repr_html_(self) -> str:
        """Show the page inline in a notebook, in a frame."""
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
    """Create a page with a report and an explorer of the models.

    Args:
        models: the first two are shown side by side.
        report: paragraphs, tables and charts above the explorer.
        ranks_up_to: compute ranks of matrices up to this many positions (a few seconds each at 4,000).
        progress: called with the number of finished layers and the total.
    """
    if not models and not report:
        raise ValueError("models: expected at least one, or a report, got neither")
    blocks = Blocks()
    data: dict[str, Any] = {"title": title, "models": []}
    done, total = 0, sum(len(model.layers) for model in models)
    for model in models:
        layers = []
        for index in range(len(model.layers)):
            layers.append(_layer(model, index, blocks, ranks_up_to))
            done += 1
            if progress is not None:
                progress(done, total)
        facts = {"name": model.name, "note": model.note, "tokens": list(model.tokens), "unseen": model.unseen}
        answer = None if model.answer is None else asdict(model.answer)
        data["models"].append(facts | {"answer": answer, "layers": layers})
    data["report"] = [{"kind": type(block).__name__.lower(), **asdict(thinned(block))} for block in report]
    parts = {
        "title": html.escape(UNPRINTABLE.sub("\ufffd", title)),
        "style": _asset("page.css"),
        "data": script_safe(data),
        "blocks": "\n".join(blocks.elements),
        "script": "\n".join(_asset(f"{name}.js") for name in SCRIPTS),
    }
    return Page(re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _asset("page.html")))


def write(path: str | Path, models: Sequence[Model], **options: Any) -> Path:
    """Write `page(models, **options)` to a file."""
    return page(models, **options).write(path)


def _layer(model: Model, index: int, blocks: Blocks, ranks_up_to: int) -> dict[str, Any]:
    """Collect what the page shows of one layer; large arrays are added to `blocks`."""
    heads, size = model.layers[index], len(model.tokens)
    # The pooled map is shown until the exact one is computed, so it can be coarse if that takes a moment only.
    summary = summarise(heads, bins=128 if size <= EXACT else 512)
    if not bool(summary.cosine.trace() > 0):  # NaN or 0
        raise ValueError(
            f"layers: expected finite weights, not all of them 0, got others in layer {index + 1} of {model.name!r}"
        )
    facts = []
    for h, head in enumerate(heads):
        used = slice(0, head.num_components)
        facts.append(
            {
                **_stored(head, summary.log_total[h], blocks),
                "entropy": round(float(summary.entropy[h].mean()), 4),
                "peak": float(summary.peak[h].quantile(0.75)),
                "share": _rounded(summary.share[h, used]),
                "wins": _rounded(summary.wins[h, used]),
                "removal": _rounded(summary.removal[h, used]),
                "rank": rank(head.rows().weights) if size <= ranks_up_to else None,
                "prior": None if model.priors is None else _rounded(model.priors[index][h]),
                "separation": None if model.separations is None else round(float(model.separations[index][h]), 3),
                "bin": summary.bin_size,
                "base": blocks.logs((summary.pooled[h] / summary.bin_size).double().numpy(), "u8"),
            }
        )
    start = _start(summary)
    similarity = {"cosine": _rounded(summary.cosine), "overlap": _rounded(summary.overlap)}
    return {"effective": summary.effective_heads, "start": start, **similarity, "heads": facts}


def _start(summary: Summary) -> dict[str, float]:
    """Choose the head and the token of a layer with which the page opens, and score the head.

    A telling head attends to other places for other queries, and not only beside the diagonal. Its score is the mean
    over the queries of the largest weight away from the diagonal, less the mean weight of that key, times the share of
    the keys that are the largest of some query.
    """
    maps = torch.stack([pooled.sum(0) for pooled in summary.pooled])  # (H,G,G)
    near = torch.ones(maps.shape[1:], dtype=torch.bool).triu(-1).tril(1)
    strongest, places = (maps - maps.mean(1, keepdim=True)).masked_fill(near, 0).max(-1)
    distinct = torch.tensor([len(each.unique()) / len(each) for each in places])
    scores = strongest.mean(-1) * distinct
    head = int(scores.argmax())
    return {"head": head, "token": int(strongest[head].argmax()) * summary.bin_size, "score": float(scores[head])}


def _stored(head: Head, log_total: Tensor, blocks: Blocks) -> dict[str, Any]:
    """Store what the page needs to compute any weight of a head."""
    facts: dict[str, Any] = {"size": head.num_keys, "components": head.num_components}
    if not isinstance(head, Factors):
        return facts | {"weights": blocks.logs(head.rows().components.double().numpy(), "u16")}
    head = head.to("cpu")
    pack = blocks.steps if fits_16_bits(head) else blocks.floats
    floats = {"row": head.row, "column": head.column, "total": log_total}
    smallest = torch.finfo(torch.float32).min  # in place of -inf
    return facts | {
        "query": pack(head.query.numpy()),
        "key": pack(head.key.numpy()),
        "scale": head.scale.tolist(),
        **{name: blocks.floats(values.clamp(min=smallest).numpy()) for name, values in floats.items()},
        "log": head.link == "log",
        "hard": head.hard,
        "causal": head.is_causal,
        "window": head.window,
    }


def _rounded(values: Tensor) -> Any:
    return values.double().round(decimals=4).tolist()


def _asset(name: str) -> str:
    return resources.files("mgk.inspect").joinpath("assets", name).read_text(encoding="utf-8")
