"""Evaluate a trained model: accuracy, or perplexity in two ways that must not be confused; and count its FLOPs.

B windows of a batch, N positions of a window, T tokens of a text.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mgk.data import Stream
from mgk.models import LanguageModel, build
from mgk.models.config import LanguageModelConfig, MatcherConfig, ModelConfig, TranslatorConfig, VisionConfig
from mgk.models.cost import stack_flops, translator_flops
from mgk.ops.arguments import check_count
from mgk.train import checkpoint, config, data
from mgk.train.config import Config
from mgk.train.fabric import launch
from mgk.train.learner import Learner, load_weights, perplexity
from mgk.train.progress import Progress


def evaluate(
    run: str | Path,
    *,
    split: str = "",
    which: str = "best",
    sliding: bool | None = None,
    batch: int = 256,
    device: str = "auto",
    data_root: str | Path | None = None,
    quiet: bool = True,
) -> dict[str, Any]:
    """Evaluate a run on a split.

    Args:
        run: folder of the run.
        split: which split; "" is the test split of its configuration.
        which: checkpoint, "best" or "last".
        sliding: for a language model, also compute the paper's perplexity, with a window that slides by one token. None
            does so on a GPU, where it takes minutes, but not on a CPU.
        batch: windows per batch.
        device: "auto", "cpu" or "cuda".
        data_root: folder of the prepared data sets; None is the one that the run was trained with.
        quiet: show no progress.
    """
    check_count("batch", batch)
    folder = Path(run)
    own = config.read(folder / "config.json")
    settings = config.replace(own, device=device, strategy="auto", accumulate=1, graphs="auto")
    saved = checkpoint.load(existing(folder, which))
    split = split or settings.data.test
    learner = Learner(launch(settings), settings)
    learner.load(saved.weights)
    source = data.Source(settings, data.root_of(folder, data_root), pin=learner.device.type == "cuda")
    result: dict[str, Any] = {"run": str(run), "checkpoint": which, "step": saved.step, "split": split}
    measured = learner.evaluate(source.evaluation(split))
    if settings.kind != "language":
        return result | measured
    length = settings.model.max_length  # type: ignore[union-attr]
    ratio = source.prepared.manifest["facts"].get("bytes_per_token", {}).get(split)
    result |= {"window": length, "non-overlapping": bits(measured["loss"], ratio)}
    if sliding or (sliding is None and learner.device.type == "cuda"):
        text = source.prepared.split(split)
        assert isinstance(text, Stream)  # the data of every language model
        with torch.no_grad(), learner.fabric.autocast():
            loss = sliding_loss(learner.model, text.tokens, length, batch, quiet=quiet)
        result["sliding by one"] = bits(loss, ratio)
    return result


def sliding_loss(model: LanguageModel, tokens: Any, window: int, batch: int, *, quiet: bool = True) -> float:
    """Return the mean loss in nats per token as the paper measures it: every token but the first is predicted once.

    A window of N tokens slides by one token. All positions of the first window count, and the last position of every
    other one, so that a token is predicted from the N tokens before it, or from all if there are fewer. The windows of
    a batch are rows of one strided view, and the softmax is computed only for the positions that count.
    """
    check_count("batch", batch)
    model.eval()
    device = next(model.parameters()).device
    tokens = torch.from_numpy(np.asarray(tokens).astype(np.int64)).to(device)
    window = min(window, len(tokens) - 1)
    rows = tokens.unfold(0, window + 1, 1)  # (T - N, N + 1): a window, and the token after each of its tokens

    def losses(part: Tensor, last: int | None) -> Tensor:
        return model.token_losses({"tokens": part[:, :-1], "target": part[:, 1:]}, last=last).double().sum()

    total = losses(rows[:1], None)
    with Progress("sliding window", len(rows), 1, quiet=quiet) as progress:
        for start in range(1, len(rows), batch):
            total += losses(rows[start : start + batch], 1)
            progress.show(min(start + batch, len(rows)))
    return float(total) / (len(tokens) - 1)


def bits(loss: float, bytes_per_token: float | None = None) -> dict[str, float]:
    """Convert a loss in nats per token to perplexity (for words) and bits (for bytes), also per byte of a tokenizer."""
    found = {"loss": loss, "perplexity": perplexity(loss), "bits": loss / float(np.log(2))}
    return found | ({} if bytes_per_token is None else {"bits per byte": found["bits"] / bytes_per_token})


def load_model(run: str | Path, which: str = "best") -> tuple[Any, Config]:
    """Return the trained model of a run, in evaluation mode, and its configuration."""
    settings = config.read(Path(run) / "config.json")
    model = build(settings.model)
    load_weights(model, checkpoint.load(existing(Path(run), which)).weights)
    return model.eval(), settings


def existing(folder: Path, which: str) -> Path:
    if which not in ("best", "last"):
        raise ValueError(f"which: expected best or last, got {which!r}")
    found = checkpoint.find(folder, which)
    if found is None:
        raise ValueError(f"{folder}: no checkpoint {which} yet; train it first")
    return found


def flops(model: ModelConfig) -> int:
    """FLOPs of the layers, forward and backward, for one example of full length, without embeddings and output."""
    if isinstance(model, TranslatorConfig):
        return translator_flops(model).total
    if isinstance(model, VisionConfig):
        positions = (model.image_size // model.patch_size) ** 2 + (model.pooling == "class")
    else:
        positions = model.max_length
    layers = stack_flops(model, positions, causal=isinstance(model, LanguageModelConfig)).total
    return layers * (2 if isinstance(model, MatcherConfig) else 1)
