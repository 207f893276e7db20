"""Any Transformers model of text as a model of the explorer page (needs Transformers).

Softmax attention is shown by the weights that the model itself returns (`output_attentions`). A model with
`mgk.nn.MixtureAttention` is shown by its queries and keys, with its components.

H heads, N positions.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from mgk.inspect.collect import collect
from mgk.inspect.heads import Dense
from mgk.inspect.page import DENSE_LIMIT, Answer, Model
from mgk.inspect.tokens import covered
from mgk.nn import MixtureAttention
from mgk.ops.arguments import check_count

WEIGHTS = 8_000_000  # attention weights on a page by default: about 15 MB
TASKS = {
    "ForCausalLM": "AutoModelForCausalLM",
    "LMHeadModel": "AutoModelForCausalLM",
    "ForSequenceClassification": "AutoModelForSequenceClassification",
}


def pretrained_model(name: str, text: str, *, length: int | None = None) -> Model:
    """Run a Transformers model on a text and return what the page shows of it.

    Args:
        name: folder, or name on the hub. Code beside the weights is never run. `import mgk.hf` registers the models of
            mgk first.
        text: the input.
        length: cut the text to this many tokens; by default to what the model reads and a page can hold.
    """
    model, tokenizer = load(name)
    limit = _limit(model.config, length)
    ids, labels, unseen, truth = encode(tokenizer, text, limit)
    answers = _answers(model)
    mixture = any(isinstance(module, MixtureAttention) for module in model.modules())
    with torch.no_grad():
        output = model(input_ids=ids, **({} if mixture else {"output_attentions": True}))
    answer = None if answers is None else _answer(answers, output.logits, model.config, tokenizer, truth)
    note = f"{type(model).__name__}, {sum(each.numel() for each in model.parameters()):,} parameters"
    shown = name.rstrip("/").rsplit("/", 1)[-1]
    if mixture:
        return Model.of_layers(shown, labels, collect(model, ids), note=note, unseen=unseen, answer=answer)
    heads = [[Dense.of(head) for head in layer[0].float()] for layer in _attentions(output, name)]
    return Model(shown, labels, heads, note=note, unseen=unseen, answer=answer)


def load(name: str) -> tuple[Any, Any]:
    """Load a model, or the encoder of an encoder-decoder, and its tokenizer."""
    try:
        import transformers
    except ImportError:
        raise ImportError("--hf needs Transformers 5: pip install 'mgk[hf]'") from None

    try:
        config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        architecture = (config.architectures or [""])[0]
        auto = next((auto for ending, auto in TASKS.items() if architecture.endswith(ending)), "AutoModel")
        model = getattr(transformers, auto).from_pretrained(
            name, trust_remote_code=False, attn_implementation="eager", dtype=torch.float32
        )
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"--hf: expected the folder or the hub name of a Transformers model of text, got {name!r}: {reason}"
        ) from None
    if config.is_encoder_decoder:
        model = model.get_encoder()
    return model.eval(), tokenizer


def encode(tokenizer: Any, text: str, limit: int) -> tuple[Tensor, list[str], str, int | None]:
    """Return the ids (1,N) of a text, a label for each, the text after them and the id of the next token, if any."""
    if not tokenizer.is_fast:
        raise ValueError(f"--hf: expected a model with a fast tokenizer, got {type(tokenizer).__name__}")
    options = {"return_offsets_mapping": True, "return_special_tokens_mask": True, "verbose": False}
    whole = tokenizer(text, **options)
    found = tokenizer(text, **options, truncation=True, max_length=limit)
    ids, offsets = found["input_ids"], found["offset_mapping"]
    if not ids:
        raise ValueError("--text: expected at least one token, got none")
    names = tokenizer.convert_ids_to_tokens(ids)
    special = [
        name if is_special else None for name, is_special in zip(names, found["special_tokens_mask"], strict=True)
    ]
    labels = covered(text, offsets, special)
    read = max(end for _, end in offsets)
    truth = whole["input_ids"][len(ids)] if len(whole["input_ids"]) > len(ids) else None
    return torch.tensor([ids]), labels, text[read:], truth


def _limit(config: Any, length: int | None) -> int:
    """Return the maximum number of tokens."""
    most = min(DENSE_LIMIT, getattr(config, "max_position_embeddings", None) or DENSE_LIMIT)
    if length is not None:
        if check_count("--length", length) > most:
            raise ValueError(f"--length: expected at most {most} for this Transformers model, got {length}")
        return length
    layers, heads = (getattr(config, name, None) or 12 for name in ("num_hidden_layers", "num_attention_heads"))
    return min(most, max(16, math.isqrt(WEIGHTS // (layers * heads))))


def _attentions(output: Any, name: str) -> list[Tensor]:
    """Return the weights (1,H,N,N) of the layers that have attention."""
    found = [layer for layer in output.get("attentions") or () if layer is not None]
    if not found:
        raise ValueError(f"--hf: expected a model that returns its attention weights, {name!r} returned none")
    return found


def _answers(model: Any) -> str | None:
    """Return what the model predicts: "next token", "class" or nothing that the page can show."""
    name = type(model).__name__
    if name.endswith("ForSequenceClassification"):
        return "class"
    return "next token" if model.can_generate() else None


def _answer(what: str, logits: Tensor, config: Any, tokenizer: Any, truth: int | None) -> Answer:
    if what == "class":
        return Answer.of_logits(what, logits[0], lambda index: str(config.id2label.get(index, index)))

    def name(index: int) -> str:
        return str(tokenizer.decode([index]))

    return Answer.of_logits(what, logits[0, -1], name, None if truth is None else name(truth))
