"""Halve the heads of a model that was trained with softmax attention: merge them in pairs, then fine-tune briefly.

The model, a small GPT-2, learns to repeat a random sequence. Merging is compared with dropping every second head; both
are then fine-tuned for a tenth of the steps.

python examples/convert_softmax.py [STEPS]     (for your own model: mgk convert --from MODEL --heads-to-mixtures --help)
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

import mgk.hf

LENGTH, TOKENS = 12, 32


def batches(count: int, seed: int) -> Iterator[dict[str, Tensor]]:
    """Random sequences, each repeated once; only the repetition can be predicted and has labels."""
    draw = torch.Generator().manual_seed(seed)
    for _ in range(count):
        part = torch.randint(TOKENS, (64, LENGTH), generator=draw)
        yield {"input_ids": torch.cat((part, part), 1), "labels": torch.cat((torch.full_like(part, -100), part), 1)}


def main(steps: int = 400) -> dict[str, float]:
    torch.manual_seed(0)
    settings = {"n_embd": 64, "n_layer": 2, "n_head": 8, "n_positions": 2 * LENGTH, "vocab_size": TOKENS}
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = GPT2LMHeadModel(GPT2Config(**settings, **no_dropout, bos_token_id=0, eos_token_id=0))
    mgk.hf.finetune(model, batches(steps, 0), steps=steps, lr=3e-3)
    losses = {"8 heads": mgk.hf.mean_loss(model, batches(4, 1))}

    for method in ("merge", "drop"):
        smaller, report = mgk.hf.merge_heads(model, batches(2, 2), method=method)
        losses[method] = mgk.hf.mean_loss(smaller, batches(4, 1))
        short = max(1, steps // 10)
        mgk.hf.finetune(smaller, batches(short, 3), steps=short, lr=1e-3)
        losses[f"{method}, tuned"] = mgk.hf.mean_loss(smaller, batches(4, 1))
        (heads, fewer), (size, smaller_size), (cache, less) = report.heads, report.parameters, report.cache
        print(f"{method}: heads {heads} -> {fewer}, parameters {size:,} -> {smaller_size:,}, cache {cache} -> {less}")
    print("  ".join(f"{name} {loss:.3f}" for name, loss in losses.items()))
    return losses


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
