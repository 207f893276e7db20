"""Load a language model and stream the text that it generates."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

from mgk.hf.convert import check_model, from_run, is_run, most_positions
from mgk.hf.tokenizer import tokenizer_of
from mgk.merge.sums import check_sums
from mgk.train.config import read
from mgk.train.data import load as load_data
from mgk.train.data import root_of


def load_for_generation(
    folder: str | Path, *, which: str = "best", data_root: str | Path | None = None
) -> tuple[Any, Any]:
    """Load the language model and the tokenizer of a run, or of the folder of a Transformers model."""
    folder = Path(folder)
    if not is_run(folder):
        check_model(folder)
        return load_folder(folder)
    settings = read(folder / "config.json")
    if settings.kind != "language":
        raise ValueError(f"{folder}: expected a language model, got a {settings.kind}")
    return from_run(folder, which), tokenizer_of(load_data(settings, root_of(folder, data_root)))


def load_folder(folder: str | Path) -> tuple[Any, Any]:
    """Load a language model of Transformers and its tokenizer, in evaluation mode; code beside them is never run."""
    check_sums(Path(folder))
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)
    try:
        return model.eval(), AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except ImportError:
        raise
    except Exception as error:  # each library has errors of its own, which name no file
        raise OSError(f"{folder}: its tokenizer cannot be read ({' '.join(str(error).split())})") from error


class _Streamer(TextStreamer):
    """Passes each finished piece of text to a function."""

    def __init__(self, tokenizer: Any, shown: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, clean_up_tokenization_spaces=False)
        self.shown = shown

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.shown(text)


def stream(model: Any, tokenizer: Any, prompt: str, shown: Callable[[str], None], **options: Any) -> None:
    """Generate, and call `shown` with each piece of the continuation; with beams, once at the end.

    Args:
        model: a Transformers model with `generate`.
        tokenizer: its tokenizer.
        prompt: the text to continue; an empty one is a line break.
        shown: called with the text.
        options: arguments of `generate`.
    """
    inputs = tokenizer(prompt or "\n", return_tensors="pt", return_token_type_ids=False).to(model.device)
    length = inputs["input_ids"].shape[1]
    if not length:
        raise ValueError(f"--prompt: expected at least one token, got none in {prompt!r}")
    limit, new = most_positions(model.config), options.get("max_new_tokens", 0)
    if limit is not None and length + new > limit:
        most = f"at most {limit - length} after this prompt (learned positions)"
        raise ValueError(f"--tokens: expected {most}, got {new}")
    if model.generation_config.pad_token_id is None:
        options.setdefault("pad_token_id", 0)  # never used: there is one row and no padding
    beams = options.get("num_beams", 1) > 1
    if model.device.type == "cuda" and not beams:  # steps from a CUDA graph; beams replace the buffers in every step
        options.setdefault("cache_implementation", "static")
    row = model.generate(**inputs, **options, streamer=None if beams else _Streamer(tokenizer, shown))[0, length:]
    if beams:
        shown(tokenizer.decode(row, clean_up_tokenization_spaces=False))
